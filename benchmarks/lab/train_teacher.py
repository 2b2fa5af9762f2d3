"""Train a small teacher for one of the lab's tasks: a Llama of about 3M parameters, from random weights, on one core.

    python benchmarks/lab/train_teacher.py
    python benchmarks/lab/train_teacher.py --init recipes/quickstart/teacher --steps 300 --learning-rate 5e-4 --seed 2 --eval-rows 1000
    python benchmarks/lab/train_teacher.py --init recipes/quickstart/teacher --steps 300 --learning-rate 3e-4 --seed 3 --eval-rows 1000

The later commands go on from the checkpoint of the one before. The rows are generated without end from the
training split only, each seen once where there is no end of them. The model is measured greedily on rows of the evaluation
split, in float32, after its bfloat16 weights were saved and loaded back.

Shapes: B batch, L length, V vocabulary.
"""

import argparse
import itertools
import json
import math
import platform
import shlex
import sys
import time
from datetime import date
from pathlib import Path

import tokenizers
import torch
import transformers
from tasks import TASKS, Task, rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parents[2]
USER, ASSISTANT, EOS, PAD = "<|user|>", "<|assistant|>", "<|eos|>", "<|pad|>"
MAX_LENGTH = 512  # positions the model is declared for
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}" + USER + "{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}" + ASSISTANT + "{% generation %}{{ m['content'] }}" + EOS + "{% endgeneration %}"
    "{% else %}{{ raise_exception('this model knows user and assistant turns only, not ' + m['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)  # fmt: skip


def build_tokenizer(task: Task, vocab_size: int, num_rows: int, seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, digits one by one, on generated messages and answers.

    Args:
        vocab_size: entries, the four special tokens included.
        num_rows: rows of the training split it is trained on.
        seed: of those rows.

    Returns:
        A tokenizer with a chat template; its pad and its end of turn are different tokens.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ((row["instruction"], row["response"]) for row in itertools.islice(task.stream("train", seed), num_rows))
    core.train_from_iterator(itertools.chain.from_iterable(texts), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, additional_special_tokens=[USER, ASSISTANT],
        model_max_length=MAX_LENGTH, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> LlamaForCausalLM:
    """Return a Llama with random weights (global generator) that stops at the tokenizer's EOS."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True,
        initializer_range=0.02, **ids,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


def encode(tokenizer: PreTrainedTokenizerFast, row: dict) -> tuple[list[int], list[int]]:
    """Return a row's prompt ids (chat template applied) and its response ids, EOS included."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["instruction"]}], add_generation_prompt=True, tokenize=False
    )
    answer = row["response"] + EOS
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))


def collate(pairs: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad prompt + response on the right; -100 labels everything that is not response.

    Returns:
        ids and labels, both [B, L] i64. Padding stands right of every real token, so causal attention
        never sees it and needs no mask.
    """
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), length), pad_id)
    labels = torch.full((len(pairs), length), -100)
    for i, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, args: argparse.Namespace) -> None:
    """Minimise the responses' cross-entropy over fresh rows: AdamW, warm-up, cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / args.warmup, 0.5 + 0.5 * math.cos(math.pi * step / args.steps)),
    )
    source = task.stream("train", args.seed)
    started = time.perf_counter()
    model.train()
    for step in range(1, args.steps + 1):
        pairs = [encode(tokenizer, next(source)) for _ in range(args.batch)]
        ids, labels = collate(pairs, model.config.pad_token_id)
        hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state  # [B, L-1, D]
        supervised = labels[:, 1:] != -100
        logits = model.lm_head(hidden[supervised])  # [rows, V]: the head runs on responses only
        loss = cross_entropy(logits, labels[:, 1:][supervised])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == 1:
            print(f"step {step:4d}  loss {loss.item():.4f}  {time.perf_counter() - started:.0f} s", flush=True)


@torch.inference_mode()
def exact_match(model, tokenizer, task: Task, split: str, count: int, seed: int, batch: int = 50) -> float:
    """Return the share of `count` rows whose greedy answer is the row's own, character by character."""
    right = 0
    model.eval()
    items = rows(task, split, count, seed)
    for start in range(0, count, batch):
        part = items[start : start + batch]
        prompts = [encode(tokenizer, row)[0] for row in part]
        width = max(map(len, prompts))
        ids = torch.full((len(part), width), tokenizer.pad_token_id)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask = (torch.arange(width) >= torch.tensor([[width - len(p)] for p in prompts])).long()
        out = model.generate(input_ids=ids, attention_mask=attention_mask, do_sample=False, max_new_tokens=96)
        texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        right += sum(text == row["response"] for text, row in zip(texts, part, strict=True))
    return right / count


def hardware() -> dict:
    """Name the machine in the words that a reader can compare."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names) or None,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and save a small teacher.")
    parser.add_argument("--task", choices=TASKS, default="booking")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: the shipped teacher of bookings, or data/TASK/"
    )
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--init", type=Path, metavar="DIR", help="go on from this checkpoint, not from random weights")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=24, help="rows per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=40, help="steps of linear warm-up")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--eval-rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1, help="of weights and training rows; not the shipped data's 0")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    task, own = TASKS[args.task], Path(__file__).parent / "data" / args.task
    booking = args.task == "booking"
    args.out = args.out or (ROOT / "recipes/quickstart/teacher" if booking else own / "teacher")
    args.results = args.results or (
        ROOT / "benchmarks/results/quickstart_teacher.json" if booking else own / "teacher.json"
    )
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    if args.init:
        tokenizer = AutoTokenizer.from_pretrained(args.init)
        model = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer(task, args.vocab, num_rows=4000, seed=args.seed)
        model = build_model(tokenizer, args.width, args.layers)
    started = time.perf_counter()
    train(model, tokenizer, task, args)
    seconds = time.perf_counter() - started
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    # What is measured is what was saved.
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    facts = {
        "command": shlex.join(["python", "benchmarks/lab/train_teacher.py", *sys.argv[1:]]),
        "steps": args.steps,
        "batch": args.batch,
        "seed": args.seed,
        "train_seconds": round(seconds),
        "parameters": model.num_parameters(),
        "vocab_size": len(tokenizer),
        "bytes": (args.out / "model.safetensors").stat().st_size,
    }
    measured = []
    for split in ("train", "eval"):
        share = exact_match(model, tokenizer, task, split, args.eval_rows, seed=0)
        measured.append({"split": split, "n": args.eval_rows, "exact_match": share, **facts})
        print(f"exact match on {args.eval_rows} rows of the {split} split: {share:.4f}", flush=True)
    earlier = json.loads(args.results.read_text())["rows"] if args.init and args.results.is_file() else []
    record = {
        "command": " && ".join(dict.fromkeys(row["command"] for row in [*earlier, *measured])),
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__, "tokenizers": tokenizers.__version__},
        "rows": [*earlier, *measured],
    }  # fmt: skip
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
