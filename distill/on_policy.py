"""On-policy rounds: the student decodes its training prompts, the teacher scores what it wrote, training goes on.

A round's texts are those that the teacher would not have written: somewhere a token is not the
teacher's own there. At each of their tokens the label is the teacher's own, given the student's
tokens before it, so the student learns to leave its mistakes and to go on behind them.
"""

import time
from pathlib import Path

from fewstep.chat import eos_ids
from fewstep.distill.config import OnPolicyConfig
from fewstep.distill.examples import keyed_rng
from fewstep.distill.samples import Samples, renamed, sample_of
from fewstep.progress import progress
from fewstep.records import read_rows, write_shard
from fewstep.signals import raise_if_stopped
from fewstep.students.decoding import decode

BATCH = 64  # prompts decoded together


def phase(step: int, max_steps: int, config: OnPolicyConfig | None) -> int:
    """Return how many rounds come before `step`; they cut the stage into equal parts."""
    return 0 if config is None else step * (config.rounds + 1) // max_steps


def begins(number: int, max_steps: int, config: OnPolicyConfig) -> int:
    """Return the first step after round `number`."""
    return -(-number * max_steps // (config.rounds + 1))


def round_file(folder: Path, number: int) -> Path:
    """Return where a round's texts are kept; `number` counts from 1."""
    return folder / "on_policy" / f"{number:02d}.parquet"


def record(model, tokenizer, samples: Samples, config: OnPolicyConfig, number: int, seed: int, path: Path, score):
    """Write the file of one round, on one rank; nothing is done where it exists.

    Args:
        model: the student as trained so far.
        samples: the targets; their prompts are asked, `config.prompts` of them.
        score: the teacher (teachers.scoring.Scorer).

    Raises:
        Stopped: between batches, on a signal.
    """
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    picked = keyed_rng(seed, number, "on-policy").permutation(len(samples))[: config.prompts]
    chosen = sorted((samples[i] for i in picked), key=lambda s: (len(s.prompt), s.id))
    longest = int(samples.response_lengths.max())
    decoded = []
    with progress(f"on-policy round {number}", len(chosen), "prompts") as bar:
        for first in range(0, len(chosen), BATCH):
            raise_if_stopped(f"on-policy round {number}: stopped; the same command begins the round anew")
            batch = chosen[first : first + BATCH]
            decoded += decode(
                model,
                [s.prompt.tolist() for s in batch],
                sampler="threshold",
                threshold=config.threshold,
                max_new_tokens=longest,
                eos_token_ids=eos_ids(model, tokenizer),
            )
            bar.advance(len(batch))
    scored = score([s.id for s in chosen], [d.ids for d in decoded])
    write_shard(
        path,
        [
            {
                "sample_id": f"{sample.id}/round{number}",
                "prompt_ids": sample.prompt.tolist(),
                "response_ids": answer.ids,
                "finish_reason": answer.finish_reason,
                "topk_ids": said.topk_ids,
                "topk_logprobs": said.topk_logprobs,
                "tail_mass": said.tail_mass,
                "text": tokenizer.decode(answer.ids, skip_special_tokens=True),
                "reference": "",
                "split": "train",
            }
            for sample, answer, said in zip(chosen, decoded, scored)
            if any(mine != best[0] for mine, best in zip(answer.ids, said.topk_ids))
        ],
    )


def wait_for(path: Path) -> None:
    """Return once the first rank has written a round's file.

    Raises:
        Stopped: on a signal.
    """
    while not path.exists():
        raise_if_stopped("on-policy round: stopped; the same command begins the round anew")
        time.sleep(0.2)


def mixed(samples: Samples, path: Path, share: float, seed: int) -> tuple[Samples, int]:
    """Return the targets and, as about `share` of the whole, a round's texts; and how many texts there are.

    Few texts are repeated, each time under another id, so with other masks; of many some are left out.
    """
    texts = [sample_of(row, on_policy=True) for row in read_rows(path)]
    texts = [texts[i] for i in keyed_rng(seed, path.stem, "on-policy texts").permutation(len(texts))]
    if not texts:
        return samples, 0
    wanted = round(share / (1 - share) * len(samples))
    copies = -(-wanted // len(texts))
    repeated = [renamed(text, k) for k in range(copies) for text in texts][:wanted]
    return samples.beside(repeated), len(texts)
