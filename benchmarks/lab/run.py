"""Run the lab: every task, baseline and ablation, then one table and one figure.

    python benchmarks/lab/run.py --quick          one task, one seed, few prompts: about 15 minutes
    python benchmarks/lab/run.py                  everything, on two cores in about seven hours
    python benchmarks/lab/run.py --tasks sort bits --systems recommended "undistilled, longer" --seeds 0

Resumable: a job is a recipe's chain of stages, and finished stages are skipped; what a job measured is kept in
benchmarks/results/lab/, and a job that is kept there, with the same recipe, teacher and prompts, is not run again. A job is one system
(a line of SYSTEMS) on one task with one training seed; the jobs of a task and seed run one after the
other, because they share targets and adaptation, and `--jobs` of these groups run side by side, each on a core of
its own. `table.py` gathers what they left into benchmarks/results/lab.json, lab.md and lab.svg.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import kept
from tasks import TASKS, TEACHER_VERSION, rows

from fewstep.distill.recipe import Recipe, load_recipe
from fewstep.errors import RunFailed, UserError

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes" / "lab"
HERE = Path(__file__).parent
RESULTS = ROOT / "benchmarks" / "results"
DATA = HERE / "data"  # teachers and prompts, made once and not in the repository
DRAW = {"train": 7, "eval": 8}  # seeds of the draw of a task's training and evaluation prompts
SEEDS = (0, 1, 2)

CE, CERTAINTY = "ce: 1.0, ar: 1.0", "certainty: {from: 0, to: 0.5, over: 0.5, temperature: 0.5}"
CURVE = "{name: threshold, threshold: [0.5, 0.8, 0.95], leading: 1}"


def objectives(*parts: str) -> str:
    """Return the override that sets the objectives of distillation."""
    return f"distill.objectives={{{', '.join(parts)}}}"


UNDISTILLED = ["distill=null"]
LONGER = ["adapt.max_steps=1500", *UNDISTILLED]  # as many optimizer steps as adaptation and distillation together
AT_RANDOM = [
    "adapt.noise=[0.05, 1.0]",
    "adapt.noise_end=null",
    "adapt.suffix=0",
]  # masks as adaptation usually draws them
GATED = ["adapt.objectives={ce: 1.0}", "adapt.learning_rate=3e-3", *LONGER]

# Where a system runs: on all tasks with all seeds, on all tasks with one seed, on two tasks with one seed.
ALL, ONCE, SOME = "all tasks and seeds", "all tasks, one seed", "two tasks, one seed"
# system → (overrides of the task's recipe, where it runs)
SYSTEMS: dict[str, tuple[list[str], str]] = {
    # the recommended recipe; its evaluation has the AR teacher and the undistilled student too
    "recommended": ([], ALL),
    # all of the optimizer steps are adaptation
    "undistilled, longer": (LONGER, ONCE),
    # the AR model tuned on the same targets, and nothing else
    "AR tuned": (["adapt.objectives={ar: 1.0}", *LONGER, "eval.samplers=[{name: fixed, steps: 16}]"], ONCE),
    # the teacher untouched: adapters on noisy positions alone
    "gated LoRA, rank 64": ([*GATED, "adapt.lora={rank: 64, gated: true}"], ONCE),
    # each objective alone beside ce and ar; with certainty it is the recommended recipe
    "ce alone": ([objectives(CE)], SOME),
    "ce + kd": ([objectives(CE, "kd: 0.5")], SOME),
    "ce + kd, reverse": ([objectives(CE, "kd: {weight: 0.5, divergence: reverse}")], SOME),
    "ce + kd, total variation": ([objectives(CE, "kd: {weight: 0.5, divergence: total_variation}")], SOME),
    "ce + consistency": ([objectives(CE, "consistency: 1.0")], SOME),
    "ce + correction": (
        ["distill.guess=0.5", objectives(CE, "correction: 1.0"),
         f"eval.samplers=[{CURVE}, {{name: edit, threshold: 0.8, rewrite: 0.9}}, {{name: verify}}]"], SOME),
    "ce, order by trajectory": (["distill.order=trajectory", "distill.order_share=1.0", objectives(CE)], SOME),
    "ce, order by nll": (["distill.order=nll", "distill.order_share=1.0", objectives(CE)], SOME),
    "ce, on-policy rounds": (["distill.on_policy={rounds: 3, prompts: 600}", objectives(CE)], SOME),
    # the recommended recipe with one part more, or one less
    "recommended + kd": ([objectives(CE, CERTAINTY, "kd: 0.3")], SOME),
    "recommended − suffix masks": (["adapt.suffix=0", "distill.suffix=0"], SOME),
    "recommended − curriculum": (["adapt.noise_end=null", "distill.noise_end=null"], SOME),
    "recommended − masks in adaptation": (AT_RANDOM, SOME),
    # other adaptations, undistilled: adapters for 1,500 steps, beside `undistilled, longer`; the others for 600
    "LoRA, rank 64": (["adapt.lora={rank: 64}", "adapt.learning_rate=3e-3", *LONGER], SOME),
    "gated LoRA, rank 16": ([*GATED, "adapt.lora={rank: 16, gated: true}"], SOME),
    "gated LoRA, rank 128": ([*GATED, "adapt.lora={rank: 128, gated: true}"], SOME),
    "bidirectional": (["student.attention=bidirectional", "adapt.objectives={ce: 1.0}", "adapt.random_offset=0",
                       f"eval.samplers=[{CURVE}]", *UNDISTILLED], SOME),
    "causal inside blocks": (["student.attention=block_causal_inside", *UNDISTILLED], SOME),
    "shifted": (["student.alignment=shifted", *UNDISTILLED], SOME),
    "ar : ce = 0.3 : 1": (["adapt.objectives={ce: 1.0, ar: 0.3}", *UNDISTILLED], SOME),
    "ar : ce = 1 : 0.3": (["adapt.objectives={ce: 0.3, ar: 1.0}", *UNDISTILLED], SOME),
    "ar : ce = 0.2 : 1": (["adapt.objectives={ce: 1.0, ar: 0.2}", *UNDISTILLED], SOME),
    "block 4": (["student.block_size=4", *UNDISTILLED], SOME),
    "block 8": (["student.block_size=8", *UNDISTILLED], SOME),
    "block 32": (["student.block_size=32", *UNDISTILLED], SOME),
}  # fmt: skip
ABLATED = ("bits", "sort")
FEWER = ["eval.tasks.0.limit=1000", "eval.baselines=[teacher]"]  # prompts and systems of what runs on two tasks
SHIPPED = ("booking",)  # tasks whose teacher is in the repository
DRAWN = ("modes", "stories")  # tasks that sampled.py measures


@dataclass(frozen=True)
class Job:
    """One system on one task with one seed."""

    task: str
    system: str
    seed: int

    def overrides(self, quick: bool) -> list[str]:
        """Return the recipe's overrides, `key=value`."""
        own, where = SYSTEMS[self.system]
        fewer = FEWER if where == SOME else []
        given = [f"seed={self.seed}", *fewer, *own, f"name={self.name(quick)}"]
        if not quick:
            return given
        halved = [f"adapt.max_steps={750 if LONGER[0] in own else 300}", "eval.tasks.0.limit=300"]
        return given + halved + ([] if UNDISTILLED[0] in own else ["distill.max_steps=450"])

    def recipe(self, quick: bool) -> Recipe:
        return load_recipe(RECIPES / f"{self.task}.yaml", self.overrides(quick))

    def record(self, quick: bool, runs: Path) -> Path:
        """Return where what it measured is kept; a quick job's stays with its runs."""
        return (runs if quick else RESULTS) / "lab" / f"{self.name(quick).removeprefix('lab-')}.parquet"

    def name(self, quick: bool) -> str:
        """Return the name under which the runs folder lists the job's stages."""
        slug = "".join(c if c.isalnum() else "-" for c in self.system).strip("-")
        return f"lab-{self.task}-{slug}-{self.seed}{'-quick' if quick else ''}"


