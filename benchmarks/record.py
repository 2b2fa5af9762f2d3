"""Run a recipe and keep its measured rows under benchmarks/results/.

    python benchmarks/record.py quickstart eval.tasks.0.limit=2000 eval.speed_prompts=200

Stages that are complete are not run again, so the rows of a finished run are recorded at once.
"""

import argparse
import json
from datetime import date
from pathlib import Path

from fewstep import machine
from fewstep.distill.pipeline import run
from fewstep.distill.recipe import load_recipe
from fewstep.runstore import StageFolder, write_atomic

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--name", help="of the result file; default: the recipe's")
    args = parser.parse_intermixed_args()
    recipe = load_recipe(args.recipe, args.overrides)
    folders = run(recipe, args.runs)
    results = json.loads((folders["eval"] / "results.json").read_text())
    manifests = {stage: StageFolder(folder).manifest() for stage, folder in folders.items()}
    kept = {
        "command": " ".join(["python benchmarks/record.py", args.recipe, *args.overrides]),
        "commit": manifests["eval"]["commit"],
        "date": str(date.today()),
        "hardware": manifests["eval"]["hardware"],
        "versions": machine.versions(),
        "seconds": {stage: m["seconds"] for stage, m in manifests.items()},
        "cores": {stage: m["hardware"]["cores"] for stage, m in manifests.items()},
        "commits": {stage: m.get("commits", [m["commit"]]) for stage, m in manifests.items()},
        "verdicts": results["verdicts"],
        "rows": results["rows"],
    }
    RESULTS.mkdir(exist_ok=True)
    write_atomic(RESULTS / f"{args.name or recipe.name}.json", json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(RESULTS / f"{args.name or recipe.name}.json")


if __name__ == "__main__":
    main()
