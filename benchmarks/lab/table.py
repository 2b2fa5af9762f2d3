"""Gather what the lab's jobs measured: one table, one figure.

    python benchmarks/lab/table.py                 benchmarks/results/lab.json, lab.md and lab.svg
    python benchmarks/lab/table.py --quick         of a quick run; printed, nothing is written

A system's curve is score against tokens a forward (TPF) over its thresholds. What is compared is the TPF
at equal quality: the most tokens a forward that it writes with a score of at most one point below the
teacher's, under `verify` or at a threshold (in a straight line between thresholds); 1, AR decoding, where
nothing keeps that. Intervals are 95 %, from a bootstrap that draws training seeds and prompts, the same
ones for every system.

Legend: C settings of a curve, S seeds, N prompts.
"""

import argparse
import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from run import ALL, DRAWN, ONCE, RECIPES, ROOT, SYSTEMS, Job, jobs

from fewstep import machine
from fewstep.runstore import StageFolder, write_atomic

RESULTS = ROOT / "benchmarks" / "results"
DRAWS, LOSS = 1000, 0.01  # bootstrap draws; the score that a system may lose to the teacher
CURVE = "threshold"  # the sampler of the curves


@dataclass
class Measured:
    """One setting of one system: per seed and prompt, what was scored and spent."""

    system: str
    sampler: str
    settings: dict
    score: np.ndarray  # [S, N]
    tokens: np.ndarray  # [S, N]
    nfe: np.ndarray  # [S, N]

    @property
    def tpf(self) -> float:
        return float(self.tokens.sum() / self.nfe.sum())


def read(runs: Path, group_jobs: list[Job], quick: bool) -> tuple[list[Measured], dict]:
    """Return everything measured of one system on one task, seeds stacked, and the last evaluation's manifest.

    Jobs that are not complete are left out.
    """
    found: dict[tuple, list[dict]] = {}
    manifest: dict = {}
    for job in group_jobs:
        named = runs / f"{job.name(quick)}.json"
        folder = StageFolder(runs / json.loads(named.read_text())["stages"]["eval"]) if named.is_file() else None
        if folder is None or not folder.is_complete():
            continue
        manifest = folder.manifest()
        rows = pq.read_table(folder.path / "samples.parquet", partitioning=None).to_pylist()
        per: dict[tuple, list[dict]] = {}
        for row in rows:
            per.setdefault((row["system"], row["sampler"], row["settings"]), []).append(row)
        for key, answers in per.items():
            found.setdefault(key, []).append(
                {
                    "score": [a["score"] for a in answers],
                    "tokens": [len(a["ids"]) for a in answers],
                    "nfe": [a["nfe"] for a in answers],
                }
            )
    measured = [
        Measured(
            system, sampler, json.loads(settings), *(np.array([s[k] for s in seeds], float) for k in ("score", "tokens", "nfe"))
        )
        for (system, sampler, settings), seeds in found.items()
    ]  # fmt: skip
    return measured, manifest


