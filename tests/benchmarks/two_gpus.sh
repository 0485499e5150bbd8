#!/usr/bin/env bash
# What needs two GPUs, part by part: the three static-vs-dynamic runs and whole-model compiling, topology, all-reduce
# schedules, sharded checkpoints with a peer replica, the what-if of all toggles with its report.
# usage: two_gpus.sh RESULTS_FOLDER [runs|topology|schedules|checkpoint|whatif|factorial ...]   (default: all)
#        costlab installed for $PYTHON, default python3; a part that fails does not keep the next from running
set -uo pipefail
out=$1
shift
parts=${*:-runs topology schedules checkpoint whatif factorial}
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
export COSTLAB_HOME=$work/home
costlab() { "$python" -m costlab.app "$@"; }
torchrun() { "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$@"; }
timed() { local t=$SECONDS; "$@"; local rc=$?; echo "== $((SECONDS - t)) s, rc $rc: $*" >&2; return $rc; }

runs() {
    timed costlab run --preset 1b --ranks 2 --out "$work/llama-1b-x2"
    timed costlab run --preset 1b --ranks 2 --compile none --no-checkpoint --out "$work/llama-1b-x2-eager"
    timed costlab run --preset 1b --ranks 2 --compile none --parallel ddp --no-checkpoint --out "$work/llama-1b-x2-ddp"
    timed costlab run --preset 1b --ranks 2 --compile model --no-checkpoint --out "$work/llama-1b-x2-model"
    for name in llama-1b-x2 llama-1b-x2-eager llama-1b-x2-ddp llama-1b-x2-model; do
        timed costlab report "$work/$name" -f text -o "$out/$name-report.txt"
        timed costlab report "$work/$name" -f json -o "$out/$name.json"
    done
    timed torchrun "$here/step_time.py" "$work/llama-1b-x2" "$out"
    timed "$python" "$here/pack_sample.py" "$work/llama-1b-x2" h200x2-llama-1b "$out"
    tar czf "$out/runs-x2.tar.gz" -C "$work" llama-1b-x2 llama-1b-x2-ddp llama-1b-x2-model
}

topology() { timed "$python" "$here/topology_bench.py" --device cuda --out "$out/topology_x2.json"; }

schedules() { timed "$python" "$here/schedules_bench.py" --ranks 2 --out "$out/schedules.json"; }

checkpoint() {
    timed torchrun "$here/checkpoint_two_gpus.py" --out "$out/checkpoint_two_gpus.json"
}

# pure FSDP2 has no all-reduce, so `hybrid` needs DDP. The second call of each finds the first one's legs in the store.
whatif() {
    local question=(whatif --preset 1b --ranks 2 --parallel ddp --what-if fused,hybrid,fp8)
    timed costlab "${question[@]}" -f md -o "$out/whatif.md"
    timed costlab "${question[@]}" -f json -o "$out/whatif.json"
    timed costlab whatif --preset 1b --ranks 2 --what-if fused -f json -o "$out/whatif-fsdp.json"
}

factorial() {
    local question=(whatif --preset 1b --ranks 2 --parallel ddp --what-if fused,hybrid,fp8 --factorial --budget 300)
    timed costlab "${question[@]}" -f md -o "$out/factorial.md"
    timed costlab "${question[@]}" -f json -o "$out/factorial.json"
}

mkdir -p "$out"
for part in $parts; do
    "$part"
done
ls -l "$out"
