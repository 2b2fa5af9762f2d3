"""Gather what the lab's jobs measured: one table, one figure. `run.py` calls it last.

    python benchmarks/lab/table.py                 benchmarks/results/lab.json, lab.md and lab.svg
    python benchmarks/lab/table.py --quick         of a quick run; printed, nothing is written

It reads the records of `kept.py`.

What is compared is the TPF at equal quality. Of a system's settings (its thresholds, `verify`, and its own AR
decoding) the one with the most tokens a forward is taken among those that score at most one point less than
the AR teacher on the prompts at even places; its TPF and score are measured on those at odd places. A system
without such a setting has TPF 1: the teacher's own decoding. Intervals are 95 %, from a bootstrap that draws
training seeds and prompts, with the choice held fixed; two systems are compared on the seeds and prompts that
both have, in the same draws.

Legend: S seeds, N prompts.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import kept
import numpy as np
from run import ALL, DRAWN, ONCE, RECIPES, RESULTS, ROOT, SYSTEMS, jobs

from fewstep import machine
from fewstep.eval.verdict import setting_name
from fewstep.runstore import write_atomic

DRAWS, LOSS = 1000, 0.01  # bootstrap draws; the score that a system may lose to the teacher
CURVE = "threshold"  # the sampler of the figure's curves
UNDISTILLED, RECOMMENDED, TEACHER = "undistilled", "recommended", "AR teacher"


@dataclass
class Measured:
    """One setting of one system on one task: per seed and prompt, what was scored and spent."""

    system: str
    sampler: str
    settings: dict
    seeds: list[int]
    score: np.ndarray  # [S, N]
    tokens: np.ndarray  # [S, N]
    nfe: np.ndarray  # [S, N]

    def cut(self, seeds: Iterable[int], prompts: slice) -> "Measured":
        """Return the part of some of the seeds and prompts."""
        rows = [self.seeds.index(seed) for seed in seeds]
        parts = (values[rows][:, prompts] for values in (self.score, self.tokens, self.nfe))
        return Measured(self.system, self.sampler, self.settings, list(seeds), *parts)

    @property
    def tpf(self) -> float:
        return float(self.tokens.sum() / self.nfe.sum())


class Bootstrap:
    """Draws of S seeds and N prompts, the same for every system of that many."""

    def __init__(self, seeds: int, prompts: int, draws: int = DRAWS):
        rng = np.random.default_rng([seeds, prompts])
        self.seeds = rng.integers(0, seeds, (draws, seeds))
        self.prompts = rng.integers(0, prompts, (draws, prompts))

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return [draws] means of [S, N] values."""
        per_seed = np.stack([row[self.prompts].mean(1) for row in values])  # [S, draws]
        return np.take_along_axis(per_seed, self.seeds.T, 0).mean(0)

    def tpf(self, m: Measured) -> np.ndarray:
        """Return [draws] of tokens over forwards."""
        return self.means(m.tokens) / self.means(m.nfe)

    @staticmethod
    def interval(draws: np.ndarray) -> list[float]:
        return [float(v) for v in np.quantile(draws, [0.025, 0.975])]


def read(task: str, runs: Path, quick: bool) -> tuple[dict[str, list[Measured]], list[str], list[dict]]:
    """Return system → its settings, seeds stacked; the names of jobs that have no record; the facts of those that have."""
    found: dict[tuple, dict[int, dict]] = {}
    missing, facts = [], []
    marks: dict[int, dict] = {}  # prompts used → the task's mark
    for job in (job for group in jobs([task], list(SYSTEMS), quick) for job in group):
        record = kept.read(job.recipe(quick), job.record(quick, runs))
        # what was measured of another recipe, against another teacher or its answers, or on other prompts does not count
        if (
            record is None
            or (facts and kept.inputs_of(record[0], "targets.") != kept.inputs_of(facts[0], "targets."))
            or marks.setdefault(_prompts(record[1]), kept.inputs_of(record[0], "eval."))
            != kept.inputs_of(record[0], "eval.")
        ):
            missing.append(job.name(quick))
            continue
        facts.append(record[0])
        for row in record[1]:
            if row["system"] == "student":
                system = job.system
            elif job.system == RECOMMENDED:
                system = TEACHER if row["system"] == "teacher" else UNDISTILLED
            else:
                continue  # the same weights and prompts again
            key = (system, row["sampler"], row["settings"])
            values = found.setdefault(key, {}).setdefault(job.seed, {"score": [], "tokens": [], "nfe": []})
            for name, column in values.items():
                column.append(row[name])
    systems: dict[str, list[Measured]] = {}
    for (system, sampler, settings), by_seed in found.items():
        arrays = (np.array([by_seed[s][k] for s in by_seed], float) for k in ("score", "tokens", "nfe"))
        systems.setdefault(system, []).append(Measured(system, sampler, json.loads(settings), list(by_seed), *arrays))
    return systems, missing, facts


