"""Gather what the parts of `gpu.sh` left into one JSON and one short table.

    python benchmarks/gpu_table.py WORK OUT/gpu.json

WORK holds `parts` (name, exit status, seconds: a line each), checks.json, decode.json and runs/; what a part
did not get to write is left out, so a part that failed costs its own figures alone.
"""

import json
import os
import sys
from datetime import date
from pathlib import Path

from fewstep import machine
from fewstep.eval.verdict import setting_name
from fewstep.runstore import write_atomic

COMMAND = "bash benchmarks/gpu.sh"
ROW = ("system", "sampler", "settings", "n", "score", "score_ci", "agreement", "tpf", "tpf_ci", "nfe", "tokens_per_s", "tokens_per_s_ci", "ttft_ms", "implementation", "is_speed_baseline", "speedup", "speedup_ci", "delta", "delta_ci", "verdict")  # fmt: skip


def main() -> None:
    work, out, *dry = sys.argv[1:]
    work, out = Path(work), Path(out)
    checks, decode = _read(work / "checks.json"), _read(work / "decode.json")
    stages, lab = _lab(work / "runs")
    ran = checks or decode or {}
    parts = [line.rsplit(" ", 2) for line in (work / "parts").read_text().splitlines()]
    kept = {
        "command": " ".join([COMMAND, *dry]),
        "commit": machine.commit() or os.environ.get("COMMIT"),  # a tree without .git cannot say
        "date": str(date.today()),
        "hardware": ran.get("hardware") or machine.hardware(),
        "versions": ran.get("versions") or machine.versions(),
        "cuda": ran.get("cuda"),
        "dry": bool(dry),
        "parts": [{"part": name, "exit": int(code), "seconds": int(s)} for name, code, s in parts],
        "lab_stages": stages,
        "decode": {k: v for k, v in (decode or {}).items() if k not in ("rows", "hardware", "versions", "cuda")},
        "rows": [
            {"part": part} | row
            for part, rows in (("checks", (checks or {}).get("rows", [])), ("lab", lab), ("decode", (decode or {}).get("rows", [])))
            for row in rows
        ],
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    for line in table(kept):
        print(line)


def table(kept: dict) -> list[str]:
    """Return the lines of the table."""
    hardware, versions = kept["hardware"], kept["versions"]
    name = ", ".join(hardware["gpus"]) or hardware["cpu"]
    packages = ", ".join(f"{p} {versions[p]}" for p in ("torch", "transformers") if p in versions)
    lines = [f"{name}; {packages}; commit {kept['commit'] or 'unknown'}" + ("; dry: toy sizes, no figure counts" if kept["dry"] else "")]  # fmt: skip
    lines += [f"{p['part']:<8} exit {p['exit']}, {p['seconds']} s" for p in kept["parts"]]
    of = {part: [r for r in kept["rows"] if r["part"] == part] for part in ("checks", "lab", "decode")}
    if of["checks"]:
        lines.append(f"checks   {sum(r['passed'] for r in of['checks'])} of {len(of['checks'])} passed")
    if of["lab"]:
        times = ", ".join(f"{s} {t:.0f} s" for s, t in kept["lab_stages"].items())
        lines += [f"lab      {times}", f"         {'system':<12} {'decoding':<28} {'score':>6} {'TPF':>6} {'tokens/s':>9} {'over AR':>8}"]  # fmt: skip
        for r in of["lab"]:
            how = setting_name(r["sampler"], r["settings"])
            over = "baseline" if r["is_speed_baseline"] else _number(r["speedup"], 2)
            lines.append(f"         {r['system']:<12} {how:<28} {_number(r['score'], 3):>6} {_number(r['tpf'], 2):>6} {_number(r['tokens_per_s'], 1):>9} {over:>8}")  # fmt: skip
    for r in of["decode"]:
        lines.append(f"decode   batch {r['batch']}  {r['way']:<20} {r['tokens_per_s']:>9.1f} tokens/s {r['over_hf_generate']:>6.2f}x")  # fmt: skip
    return lines


def _lab(runs: Path) -> tuple[dict[str, float], list[dict]]:
    """Return the seconds of each stage that was finished, and the evaluation's rows if there are any."""
    names = _read(runs / "lab-booking.json")
    folders = {stage: runs / folder for stage, folder in names["stages"].items()} if names else {}
    manifests = {stage: _read(folder / "manifest.json") for stage, folder in folders.items()}
    seconds = {stage: m["seconds"] for stage, m in manifests.items() if m}
    results = _read(folders["eval"] / "results.json") if "eval" in seconds else None
    return seconds, [{k: r.get(k) for k in ROW} for r in results["rows"]] if results else []


def _read(path: Path):
    return json.loads(path.read_text()) if path.is_file() else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
