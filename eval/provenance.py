"""The report's small print: effort levels, what was run, what the words mean, what was not measured."""

import yaml

from fewstep.eval import verdict
from fewstep.eval.tables import cell, head_cell, row_name
from fewstep.markup import facts, section, tag, text

METRICS = {
    "acceptance": "Acceptance (overlap of draft and verify distributions)",
    "perplexity": "Teacher perplexity of the answers",
    "memory_mb": "Memory per system",
    "cost": "Cost per million tokens",
    "agreement": "Agreement with the greedy teacher",
    "delta": "Difference in score from the teacher",
    "agreement_own": "Agreement with the own AR decoding",
    "tokens_per_s": "Tokens/s, latencies and speed-up",
    "ttft_ms": "Time to first token",
    "aup": "AUP",
    "repetition": "Repetition",
    "entropy": "Entropy",
    "against_undistilled": "Difference from the undistilled student",
}
# Reasons are given once for a figure, not again for what is derived from it.
DERIVED = {
    "agreement_ci",
    "agreement_own_ci",
    "delta_ci",
    "tokens_per_s_ci",
    "speedup",
    "speedup_ci",
    "p50_ms",
    "p95_ms",
}
DERIVED |= {"speed_n", "implementation"}

DEFINITIONS = [
    (
        "Forward (NFE)",
        "Every forward pass of a decoding counts: draft, denoise, verify, commit, and the prefill where its logits yield a token. AR decoding is then exactly one token a forward. In the table: mean forwards per answer.",
    ),
    (
        "Tokens a forward (TPF)",
        "Generated tokens over forwards, both summed over all answers before dividing. The end-of-text token counts once; fill, cut tokens and tokens rewritten later never count.",
    ),
    (
        "AR baseline for speed",
        "The fastest of cached greedy generate of the transformers library and our own loop without drafting, each with the student's weights and prompt and with the teacher and its few-shot prefix already cached. A speed-up over a slower baseline would be no result.",
    ),
    (
        "Tokens/s",
        "At batch 1: generated tokens over seconds, prefill included. All systems answer one prompt before any sees the next, in one process, taking turns at going first.",
    ),
    ("First token", "Median time until the first token of the contiguous prefix is decided."),
    ("Score", "Mean of the task's checker over its prompts, in percent; one point is one percent."),
    ("Agreement", "Share of answers whose token ids equal the greedy teacher's, end to end."),
    (
        "Positions per token",
        "Positions computed after the prompt over generated tokens: what few-step decoding pays in arithmetic for fewer forwards.",
    ),
    (
        "AUP",
        "Area under score against tokens a forward over a sampler's settings, those more than 5 points below the best dropped; its unit is right tokens a forward.",
    ),
    (
        "Intervals and verdicts",
        "95 % intervals from a paired bootstrap over prompts; closed forms (Wilson, Agresti-Min) where too few answers differ to be resampled. Helped and hurt are said only where the paired interval excludes zero; “within N points” only where its lower bound lies above −N.",
    ),
]


def definitions() -> str:
    """Return what the words of the report mean."""
    return section("Definitions", facts([(k, text(v)) for k, v in DEFINITIONS]))


def effort_levels(effort: dict) -> str:
    """Return the calibrated levels, each with what the prompts that did not take part in the choice say."""
    items = ""
    for name, level in effort["levels"].items():
        if not level.get("sampler"):
            items += tag("li", f"<b>{text(name)}</b>: {text(level['reason'])}")
            continue
        said = verdict.setting_name(level["sampler"], level["settings"])
        tasks = []
        for task, found in level["tasks"].items():
            one = f"{task}: {found['tpf']:.1f} tokens a forward"
            if "check" in found:
                one += f"; checked on the other {found['check']['n']:,} prompts: {found['check']['verdict']}"
            tasks.append(one)
        items += tag("li", f"<b>{text(name)}</b>: {text(said)}. {text('. '.join(tasks))}")
    lead = f"Settings chosen on one half of the prompts and checked on the other. Low may lose {verdict.share(effort['max_loss'])} points of score, medium half of that, high nothing; lossless is the student's own AR answer."
    return section("Effort levels", tag("ul", items, "words-list"), lead)


def what_ran(content: dict) -> str:
    """Return models, machine, versions, hashes and the resolved recipe."""
    results, stages = content["results"], content["stages"]
    machine = results["hardware"]
    student = results["students"].get("student", {})
    shown = [f"{k} {v}" for k, v in student.items() if isinstance(v, (str, int, float))]
    where = [str(machine.get("cpu")), f"{machine.get('cores')} cores", f"threads: {machine.get('threads')}"]
    where += [f"{machine.get('memory_gb')} GB", ", ".join(machine.get("gpus") or []) or "no GPU"]
    pairs = [
        ("Teacher", text(results["teacher"]["model"])),
        ("Student", text(", ".join(shown))),
        ("Hardware", text(", ".join(where))),
        ("Versions", text(", ".join(f"{k} {v}" for k, v in results["versions"].items()))),
        ("Commit", text(results["commit"] or "an installed package, not a source tree")),
        ("Seed", text(results["settings"]["seed"])),
    ]
    for t in results["tasks"]:
        said = f"version {t['version']}, {t['n']:,} prompts, prompt hash {t['prompt_hash']}"
        pairs.append((f"Task {t['name']}", text(said)))
    rows = "".join(_stage_row(stage, m) for stage, m in stages.items())
    heads = "".join(head_cell(h) for h in ("Stage", "Hash", "Commit", "Finished", "Seconds"))
    table = tag("table", tag("thead", tag("tr", heads)) + tag("tbody", rows), "left")
    table = tag("div", table, "scroll") if rows else ""
    recipe = tag("pre", text(yaml.safe_dump(content["recipe"], sort_keys=False, allow_unicode=True, width=100)))
    return section("What was run", facts(pairs) + table + tag("h3", "Recipe, resolved", "spaced") + recipe)


def _stage_row(stage: str, facts_of: dict) -> str:
    finished = (facts_of["finished"] or "")[:16].replace("T", " ") or None
    seconds = None if facts_of["seconds"] is None else f"{facts_of['seconds']:,.0f}"
    commits = facts_of.get("commits") or [facts_of["commit"]]  # a resumed stage may have run on several
    commit = ", ".join(c[:12] for c in commits if c) or None
    return tag("tr", tag("td", text(stage)) + cell(facts_of["hash"]) + cell(commit) + cell(finished) + cell(seconds))


def not_measured(results: dict) -> str:
    """Return every figure that is null, with its reason and the rows it is missing from."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        for key, why in row["not_measured"].items():
            if key not in DERIVED:
                found.setdefault((METRICS.get(key, key), why), []).append(row_name(row))
    total = len(results["rows"])
    items = "".join(tag("li", f"<b>{text(m['what'])}</b>: {text(m['why'])}.") for m in results["not_measured"])
    for (metric, why), names in found.items():
        names = list(dict.fromkeys(names))
        listed = ", ".join(names) if len(names) <= 4 else f"{len(names)} of {total} rows"
        where = "" if len(names) >= total else f" ({listed})"
        items += tag("li", f"<b>{text(metric)}</b>{text(where)}: {text(why)}.")
    return section("What was not measured, and why", tag("ul", items, "words-list"))