def jobs(
    tasks: list[str], systems: list[str], quick: bool, seeds: tuple[int, ...] | list[int] = SEEDS
) -> list[list[Job]]:
    """Return the jobs in groups that share targets and adaptation."""
    groups = []
    for seed in seeds:
        for task in tasks:
            here = {ALL} | ({ONCE} if seed == SEEDS[0] else set())
            here |= {SOME} if seed == SEEDS[0] and task in ABLATED else set()
            wanted = [s for s in systems if SYSTEMS[s][1] in here]
            if wanted:
                groups.append([Job(task, system, seed) for system in wanted])
    return groups


def make(name: str) -> None:
    """Write a task's prompts and train its teacher under benchmarks/lab/data/, unless just these are there."""
    if name in SHIPPED:
        return
    task, folder = TASKS[name], DATA / name
    if task.before is not None:
        task.before()
    sample = [rows(task, split, 50, seed=9) for split in ("train", "eval")]
    wanted = [(task.train, DRAW["train"]), (task.evaluation, DRAW["eval"])]
    keys = {"prompts": _key(sample, wanted), "teacher": _key(TEACHER_VERSION, sample, task.teacher)}
    noted = folder / "made.json"
    made = json.loads(noted.read_text()) if noted.is_file() else {}
    folder.mkdir(parents=True, exist_ok=True)
    if made.get("prompts") != keys["prompts"]:
        for split, (count, seed) in zip(("train", "eval"), wanted):
            kept = [
                {"id": f"{split}-{i}", "instruction": row["instruction"], "reference": row["reference"]}
                for i, row in enumerate(rows(task, split, count, seed))
            ]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    if made.get("teacher") != keys["teacher"]:
        noted.unlink(missing_ok=True)
        settings = [f"--{k.replace('_', '-')}={v}" for k, v in task.teacher.items()]
        subprocess.run(
            [sys.executable, str(HERE / "train_teacher.py"), "--task", name, "--out", str(folder / "teacher"),
             "--results", str(folder / "teacher.json"), "--eval-rows", "500", *settings],
            check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    noted.write_text(json.dumps(keys))


def _key(*parts) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def made(name: str) -> bool:
    """Make a task; where that cannot be done say why, in a line, and return False."""
    try:
        make(name)
    except ModuleNotFoundError as error:
        print(
            f"{name}: left out: {error.name} is not installed; pip install -c constraints.txt -e '.[lab]'", flush=True
        )
    except (UserError, RunFailed, ValueError, subprocess.CalledProcessError) as error:
        print(f"{name}: left out: {str(error).splitlines()[0]}", flush=True)
    else:
        return True
    return False


def run_group(group: list[Job], runs: Path, quick: bool, cores: SimpleQueue) -> list[Job]:
    """Run the jobs of one task and seed in order, on a core of their own; return those that failed."""
    core, failed = cores.get(), []
    try:
        for job in group:
            recipe, record = job.recipe(quick), job.record(quick, runs)
            there = kept.read(recipe, record)
            if there is not None and there[0]["inputs"] == kept.inputs(recipe):
                print(f"{job.name(quick)}: kept", flush=True)
                continue
            log = runs / f"{job.name(quick)}.log"
            with log.open("w") as out:
                done = subprocess.run(
                    [sys.executable, "-m", "fewstep", "run", str(RECIPES / f"{job.task}.yaml"), *job.overrides(quick), "--runs", str(runs)],
                    stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                    preexec_fn=None if core is None else lambda core=core: os.sched_setaffinity(0, {core}),
                )  # fmt: skip
            print(f"{job.name(quick)}: {'done' if done.returncode == 0 else f'FAILED, see {log}'}", flush=True)
            if done.returncode:
                failed.append(job)
            else:
                kept.keep(recipe, runs, record)
    finally:
        cores.put(core)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one task, one seed, fewer steps and prompts")
    parser.add_argument("--tasks", nargs="+", choices=[p.stem for p in RECIPES.glob("*.yaml")], metavar="TASK")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, metavar="SEED")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "lab")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="groups side by side, a core each")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be 1 or more")
    tasks = args.tasks or (["bits"] if args.quick else sorted(p.stem for p in RECIPES.glob("*.yaml")))
    systems = args.systems or (["recommended", "undistilled, longer"] if args.quick else list(SYSTEMS))
    args.runs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        there = [task for task, ok in zip(tasks, pool.map(made, tasks)) if ok]
        cores: SimpleQueue = SimpleQueue()
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        for i in range(args.jobs):
            cores.put(available[i % len(available)] if available else None)
        seeds = args.seeds or (SEEDS[:1] if args.quick else SEEDS)
        groups = jobs([task for task in there if task not in DRAWN], systems, args.quick, seeds)
        failed = sum(pool.map(lambda group: run_group(group, args.runs, args.quick, cores), groups), [])
    unwell = [job.name(args.quick) for job in failed] + [task for task in tasks if task not in there]
    own = ["--runs", str(args.runs)]
    for task in there:
        if task in DRAWN and subprocess.run([sys.executable, str(HERE / "sampled.py"), task, *own]).returncode:
            unwell.append(task)
    if any(task not in DRAWN for task in there):
        table = [sys.executable, str(HERE / "table.py"), *own, *(["--quick"] if args.quick else [])]
        if subprocess.run(table).returncode:
            unwell.append("table.py")
    if unwell:
        raise SystemExit(f"{len(unwell)} failed: {', '.join(unwell)}")


if __name__ == "__main__":
    main()