def _prompts(rows: list[dict]) -> int:
    """Return how many prompts a record is of."""
    setting = [(row["system"], row["sampler"], row["settings"]) for row in rows]
    return setting.count(setting[0])


def choose(system: list[Measured], teacher: Measured, loss: float = LOSS) -> Measured | None:
    """Return the setting with the most tokens a forward among those that lose at most `loss` on the even prompts."""
    even = slice(0, None, 2)
    least = teacher.cut(teacher.seeds, even).score.mean() - loss
    kept = [m for m in system if m.cut(m.seeds, even).score.mean() >= least - 1e-12]
    return max(kept, key=lambda m: m.cut(m.seeds, even).tpf, default=None)


def compare(system: list[Measured], teacher: Measured, others: dict[str, list[Measured]]) -> dict:
    """Return a system's TPF at equal quality and its ratio to that of each of `others`, on the odd prompts."""
    seeds, prompts = system[0].seeds, system[0].score.shape[1]
    everything = slice(0, prompts)
    of_teacher = teacher.cut(seeds, everything)
    chosen, odd = choose(system, of_teacher), slice(1, prompts, 2)
    boot = Bootstrap(len(seeds), len(range(*odd.indices(prompts))))
    ones = np.ones(DRAWS)
    entry: dict = {
        "seeds": seeds,
        "n": len(boot.prompts[0]),
        "sampler": None,
        "settings": None,
        "tpf": 1.0,
        "tpf_ci": None,
    }
    mine = ones
    if chosen is not None:
        at = chosen.cut(seeds, odd)
        reference = of_teacher.cut(seeds, odd)
        mine = boot.tpf(at)
        entry |= {"sampler": at.sampler, "settings": at.settings, "tpf": at.tpf, "tpf_ci": boot.interval(mine)}
        entry["delta"] = float(at.score.mean() - reference.score.mean())
        entry["delta_ci"] = boot.interval(boot.means(at.score) - boot.means(reference.score))
    for name, other in others.items():
        both = [seed for seed in seeds if seed in other[0].seeds]
        if both != seeds or other[0].score.shape[1] < prompts:
            continue
        beside = choose([m.cut(seeds, everything) for m in other], of_teacher)
        theirs = ones if beside is None else boot.tpf(beside.cut(seeds, odd))
        point = 1.0 if beside is None else beside.cut(seeds, odd).tpf
        entry[f"to_{name}"] = entry["tpf"] / point
        entry[f"to_{name}_ci"] = boot.interval(mine / theirs)
    return entry


def row(task: str, m: Measured, teacher: Measured) -> dict:
    """Return one setting's figures, with the keys of an evaluation's row."""
    reference = teacher.cut(m.seeds, slice(0, m.score.shape[1]))
    boot = Bootstrap(*m.score.shape)
    return {
        "task": task, "system": m.system, "sampler": m.sampler, "settings": m.settings, "n": m.score.shape[1], "seeds": m.seeds,
        "score": float(m.score.mean()), "score_ci": boot.interval(boot.means(m.score)), "tpf": m.tpf,
        "tpf_ci": boot.interval(boot.tpf(m)), "nfe": float(m.nfe.mean()), "tokens": float(m.tokens.mean()),
        "delta": float(m.score.mean() - reference.score.mean()),
        "delta_ci": boot.interval(boot.means(m.score) - boot.means(reference.score)),
    }  # fmt: skip


def of_task(task: str, runs: Path, quick: bool) -> tuple[list[dict], list[dict], list[str], list[dict]]:
    """Return a task's rows (one a setting), its summary (one a system), what is missing, and the records' facts."""
    systems, missing, facts = read(task, runs, quick)
    if TEACHER not in systems:
        return [], [], missing, facts
    teacher = systems[TEACHER][0]
    # a job of another seed than the recommended recipe's has no teacher to be compared with
    systems = {name: [m for m in found if set(m.seeds) <= set(teacher.seeds)] for name, found in systems.items()}
    rows = [row(task, m, teacher) for found in systems.values() for m in found]
    summary = []
    for name in (UNDISTILLED, *SYSTEMS):
        if systems.get(name):
            others = {
                other: systems[other] for other in (UNDISTILLED, RECOMMENDED) if other != name and systems.get(other)
            }
            summary.append({"task": task, "system": name, **compare(systems[name], teacher, others)})
    return rows, summary, missing, facts


