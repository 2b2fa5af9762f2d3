"""Are the equalities that the tests prove on a CPU true on this device? Tiny models in fp64, a line for each check.

    python benchmarks/gpu_checks.py --out checks.json

The first part of `gpu.sh`: whatever fails here makes every later figure worthless.
"""

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from fewstep import machine
from fewstep.kernels import block_mask
from fewstep.kernels import linear_rows_loss as rows_loss
from fewstep.runstore import write_atomic
from fewstep.students.attention import attention_implementation, attention_of
from fewstep.students.decoding import decode
from fewstep.students.decoding.forward import Forward
from fewstep.students.layout import Example, block_index, body_hidden, build_batch, filled_length

# last on the path: the root's `kernels` must not stand before a package of that name, for which transformers looks
sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.students.builders import EOS, FAMILIES, MASK, student  # noqa: E402

DRY = ("llama", "gemma2")
MIXED = dict(temperature=[0.0, 1.0] * 3, top_p=[1.0, 0.9] * 3, seed=list(range(6)))
SAMPLERS: tuple[dict, ...] = ({"sampler": "threshold", "threshold": 0.3}, {"sampler": "verify"}, {"sampler": "ar"})
# heads of 16: flex_attention's least on CUDA
_WIDE = dict(vocab_size=MASK + 1, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=3, initializer_range=0.2)  # fmt: skip
WIDE = {
    "llama": LlamaConfig(**_WIDE, num_key_value_heads=2),
    "mistral": MistralConfig(**_WIDE, num_key_value_heads=2, sliding_window=200),
    "gemma2": Gemma2Config(**_WIDE, num_key_value_heads=2, head_dim=16, sliding_window=200),
}
# transformers computes norms, rotary angles and eager softmaxes in fp32 whatever the weights' dtype, and logits leave the
# decoder in fp32: of logits up to about 10 that is 1e-6 and some; a wrong mask, slot or position shows from 1e-2 on
CLOSE = 5e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON with every check")
    parser.add_argument("--dry", action="store_true", help="two families, on the CPU")
    args = parser.parse_args()
    device = "cpu" if args.dry else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(_fail("no CUDA GPU; --dry runs the same code on a CPU"))
    rows = []
    for name, family, check in checks(DRY if args.dry else tuple(sorted(FAMILIES)), device):
        try:
            worst, fault = check(), None
        except Exception as error:  # every check is to be heard of, whatever became of the ones before it
            worst, fault = None, f"{type(error).__name__}: {str(error)[:300]}"
        rows.append({"check": name, "family": family, "passed": fault is None, "worst": worst, "fault": fault})
        print(
            f"{'ok  ' if fault is None else 'FAIL'} {name:<30} {family:<14} {fault or f'worst {worst:.1e}'}", flush=True
        )
    hardware = {"hardware": machine.hardware(), "versions": machine.versions(), "cuda": torch.version.cuda}
    write_atomic(args.out, json.dumps({**hardware, "device": device, "rows": rows}, indent=1) + "\n")
    failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} checks passed on {device}")
    raise SystemExit(1 if failed else 0)


def checks(families: tuple[str, ...], device: str):
    """Yield (name, family, check); a check returns its largest difference, or raises."""
    for family in families:
        model = student(family).to(device)
        given: dict[str, Callable[[], float]] = {
            "device = CPU": partial(device_equals_cpu, model),
            "verify = plain generate": partial(verify_equals_generate, model),
            "batch = singles": partial(batch_equals_singles, model),
            "cached = uncached": partial(cached_equals_uncached, model),
        }
        for name, check in given.items():
            yield name, family, check
        for attention in ("block", "block_causal_inside"):
            its = student(family, attention).to(device)
            yield f"layout = cache, {attention}", family, partial(layout_equals_cache, its, attention)
    for family, config in WIDE.items():
        yield "flex_attention = dense mask", family, partial(flex_equals_dense, config, device)
    for case in rows_loss.cases():
        yield "chunked loss = dense", case[0], partial(chunked_loss_equals_dense, device, *case[1:])


# --- The checks ---------------------------------------------------------------------------------


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of 1 to 19 tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 38) for _ in range(rng.randrange(1, 20))] for _ in range(count)]


@torch.no_grad()
def device_equals_cpu(model) -> float:
    """The body over a training batch, and the text that is decoded, on the device and on the CPU."""
    here, batch = copy.deepcopy(model).cpu(), build_batch([example(5, 10), example(9, 12)], MASK, "block", 0.1)
    device = model.device
    gap = _gap(body_hidden(model, batch.to(device), "block"), body_hidden(here, batch, "block"))
    for settings in SAMPLERS:
        ours, theirs = (
            decode(m, prompts(6, 1), max_new_tokens=12, eos_token_ids=[EOS], **settings) for m in (model, here)
        )
        _same([a.ids for a in ours], [a.ids for a in theirs], settings)
    return gap


def verify_equals_generate(model) -> float:
    """`verify` and `ar` write what transformers' greedy generate writes."""
    batch, expected = prompts(5, 3), []
    for prompt in batch:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    for settings in ({"sampler": "verify", "block_size": 5}, {"sampler": "verify"}, {"sampler": "ar"}):
        got = decode(model, batch, max_new_tokens=20, eos_token_ids=[EOS], **settings)
        _same([a.ids for a in got], expected, settings)
    return 0.0


