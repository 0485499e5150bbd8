"""The step ncu counts in: on one GPU, unsharded, compiled as the run compiles it; only the last one is profiled."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from costlab.probes.spec import RunSpec
from costlab.probes.tune import casting, compiled, make

STEPS = 4


def main(argv: list[str]) -> int:
    """Run the steps; the last one between the profiler's start and stop."""
    spec = msgspec.json.decode(Path(argv[1]).read_bytes(), type=RunSpec)
    workload = make(spec, torch.device("cuda", 0))
    with compiled(workload, spec, "inductor"):
        for number in range(STEPS):
            if number == STEPS - 1:
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
            with casting(workload, spec):
                loss = workload.loss(workload.model, workload.batch(number))
            loss.backward()
            workload.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
