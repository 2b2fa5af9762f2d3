"""`fewstep bench`: tokens per second at batch 1, all systems in turn on every prompt."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewstep import chat, machine
from fewstep.distill.answering import student_folder
from fewstep.errors import UserError
from fewstep.eval import quality, rows, speed, stats, verdict
from fewstep.eval.speed import Contestant
from fewstep.progress import progress
from fewstep.students.convert import load_student
from fewstep.students.decoding.weights import column_major
from fewstep.teachers.config import PromptsConfig
from fewstep.teachers.hf import device, torch_dtype
from fewstep.teachers.load import load_teacher
from fewstep.teachers.prompts import read_prompts

PROMPTS = (
    "Write a short poem about the sea.",
    "Explain in three sentences why the sky is blue.",
    "List five things to take on a hike.",
    "Write a Python function that reverses a string.",
    "What is the difference between a virus and a bacterium?",
    "Summarise the story of Romeo and Juliet.",
    "How do I make tea?",
    "Write an email that asks for a day off.",
)
SEED = 0  # of the intervals' resampling


def measure(
    student: str, against: str | None, prompts: Path | None, limit: int, max_new_tokens: int, threshold: float
) -> dict:
    """Time the student's samplers `threshold` and `verify`, its own AR decoding, and the teacher's.

    AR decoding is tried in each way that `eval.speed` knows, and the fastest competes; the faster of the
    student's and the teacher's is the baseline of every speed-up.

    Args:
        student: a student's folder, or the folder of the stage that holds it.
        against: the teacher: a folder, a .gguf file or a Hub id.
        prompts: a JSONL file whose rows hold `instruction`; None: PROMPTS.
        limit: use only its first rows.
        max_new_tokens: the most tokens generated an answer.
        threshold: of the sampler `threshold`.

    Returns:
        JSON-able: hardware, versions, commit, the ways AR was tried in, and a row for each system and
        sampler with the keys of results.json.

    Raises:
        UserError: nothing to load, a prompt that fills a context, a setting out of range, or nothing to compare with.
        Stopped: a signal came between two prompts.
    """
    folder = student_folder(student)
    messages = [[{"role": "user", "content": text}] for text in PROMPTS]
    if prompts is not None:
        messages = [p.messages for p in read_prompts(PromptsConfig(source="jsonl", path=prompts, limit=limit))]
    model, tokenizer = load_student(folder, torch_dtype("auto"))
    ours = (column_major(model.to(device())), tokenizer)
    causal = model.config.fewstep["attention"] != "bidirectional"
    if not causal and against is None:
        raise UserError(f"STUDENT {student}: it has no AR decoding to compare with; name a teacher with --against")
    contestants: list[Contestant] = []
    tried: list[dict] = []
    forwards: dict[str, dict[int, int]] = {}
    systems = {}
    if against is not None:
        teacher, teacher_tokenizer = load_teacher(against)
        systems["teacher"] = (column_major(teacher), teacher_tokenizer)
    systems |= {"student": ours} if causal else {}
    for system, (its_model, its_tokenizer) in systems.items():
        ids = _encode(system, its_model, its_tokenizer, messages)
        eos = chat.eos_ids(its_model, its_tokenizer)
        ways = speed.ar_ways(f"{system} ar", its_model, ids, max_new_tokens=max_new_tokens, eos=eos)
        best, rates = speed.fastest(ways, len(ids))
        tried += [{"system": system, "implementation": k, "tokens_per_s": v} for k, v in rates.items()]
        contestants.append(_counting(best, its_model, forwards))
    baselines = [c.key for c in contestants]
    settings: dict[str, dict] = {key: {} for key in baselines}
    ids, eos = _encode("student", *ours, messages), chat.eos_ids(*ours)
    for sampler, its_settings in {"threshold": {"threshold": threshold}, **({"verify": {}} if causal else {})}.items():
        loop = speed.own_loop(f"student {sampler}", model, ids, sampler, max_new_tokens, eos, its_settings)
        contestants.append(_counting(loop, model, forwards))
        settings[loop.key] = its_settings
    with progress("speed at batch 1", len(ids), "prompts") as shown:
        try:
            timings = speed.time_alternating(contestants, len(ids), after_prompt=lambda: shown.advance(1))
        except ValueError as error:  # decode names a setting out of range
            raise UserError(str(error)) from None
    baseline = max(baselines, key=lambda key: speed.rate(timings[key]))
    measured = []
    for contestant in contestants:
        key, its = contestant.key, timings[contestant.key]
        timed = rows.Timed(its, timings[baseline], contestant.implementation, key == baseline)
        tokens, nfe = [t.tokens for t in its], [forwards[key][i] for i in range(len(its))]
        system, sampler = key.split()
        measured.append(
            {
                "system": system,
                "sampler": sampler,
                "settings": settings[key],
                "n": len(its),
                "tokens": sum(tokens),
                "nfe": sum(nfe) / len(nfe),
                "tpf": quality.ratio(tokens, nfe),
                "tpf_ci": stats.ratio_interval(tokens, nfe, seed=SEED),
                "is_speed_baseline": timed.is_baseline,
                **rows.speed_figures(timed, SEED),
            }
        )
    return {
        "student": str(folder),
        "teacher": against,
        "max_new_tokens": max_new_tokens,
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "ar_ways": tried,
        "rows": measured,
    }


def _encode(system: str, model: Any, tokenizer: Any, messages: Sequence[list[dict]]) -> list[list[int]]:
    """Return the [N] prompts as one system sees them."""
    encoded = [chat.encode_prompt(tokenizer, m) for m in messages]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for i, ids in enumerate(encoded):
        if context is not None and len(ids) >= context:
            raise UserError(
                f"prompt {i + 1} has {len(ids)} tokens for the {system}, whose context holds {context}; shorten it"
            )
    return encoded


def _counting(contestant: Contestant, model: Any, forwards: dict[str, dict[int, int]]) -> Contestant:
    """Return the contestant with its forwards for prompt i noted in forwards[key][i], in whatever way it decodes."""
    counts = forwards.setdefault(contestant.key, {})
    inner: Callable[[int], speed.Timing] = contestant.answer

    def answer(i: int) -> speed.Timing:
        counts[i] = 0

        def count(*_: Any) -> None:
            counts[i] += 1

        hook = model.base_model.register_forward_pre_hook(count)
        try:
            return inner(i)
        finally:
            hook.remove()

    return replace(contestant, answer=answer)


def as_text(facts: dict) -> str:
    """Return the figures as a table for people."""
    hardware = facts["hardware"]
    device_name = ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, {hardware['threads']} threads"
    n = facts["rows"][0]["n"]
    table = [("system", "decoding", "tokens/s", "TPF", "first token", "speed-up")]
    for row in facts["rows"]:
        table.append(
            (
                row["system"],
                verdict.setting_name(row["sampler"], row["settings"]),
                _with(row["tokens_per_s"], row["tokens_per_s_ci"], 0),
                _with(row["tpf"], row["tpf_ci"], 2),
                "n/a" if row["ttft_ms"] is None else f"{row['ttft_ms']:.1f} ms",
                "1 (the baseline)" if row["is_speed_baseline"] else _with(row["speedup"], row["speedup_ci"], 2),
            )
        )
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = [f"batch 1, {n} prompts in turn, at most {facts['max_new_tokens']} tokens each; {device_name}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
    names = ", ".join(sorted({f"{r['system']}: {r['implementation']}" for r in facts["rows"] if r["sampler"] == "ar"}))
    lines.append(f"in brackets 95 % intervals over prompts; the fastest AR loop of each ({names})")
    return "\n".join(lines)


def _with(value: float, interval: Sequence[float] | None, digits: int) -> str:
    if interval is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