def batch_equals_singles(model) -> float:
    """Six requests, greedy and drawn, together and each alone: texts, forwards, steps."""
    batch, limits = prompts(6, 2), dict(max_new_tokens=10, eos_token_ids=[EOS])
    for settings in SAMPLERS:
        together = decode(model, batch, **limits, **MIXED, **settings)
        for i, prompt in enumerate(batch):
            its = {name: value[i] for name, value in MIXED.items()}
            alone = decode(model, [prompt], **limits, **its, **settings)[0]
            a = together[i]
            _same((a.ids, a.nfe, a.steps), (alone.ids, alone.nfe, alone.steps), settings)
    return 0.0


@torch.no_grad()
def cached_equals_uncached(model) -> float:
    """Blocks of rows of unequal length over a growing cache, and the same in one forward from nothing."""
    batch = prompts(3, 4)
    forward, lengths, pending, worst = Forward(model, capacity=60), [0, 0, 0], batch, 0.0
    whole = [list(p) for p in batch]
    for block in range(3):
        noisy = [[7 + block, MASK, 9, MASK, MASK][: 5 - row] for row in range(3)]
        logits = forward(lengths, pending, noisy, keep=5)
        for row, x in enumerate(noisy):
            fresh = Forward(model, capacity=60)([0], [whole[row]], [x], keep=len(x))[0]
            worst = max(worst, _gap(logits[row, : len(x)], fresh))
        lengths = [n + len(p) for n, p in zip(lengths, pending)]
        pending = [[10 + block + i for i in range(len(x))] for x in noisy]
        whole = [w + p for w, p in zip(whole, pending)]
    return worst


@torch.no_grad()
def layout_equals_cache(model, attention: str) -> float:
    """What the loss sees of a noisy block is what the sampler sees of it."""
    row, device, worst = example(5, 10), model.device, 0.0
    hidden = body_hidden(model, build_batch([row], MASK, attention, 0.1).to(device), attention)
    trained = model.get_output_embeddings()(hidden)[15:].float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    trained = cap * torch.tanh(trained / cap) if cap else trained
    trained[:, MASK] = -torch.inf
    forward, length, pending = Forward(model, capacity=40), 0, row.prompt.tolist()
    for b in range(row.block[-1] + 1):
        where = np.flatnonzero(row.block == b)
        block = np.where(row.masks[0][where], MASK, row.noisy[where]).tolist()
        logits = forward([length], [pending], [block], keep=len(block))[0]
        worst = max(worst, _gap(logits, trained[torch.from_numpy(where).to(device)]))
        length, pending = length + len(pending), row.noisy[where].tolist()
    return worst


def flex_equals_dense(config, device: str) -> float:
    """Packed rows under flex_attention and under the dense mask: hidden states and, where there is a GPU, gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_implementation(config)).to(device)
    rows = [example(p, r) for p, r in ((30, 90), (9, 40), (61, 120), (17, 70), (25, 33))]
    batch = build_batch(rows, MASK, "block", 0.1, row_tokens=420, multiple=block_mask.BLOCK).to(device)
    upstream = torch.randn(len(batch.rows), config.hidden_size, generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for implementation in (model.config._attn_implementation, "flex_attention"):
        stance = "force_eager" if device == "cpu" else "default"
        with attention_of(model, implementation), torch.set_grad_enabled(device != "cpu"), torch.compiler.set_stance(stance):  # fmt: skip
            hidden = body_hidden(model, batch, "block")[batch.rows]
            if device != "cpu":
                (hidden * upstream / len(hidden)).sum().backward()
        found.append([hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad(set_to_none=True)
    return max(
        _gap(flex, dense, 1e-3) for dense, flex in zip(*found, strict=True)
    )  # fp32; a wrong mask shows from 1e-2 on


def chunked_loss_equals_dense(device: str, R: int, D: int, V: int, chunk: int, softcap, bias: bool) -> float:
    """The head and a loss in chunks: value and gradients against all logits at once."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator).to(device) for size in ((R, D), (V, D), (V,))]
    labels = torch.randint(V, (R,), generator=generator).to(device)

    def loss_fn(logits, rows):
        return torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum")

    found = []
    for way, also in ((rows_loss.linear_rows_loss, {"chunk_rows": chunk}), (rows_loss.linear_rows_loss_reference, {})):
        h, w, b = (t.clone().requires_grad_() for t in made)
        loss = way(h, w, loss_fn, bias=b if bias else None, softcap=softcap, **also)
        loss.backward()
        found.append([loss.detach() / R, h.grad, w.grad, *([b.grad] if bias else [])])
    return max(_gap(ours, dense, 1e-4) for ours, dense in zip(*found))  # fp32, gradients up to about 10


# --- Their parts --------------------------------------------------------------------------------


def example(prompt: int, response: int, block_size: int = 4, first: int = 2) -> Example:
    """Return a response with half of its positions masked, at least one a block."""
    rng = np.random.default_rng(prompt + response)
    n = filled_length(response, block_size, first)
    tokens = rng.integers(3, 38, prompt + response)
    block, masks = block_index(n, block_size, first), rng.random((1, n)) < 0.5
    masks[0, np.searchsorted(block, np.arange(block[-1] + 1))] = True
    noisy = np.concatenate([tokens[prompt:], np.full(n - response, EOS)])
    return Example(tokens[:prompt], tokens[prompt:], noisy, block, masks)


def _gap(ours: torch.Tensor, theirs: torch.Tensor, most: float = CLOSE) -> float:
    """Return the largest difference; where both are -inf there is none."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    gap = float((ours - theirs).masked_fill((ours == theirs), 0.0).abs().max())
    if not gap <= most:
        raise AssertionError(f"differs by {gap:.2e}, allowed are {most:.0e}")
    return gap


def _same(ours, theirs, settings: dict) -> None:
    if ours != theirs:
        raise AssertionError(f"{settings}: {ours} is not {theirs}")


def _fail(why: str) -> int:
    print(f"gpu_checks: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
