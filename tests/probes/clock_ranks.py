"""Three processes with a gloo group, two of which have clocks that are off by a known amount.

`python clock_ranks.py RANK FOLDER` is one of them; it writes what it read to FOLDER/RANK.json.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec

from costlab.probes.clocks import ClockReading

SKEW_NS = (0, 5_000_000, -40_000_000)  # what a rank's clock is ahead of rank 0's


def main(rank: int, folder: Path) -> None:
    """Join, read the clocks, write the readings."""
    import torch.distributed as dist

    from costlab.probes.clock_trips import read_clocks

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SKEW_NS))
    found = read_clocks("start", clock=lambda: time.time_ns() + SKEW_NS[rank], kernel=f"kernel {rank}")
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(found))
    dist.destroy_process_group()


def read_in_processes(folder: Path) -> list[list[ClockReading]]:
    """What each rank read."""
    ranks = range(len(SKEW_NS))
    running = [subprocess.Popen([sys.executable, "-P", __file__, str(rank), str(folder)]) for rank in ranks]
    codes = [process.wait(timeout=120) for process in running]
    assert codes == [0] * len(codes)
    files = [folder / f"{rank}.json" for rank in ranks]
    return [msgspec.json.decode(file.read_bytes(), type=list[ClockReading]) for file in files]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
