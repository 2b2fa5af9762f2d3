#!/usr/bin/env bash
# One prepared run for a machine with a CUDA GPU, at most ten minutes: correctness, a lab run, decoding speed.
#
#   bash benchmarks/gpu.sh          the whole; gpu.json goes to $OUT (default: benchmarks/results)
#   bash benchmarks/gpu.sh --dry    the same code at toy sizes on a CPU, under a minute
#
# Runs from a plain source tree, nothing of it installed. The first part and the third need torch and
# transformers; the second pydantic, typer, rich, pyarrow and pyyaml too. DeepSpeed, datasets, W&B and a network
# are needed by none: the dry form hides such packages (benchmarks/absent/), so that this stays true.
#
# $PYTHON: the interpreter (default: python3). $COMMIT: recorded where the tree has no .git. $PYTHONPATH is kept.
# Each part has its own time limit, and one that fails does not stop the next. Exit status: 1 if any failed.
set -u
cd "$(dirname "$0")/.." || exit 2
PY=${PYTHON:-python3}
DRY=${1:-}
case $DRY in '' | --dry) ;; *) echo "usage: bash benchmarks/gpu.sh [--dry]" >&2; exit 2 ;; esac

WORK=$(mktemp -d) || exit 2
trap 'rm -rf "$WORK"' EXIT
: > "$WORK/parts"
OUT=${OUT:-$([ "$DRY" ] && echo "$WORK" || echo benchmarks/results)}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false
SMALL=()
if [ "$DRY" ]; then
    export PYTHONPATH="benchmarks/absent:$PYTHONPATH" CUDA_VISIBLE_DEVICES=
    SMALL=(prompts.limit=24 targets.keep='{finished: false}' adapt.max_steps=2 adapt.batch_tokens=800 distill.max_steps=2
        distill.batch_tokens=800 eval.tasks.0.limit=4 eval.speed_prompts=1 eval.max_new_tokens=24 engine.threads=1)
fi

failed=0
part() { # name, seconds, command: runs it and notes how it ended
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    echo "== $name (at most $limit s)"
    timeout -k 10 "$limit" "$@"
    code=$?
    echo "$name $code $((SECONDS - start))" >> "$WORK/parts"
    [ $code -eq 0 ] && return
    failed=1
    echo "== $name failed: exit $code$([ $code -eq 124 ] && echo ", its time was up")"
}

if [ -z "$DRY" ] && ! "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: $PY sees no CUDA GPU, or no torch; --dry runs the same code at toy sizes on a CPU" >&2
    exit 2
fi
part checks 180 "$PY" benchmarks/gpu_checks.py --out "$WORK/checks.json" ${DRY:+--dry}
part lab 290 "$PY" -m fewstep run recipes/lab/booking.yaml engine.name=plain engine.precision=auto ${SMALL[@]+"${SMALL[@]}"} --runs "$WORK/runs"
part decode 120 "$PY" benchmarks/gpu_decode.py --out "$WORK/decode.json" ${DRY:+--dry --rounds 1 --prompt 8 --tokens 32}
echo "== table"
"$PY" benchmarks/gpu_table.py "$WORK" "$OUT/gpu.json" $DRY || failed=1
exit $failed