def markdown(summary: list[dict], rows: list[dict], missing: list[str]) -> str:
    """Return the table, a line a system."""
    lines = [
        "| task (AR teacher) | system | seeds | at equal quality | TPF | points against the teacher | ÷ undistilled | ÷ recommended |",
        "|---|---|---|---|---|---|---|---|",
    ]
    teacher = {r["task"]: r["score"] for r in rows if r["system"] == TEACHER}
    for e in summary:
        setting = "none" if e["sampler"] is None else setting_name(e["sampler"], e["settings"])
        points = "" if e["sampler"] is None else f"{100 * e['delta']:+.1f} {_bracket(e['delta_ci'], 100, '+.1f')}"
        ratios = [
            f"{e[f'to_{other}']:.2f} {_bracket(e[f'to_{other}_ci'], 1, '.2f')}" if f"to_{other}" in e else ""
            for other in (UNDISTILLED, RECOMMENDED)
        ]
        lines.append(
            f"| {e['task']} ({100 * teacher[e['task']]:.1f} %) | {e['system']} | {len(e['seeds'])} | {setting} | "
            f"{e['tpf']:.1f} {_bracket(e['tpf_ci'], 1, '.1f')} | {points} | {ratios[0]} | {ratios[1]} |"
        )
    if missing:
        lines.append(f"\nNot run yet: {len(missing)} jobs.")
    return "\n".join(lines) + "\n"


def _distinct(values: Iterable[dict]) -> list[dict]:
    return [json.loads(text) for text in sorted({json.dumps(value, sort_keys=True) for value in values})]


def _bracket(interval: list[float] | None, scale: float, form: str) -> str:
    return "" if interval is None else f"[{scale * interval[0]:{form}}, {scale * interval[1]:{form}}]"


def figure(rows: list[dict], path: Path) -> None:
    """Draw score against TPF, a panel a task, a line for each system that runs on every task; stars are `verify`."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(r["task"] for r in rows))
    fig, axes = pyplot.subplots(1, len(tasks), figsize=(3.6 * len(tasks), 3.2), squeeze=False, layout="constrained")
    shown = [UNDISTILLED, *(name for name, (_, where) in SYSTEMS.items() if where in (ALL, ONCE))]
    for axis, task in zip(axes[0], tasks):
        own = [r for r in rows if r["task"] == task]
        for color, system in enumerate(shown):
            curve = sorted(
                (r["tpf"], r["score"], r["score_ci"]) for r in own if r["system"] == system and r["sampler"] == CURVE
            )
            stars = [(r["tpf"], r["score"]) for r in own if r["system"] == system and r["sampler"] == "verify"]
            if curve:
                x, y, ci = zip(*curve)
                axis.plot(x, y, marker=".", color=f"C{color}", label=system)
                axis.fill_between(x, [c[0] for c in ci], [c[1] for c in ci], color=f"C{color}", alpha=0.15, linewidth=0)
            axis.plot([s[0] for s in stars], [s[1] for s in stars], marker="*", linestyle="", color=f"C{color}")
        for r in own:
            if r["system"] == TEACHER:
                axis.axhline(r["score"], color="gray", linestyle=":", linewidth=1)
        axis.set(title=task, xlabel="tokens a forward", ylabel="score")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    fig.savefig(path)
    pyplot.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "lab")
    args = parser.parse_args()
    rows: list[dict] = []
    summary: list[dict] = []
    missing: list[str] = []
    facts: list[dict] = []
    for task in sorted(p.stem for p in RECIPES.glob("*.yaml") if p.stem not in DRAWN):
        for all_of_it, part in zip((rows, summary, missing, facts), of_task(task, args.runs, args.quick)):
            all_of_it += part
    if not rows:
        raise SystemExit("no record of the recommended recipe; run benchmarks/lab/run.py first")
    print(markdown(summary, rows, missing))
    if args.quick:
        return
    kept = {"command": "python benchmarks/lab/run.py", "commit": sorted({f["commit"] for f in facts}),
            "date": str(date.today()), "hardware": _distinct(f["hardware"] for f in facts), "versions": machine.versions(), "rows": rows,
            "summary": summary, "missing": missing}  # fmt: skip
    write_atomic(RESULTS / "lab.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    write_atomic(RESULTS / "lab.md", markdown(summary, rows, missing))
    figure(rows, RESULTS / "lab.svg")


if __name__ == "__main__":
    main()
