"""What the teacher says of a text that it did not write: its distribution at each token of a response.

Shapes: B rows of a batch, L longest prompt and response, V vocabulary, K top log-probs.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fewstep.teachers.collect import prepare
from fewstep.teachers.config import PromptsConfig, TargetsConfig, TeacherConfig
from fewstep.teachers.generate import record
from fewstep.teachers.generation import Generation
from fewstep.teachers.load import describe, load_for_stage
from fewstep.teachers.prompts import prompt_id

# (sample ids, a response for each) → its Generation: the same ids with the teacher's top-k
Scorer = Callable[[list[str], list[list[int]]], list[Generation]]


@torch.inference_mode()
def score(
    model: Any, prompts: list[list[int]], responses: list[list[int]], top_logprobs: int, batch_size: int = 16
) -> list[Generation]:
    """Return each response with the teacher's log-probabilities at its tokens, given the tokens before them.

    Args:
        model: a causal LM of transformers, in eval mode.
        prompts, responses: token ids, one non-empty list a row; a response ends with its EOS if it has one.
        top_logprobs: K ≥ 1, kept per token, at T=1 over the whole vocabulary.
        batch_size: rows scored together, those of like length.

    Returns:
        One Generation a row, in order; its finish_reason is left to the caller.
    """
    out = [Generation(ids=list(response)) for response in responses]
    for i, logits in _outputs(model, prompts, responses, batch_size):
        record(logits, top_logprobs, [out[i]] * len(logits))
    return out


@torch.inference_mode()
def token_logprobs(
    model: Any, prompts: list[list[int]], responses: list[list[int]], batch_size: int = 16
) -> list[list[float]]:
    """Return ln p of every response token given those before it, at T=1; arguments as of `score`."""
    out: list[list[float]] = [[] for _ in responses]
    for i, logits in _outputs(model, prompts, responses, batch_size):
        logprobs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        tokens = torch.tensor(responses[i], device=logits.device)
        out[i] = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    return out


def _outputs(
    model: Any, prompts: list[list[int]], responses: list[list[int]], batch_size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each row's place and the [len(response), V] logits that say its tokens."""
    takes = inspect.signature(model.forward).parameters
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]) - len(responses[i]))
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        whole = [prompts[i] + responses[i][:-1] for i in rows]
        longest = max(map(len, whole))
        # aligned to the right, so that the head runs on responses alone
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in whole], device=model.device)  # [B, L]
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in whole], device=model.device)
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if "position_ids" in takes:
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if "logits_to_keep" in takes:
            given["logits_to_keep"] = max(len(responses[i]) for i in rows)
        logits = model(**given).logits  # [B, longest response, V]
        for row, i in zip(logits, rows):
            yield i, row[len(row) - len(responses[i]) :]


def scorer(teacher: TeacherConfig, prompts: PromptsConfig, targets: TargetsConfig, folder: Path) -> Scorer:
    """Return a function that scores responses to the recipe's prompts, as the teacher saw these when it wrote the targets.

    The teacher is loaded when it is first asked.

    Args:
        folder: of the targets stage.
    """
    loaded: list[Any] = []

    def ask(ids: list[str], responses: list[list[int]]) -> list[Generation]:
        if not loaded:
            model, tokenizer = load_for_stage(teacher, folder)
            work = prepare(tokenizer, describe(teacher.model, teacher.revision), prompts, targets)
            loaded.extend((model, {p.id: seen for p, seen in zip(work.prompts, work.teacher_ids)}))
        model, seen = loaded
        return score(
            model,
            [seen[i] if i in seen else seen[prompt_id(i)] for i in ids],
            responses,
            targets.top_logprobs,
            targets.batch_size,
        )

    return ask