class Bootstrap:
    """Draws of seeds and prompts, the same for every system of a task."""

    def __init__(self, seeds: int, prompts: int, draws: int = DRAWS):
        rng = np.random.default_rng(0)
        self.seeds = rng.integers(0, seeds, (draws, seeds))
        self.prompts = rng.integers(0, prompts, (draws, prompts))

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return [draws] means of [S, N] values."""
        per_seed = np.stack([row[self.prompts].mean(1) for row in values])  # [S, draws]
        return np.take_along_axis(per_seed, self.seeds.T % len(values), 0).mean(0)

    @staticmethod
    def interval(draws: np.ndarray) -> list[float]:
        return [float(v) for v in np.quantile(draws, [0.025, 0.975])]


def tpf_at(score: np.ndarray, tpf: np.ndarray, least: float) -> float:
    """Return the largest TPF at which a curve still scores `least`: in a straight line between its points.

    Args:
        score, tpf: [C]. A curve whose every point scores less gives 1: AR decoding.
    """
    order = np.argsort(tpf)
    x, y = tpf[order], score[order]
    enough = np.flatnonzero(y >= least)
    if not len(enough):
        return 1.0
    last = enough[-1]
    if last == len(x) - 1:
        return float(x[last])
    return float(x[last] + (y[last] - least) / (y[last] - y[last + 1]) * (x[last + 1] - x[last]))


def at_equal_quality(measured: list[Measured], teacher: np.ndarray, boot: Bootstrap) -> tuple[float, np.ndarray]:
    """Return the TPF at which a system loses at most LOSS to the teacher, and [draws] of it.

    Args:
        measured: its thresholds, and `verify` where it has it.
        teacher: [S, N] scores of the AR teacher.
    """
    curve = [m for m in measured if m.sampler == CURVE]
    alone = [m for m in measured if m.sampler == "verify"]
    scores, tpfs = np.array([[m.score.mean(), m.tpf] for m in curve + alone]).T
    drawn_scores = np.stack([boot.means(m.score) for m in curve + alone], 1)  # [draws, C + verify]
    drawn_tpfs = np.stack([boot.means(m.tokens) / boot.means(m.nfe) for m in curve + alone], 1)
    least, C = boot.means(teacher) - LOSS, len(curve)

    def best(score, tpf, low) -> float:  # verify is a point of its own: between it and a threshold lies nothing
        return max(tpf_at(score[:C], tpf[:C], low), tpf_at(score[C:], tpf[C:], low))

    draws = [best(s, t, low) for s, t, low in zip(drawn_scores, drawn_tpfs, least)]
    return best(scores, tpfs, teacher.mean() - LOSS), np.array(draws)


def of_task(task: str, runs: Path, systems: list[str], quick: bool) -> tuple[list[dict], list[dict], dict]:
    """Return a task's rows (one a setting), its summary (one a system), and the evaluation's manifest."""
    rows: list[dict] = []
    summary: list[dict] = []
    teacher = undistilled = None
    manifest: dict = {}
    for system in systems:
        mine = [job for group in jobs([task], [system], quick) for job in group]
        measured, own = read(runs, mine, quick)
        if not measured:
            continue
        manifest = own
        seeds = measured[0].score.shape[0]
        boot = Bootstrap(seeds, measured[0].score.shape[1])
        at_teacher = next(m for m in measured if m.system == "teacher")
        if teacher is None:
            teacher = at_teacher
            rows.append(_row(task, "AR teacher", at_teacher, at_teacher, boot))
        for name, label in (("undistilled", "undistilled"), ("student", system)):
            if name == "undistilled" and system != "recommended":
                continue  # the same weights again
            of_system = [m for m in measured if m.system == name]
            rows += [_row(task, label, m, at_teacher, boot) for m in of_system]
            if not any(m.sampler in (CURVE, "verify") for m in of_system):
                continue
            point, draws = at_equal_quality(of_system, at_teacher.score, boot)
            entry = {"task": task, "system": label, "seeds": seeds, "n": boot.prompts.shape[1], "tpf_at_loss": point,
                     "tpf_at_loss_ci": boot.interval(draws)}  # fmt: skip
            verify = next((m for m in of_system if m.sampler == "verify"), None)
            entry["tpf_verify"] = None if verify is None else verify.tpf
            entry["score_verify"] = None if verify is None else float(verify.score.mean())
            if label == "undistilled":
                undistilled = point, draws
            elif undistilled is not None and len(undistilled[1]) == len(draws):
                entry["ratio"] = point / undistilled[0]
                entry["ratio_ci"] = boot.interval(draws / undistilled[1]) if seeds == _seeds(summary) else None
            summary.append(entry)
    return rows, summary, manifest


def _seeds(summary: list[dict]) -> int:
    return next(e["seeds"] for e in summary if e["system"] == "undistilled")


def _row(task: str, system: str, m: Measured, teacher: Measured, boot: Bootstrap) -> dict:
    delta = boot.means(m.score) - boot.means(teacher.score)
    return {
        "task": task, "system": system, "sampler": m.sampler, "settings": m.settings, "n": m.score.shape[1],
        "seeds": m.score.shape[0], "score": float(m.score.mean()), "score_ci": boot.interval(boot.means(m.score)),
        "tpf": m.tpf, "nfe": float(m.nfe.mean()), "tokens": float(m.tokens.mean()),
        "delta": float(m.score.mean() - teacher.score.mean()), "delta_ci": boot.interval(delta),
    }  # fmt: skip


def markdown(summary: list[dict], rows: list[dict]) -> str:
    """Return the table: a line a system, tasks side by side in blocks."""
    lines = [
        "| task | system | seeds | TPF one point below the teacher | ÷ undistilled | `verify`: TPF, score |",
        "|---|---|---|---|---|---|",
    ]
    teacher = {row["task"]: row["score"] for row in rows if row["system"] == "AR teacher"}
    for e in summary:
        low, high = e["tpf_at_loss_ci"]
        ratio = f"{e['ratio']:.2f}×" if e.get("ratio") else ""
        if e.get("ratio_ci"):
            ratio += f" [{e['ratio_ci'][0]:.2f}, {e['ratio_ci'][1]:.2f}]"
        verify = "" if e["tpf_verify"] is None else f"{e['tpf_verify']:.1f}, {100 * e['score_verify']:.1f} %"
        lines.append(
            f"| {e['task']} ({100 * teacher[e['task']]:.1f} %) | {e['system']} | {e['seeds']} | "
            f"{e['tpf_at_loss']:.1f} [{low:.1f}, {high:.1f}] | {ratio} | {verify} |"
        )
    return "\n".join(lines) + "\n"


def figure(rows: list[dict], path: Path) -> None:
    """Draw score against TPF, a panel a task, a line for each headline system."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    fig, axes = pyplot.subplots(1, len(tasks), figsize=(3.6 * len(tasks), 3.2), squeeze=False, layout="constrained")
    shown = ["undistilled", *(name for name, (_, where) in SYSTEMS.items() if where in (ALL, ONCE))]
    for axis, task in zip(axes[0], tasks):
        own = [row for row in rows if row["task"] == task]
        for color, system in enumerate(shown):
            curve = sorted(
                (r["tpf"], r["score"], r["score_ci"]) for r in own if r["system"] == system and r["sampler"] == CURVE
            )
            if curve:
                x, y, ci = zip(*curve)
                axis.plot(x, y, marker=".", color=f"C{color}", label=system)
                axis.fill_between(x, [c[0] for c in ci], [c[1] for c in ci], color=f"C{color}", alpha=0.15, linewidth=0)
            axis.plot(
                [r["tpf"] for r in own if r["system"] == system and r["sampler"] == "verify"],
                [r["score"] for r in own if r["system"] == system and r["sampler"] == "verify"],
                marker="*", linestyle="", color=f"C{color}",
            )  # fmt: skip
        for row in own:
            if row["system"] == "AR teacher":
                axis.axhline(row["score"], color="gray", linestyle=":", linewidth=1)
        axis.set(title=task, xlabel="tokens a forward", ylabel="score")
    axes[0][0].legend(fontsize=7, loc="lower left")
    fig.savefig(path)
    pyplot.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "lab")
    args = parser.parse_args()
    rows: list[dict] = []
    summary: list[dict] = []
    manifest: dict = {}
    for task in sorted(p.stem for p in RECIPES.glob("*.yaml") if p.stem not in DRAWN):
        r, s, own = of_task(task, args.runs, list(SYSTEMS), args.quick)
        rows, summary, manifest = rows + r, summary + s, own or manifest
    print(markdown(summary, rows))
    if args.quick:
        return
    kept = {"command": "python benchmarks/lab/run.py && python benchmarks/lab/table.py", "commit": manifest["commit"],
            "date": str(date.today()), "hardware": manifest["hardware"], "versions": machine.versions(), "rows": rows,
            "summary": summary}  # fmt: skip
    write_atomic(RESULTS / "lab.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    write_atomic(RESULTS / "lab.md", markdown(summary, rows))
    figure(rows, RESULTS / "lab.svg")


if __name__ == "__main__":
    main()
