#!/usr/bin/env bash
# What needs two GPUs: compiled FSDP2 against eager DDP and FSDP2, with collectives between real devices.
# usage: two_gpus.sh RESULTS_FOLDER   (costlab installed for $PYTHON, default python3)
set -uo pipefail
out=$1
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
export COSTLAB_HOME=$work/home
costlab() { "$python" -m costlab.app "$@"; }
timed() { local t=$SECONDS; "$@"; local rc=$?; echo "== $((SECONDS - t)) s, rc $rc: $*"; return $rc; }

mkdir -p "$out"
timed costlab run --preset 1b --ranks 2 --out "$work/llama-1b-x2"
timed costlab run --preset 1b --ranks 2 --compile none --no-checkpoint --out "$work/llama-1b-x2-eager"
timed costlab run --preset 1b --ranks 2 --compile none --parallel ddp --no-checkpoint --out "$work/llama-1b-x2-ddp"
timed costlab run --preset 1b --ranks 2 --compile model --no-checkpoint --out "$work/llama-1b-x2-model"
for name in llama-1b-x2 llama-1b-x2-eager llama-1b-x2-ddp llama-1b-x2-model; do
    timed costlab report "$work/$name" -f text -o "$out/$name-report.txt"
    timed costlab report "$work/$name" -f json -o "$out/$name.json"
done
timed "$python" "$here/pack_sample.py" "$work/llama-1b-x2" h200x2-llama-1b "$out"
tar czf "$out/runs-x2.tar.gz" -C "$work" llama-1b-x2 llama-1b-x2-ddp llama-1b-x2-model
ls -l "$out"
