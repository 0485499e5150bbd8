"""Measures the links of this host: one rank a GPU, or two ranks on CPU. Started by `probes.job`, one process a rank.

Rank 0 writes the calibration after every sweep, so a cancelled one keeps what it measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from costlab.probes import calibrate_host
from costlab.probes.job import run_rank
from costlab.probes.links import (
    CALIBRATION_FILE,
    DEVICE_SIZES,
    MESSAGE_SIZES,
    Calibration,
    CalibrationSpec,
    Sweep,
    sweep,
)
from costlab.probes.session import Voice
from costlab.probes.tables import write_bytes
from costlab.probes.timing import Timed, points, wall

if TYPE_CHECKING:
    import torch

    from costlab.probes.peers import Peers

Step = tuple[str, Callable[[], list[Sweep]]]  # what, measured by all ranks together


@dataclass
class Job:
    """One rank's part of a calibration."""

    spec: CalibrationSpec
    run_dir: Path
    rank: int
    world: int
    device: torch.device
    voice: Voice
    peers: Peers
    result: Calibration = field(default_factory=lambda: Calibration(date="", device="", ranks=0))

    def skip(self, why: str) -> None:
        """Note what is not measured, once."""
        if why not in self.result.skipped:
            self.result.skipped.append(why)

    def save(self) -> None:
        """Rank 0 writes what there is."""
        if self.rank == 0:
            write_bytes(self.run_dir / CALIBRATION_FILE, msgspec.json.encode(self.result))


def calibrate(run_dir: Path, options: bytes, rank: int, voice: Voice) -> None:
    """All sweeps, in order, with progress."""
    import torch.distributed as dist

    voice.enter("calibrate", "joining the process group")
    job = join(run_dir, msgspec.json.decode(options, type=CalibrationSpec), rank, voice)
    steps = list(plan(job))
    for done, (what, work) in enumerate(steps):
        if rank == 0:
            voice.progress(done, len(steps), what, (len(steps) - done) * job.spec.seconds)
        dist.barrier()
        job.result.sweeps += [found for theirs in job.peers.gather(work()) for found in theirs]
        job.save()
    job.result.complete = True
    job.save()
    if rank == 0:
        voice.progress(len(steps), len(steps), "done")
    dist.barrier()
    dist.destroy_process_group()


def join(run_dir: Path, spec: CalibrationSpec, rank: int, voice: Voice) -> Job:
    """Choose the device and join the group."""

    import torch
    import torch.distributed as dist

    from costlab.probes.join import join

    device, peers = join(timedelta(seconds=120))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    world = dist.get_world_size()
    result = Calibration(
        date=datetime.now(UTC).isoformat(timespec="seconds"), device=name, ranks=world, fingerprint=spec.fingerprint
    )
    return Job(spec, run_dir, rank, world, device, voice, peers, result)


def plan(job: Job) -> Iterator[Step]:
    """The sweeps of this machine. All ranks make the same plan."""
    if job.device.type == "cuda":
        from costlab.probes.calibrate_gpu import gpu_steps

        yield from gpu_steps(job)
    elif job.world >= 2:
        yield "loopback, TCP", lambda: loopback_tcp(job)
        yield "loopback, gloo", lambda: messages(job, 0, 1, "gloo send/recv", "one")
        yield "loopback, gloo both ways", lambda: messages(job, 0, 1, "gloo send/recv", "both")
    else:
        job.skip("loopback: one rank has nobody to talk to")
    if job.spec.disk:
        yield (
            "disk",
            lambda: _only_first(job, lambda: calibrate_host.disk(Path(job.spec.disk), job.spec.seconds, job.skip)),
        )


def _only_first(job: Job, work: Callable[[], list[Sweep]]) -> list[Sweep]:
    return work() if job.rank == 0 else []


def loopback_tcp(job: Job) -> list[Sweep]:
    """A TCP stream between ranks 0 and 1: what the loopback link gives before any library."""
    import torch.distributed as dist

    place: list[int] = [0]
    with calibrate_host.listener() if job.rank == 0 else calibrate_host.nothing() as server:
        if server is not None:
            place = [server.getsockname()[1]]
        dist.broadcast_object_list(place, src=0)
        if job.rank > 1:
            return []
        with calibrate_host.connection(server, place[0]) as link:
            make = calibrate_host.ping(link, first=job.rank == 0)
            found = points(MESSAGE_SIZES, make, job.spec.seconds, calibrate_host.agreement(link, job.rank == 0))
    if job.rank != 0:
        return []
    return [sweep("TCP stream", "one", "host", "host", found, "one-way TCP message, half a round trip")]


def messages(job: Job, a: int, b: int, what: str, direction: str) -> list[Sweep]:
    """Send and receive between two ranks: half a round trip, or both at once; the other ranks wait."""
    import torch

    if job.rank not in (a, b):
        return []
    other = b if job.rank == a else a

    def make(size: int) -> Timed:
        out = torch.ones(size, dtype=torch.uint8, device=job.device)
        back = torch.empty_like(out)
        once = _both if direction == "both" else _ping
        return lambda: once(job, out, back, other, first=job.rank == a)

    agreed = _PairAgreement(job, other)
    sizes = MESSAGE_SIZES if job.device.type == "cpu" else DEVICE_SIZES
    found = points(sizes, make, job.spec.seconds, agreed)
    if job.rank != a:
        return []
    name = ("host", "host") if job.device.type == "cpu" else (f"cuda{a}", f"cuda{b}")
    way = "half a round trip" if direction == "one" else "both ways at once"
    latency = f"one-way {what.partition(' ')[0]} message, {way}"
    return [sweep(what, direction, *name, found, latency)]  # type: ignore[arg-type]


class _PairAgreement:
    """The slower rank's time of the two, so that both repeat as often."""

    def __init__(self, job: Job, other: int) -> None:
        self.job, self.other = job, other

    def __call__(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        mine, theirs = torch.tensor([value], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        group = self.job.peers.group
        work = [dist.isend(mine, self.other, group=group), dist.irecv(theirs, self.other, group=group)]
        for item in work:
            if item is not None:
                item.wait()
        return max(value, float(theirs.item()))


def _settle(job: Job) -> None:
    import torch

    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)


def _ping(job: Job, out: torch.Tensor, back: torch.Tensor, other: int, *, first: bool) -> float:
    """Half of the time there and back."""
    import torch.distributed as dist

    def work() -> None:
        if first:
            dist.send(out, other)
            dist.recv(back, other)
        else:
            dist.recv(back, other)
            dist.send(out, other)
        _settle(job)

    return wall(work) / 2


def _both(job: Job, out: torch.Tensor, back: torch.Tensor, other: int, *, first: bool) -> float:  # noqa: ARG001
    """Time of sending and receiving at once."""
    import torch.distributed as dist

    def work() -> None:
        ops = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, back, other)]
        for item in dist.batch_isend_irecv(ops):
            item.wait()
        _settle(job)

    return wall(work)


def main(argv: list[str]) -> int:
    """Entry point of one rank."""
    return run_rank(argv, calibrate)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
