#!/usr/bin/env bash
# What needs one GPU, part by part: the presets beside a hand-written loop, sample runs, the tests marked `gpu`, span
# coverage and DRAM bytes, kernels, tuning, loss parity, checkpoints, the what-if and how often it is wrong.
# usage: one_gpu.sh RESULTS_FOLDER [runs|samples|whatif|tests|fusion|shapes|kernels|tune|parity|checkpoint|load|trials ...]
#        costlab installed for $PYTHON, default python3; a part that fails does not keep the next from running
set -uo pipefail
out=$1
shift
parts=${*:-runs samples whatif tests fusion shapes kernels tune parity checkpoint load trials}
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
export COSTLAB_HOME=$work/home
costlab() { "$python" -m costlab.app "$@"; }
timed() { local t=$SECONDS; "$@"; local rc=$?; echo "== $((SECONDS - t)) s, rc $rc: $*" >&2; return $rc; }
bench() { timed "$python" "$here/$1.py" "${@:2}"; }

keep() {  # NAME: the run as a sample and whole
    bench pack_sample "$work/$1" "h200-$1" "$out"
    tar czf "$out/$1-run.tar.gz" -C "$work" "$1"
}

runs() {
    timed costlab doctor
    timed costlab run --preset 1b --ranks 1 --out "$work/llama-1b"
    timed costlab report "$work/llama-1b" -f text -o "$out/llama-1b.txt"
    bench step_time "$work/llama-1b" "$out"
    timed costlab run --preset 1b --ranks 1 --fused --no-checkpoint --out "$work/llama-1b-fused"
    timed costlab report "$work/llama-1b-fused" -f text -o "$out/llama-1b-fused.txt"
    keep llama-1b
    keep llama-1b-fused
}

samples() {
    timed costlab run --preset resnet50 --ranks 1 --no-checkpoint --out "$work/resnet50"
    timed costlab run --preset 1b --ranks 1 --compile none --no-checkpoint --out "$work/llama-1b-eager"
    keep resnet50
    keep llama-1b-eager
}

whatif() {  # the second call finds the first one's result in the store
    local question=(whatif --preset 1b --ranks 1 --what-if fused,fp8)
    timed costlab "${question[@]}" -f md -o "$out/whatif.md"
    timed costlab "${question[@]}" -f json -o "$out/whatif.json"
}

tests() { bench gpu_tests "$out/gpu-tests.txt"; }

fusion() {
    bench fusion_gpu_bench --part coverage --out "$out/fusion-coverage.json"
    bench fusion_gpu_bench --part dram --out "$out/fusion-dram.json"
}

shapes() {
    timed costlab shapes -s 8x1024,8x768*3,4x1024 -w llama --size small -f json >"$out/shapes.json"
}

kernels() { bench kernels_bench --out "$out"; }

tune() {
    local model=(--preset 1b --ranks 1 --no-checkpoint)
    timed costlab tune "${model[@]}" --steps 10 --warmup 2 --legs 2 --together --l2 estimate --out "$out/plan.json"
    timed costlab tune last --legs 0 --l2 ncu -f json >"$out/tune-l2.json"
    timed costlab run "${model[@]}" --plan "$out/plan.json" --out "$work/planned"
    timed costlab report "$work/planned" -f text -o "$out/planned.txt"
}

parity() { bench fused_parity --steps 200 --out "$out/fused_step.json"; }

checkpoint() {
    bench checkpoint_bench --only disk,codec,stall,dcp,load --out "$out/checkpoint.json"
    bench checkpoint_bench --only "checks,fp8 load,torn,flip,gds,table,ranks,kill" --out "$out/checkpoint_faults.json"
}

load() { bench load_experiment --out "$out/load.json"; }

trials() {
    bench whatif_bench --device cuda --trials 40 --rounds 6 --stride 2 --out "$out/whatif-trials.json"
}

mkdir -p "$out"
for part in $parts; do
    "$part"
done
ls -l "$out"
