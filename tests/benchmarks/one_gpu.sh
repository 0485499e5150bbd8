#!/usr/bin/env bash
# Everything that needs one GPU, in one go: the presets, the comparison with a hand-written loop, the sample runs.
# usage: one_gpu.sh RESULTS_FOLDER   (costlab installed for $PYTHON, default python3)
set -uo pipefail
out=$1
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
export COSTLAB_HOME=$work/home
costlab() { "$python" -m costlab.app "$@"; }
timed() { local t=$SECONDS; "$@"; local rc=$?; echo "== $((SECONDS - t)) s, rc $rc: $*"; return $rc; }

mkdir -p "$out"
timed costlab doctor
if [ "${WHATIF:-1}" = 1 ]; then
    timed costlab whatif --preset 1b --ranks 1 --what-if fused,fp8 -f md -o "$out/whatif.md"
    timed costlab whatif --preset 1b --ranks 1 --what-if fused,fp8 -f json -o "$out/whatif.json"
fi
timed costlab run --preset 1b --ranks 1 --out "$work/llama-1b"
timed costlab report "$work/llama-1b" -f text -o "$out/llama-1b.txt"
timed "$python" "$here/step_time.py" "$work/llama-1b" "$out"
timed costlab run --preset 1b --ranks 1 --fused --no-checkpoint --out "$work/llama-1b-fused"
timed costlab report "$work/llama-1b-fused" -f text -o "$out/llama-1b-fused.txt"
if [ "${SAMPLES:-1}" = 1 ]; then
    timed costlab run --preset resnet50 --ranks 1 --no-checkpoint --out "$work/resnet50"
    timed costlab run --preset 1b --ranks 1 --compile none --no-checkpoint --out "$work/llama-1b-eager"
fi
for name in llama-1b llama-1b-fused resnet50 llama-1b-eager; do
    [ -d "$work/$name" ] && timed "$python" "$here/pack_sample.py" "$work/$name" "h200-$name" "$out"
    [ -d "$work/$name" ] && tar czf "$out/$name-run.tar.gz" -C "$work" "$name"
done
ls -l "$out"
