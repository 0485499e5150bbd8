"""Sweeps of GPU links: pinned host memory both ways, device memory, copies and NCCL messages between GPUs.

Times are CUDA events around the copy, on a stream that is idle before it. Devices are named `cudaN`, CUDA's own index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import TYPE_CHECKING

from costlab.probes.links import DEVICE_SIZES, MEMORY_SIZES, Direction, Sweep, sweep
from costlab.probes.numa import NumaRefused, memory_on, pages_by_node, share_elsewhere
from costlab.probes.sysfs import allowed, numa_nodes
from costlab.probes.timing import Timed, points

if TYPE_CHECKING:
    import torch

    from costlab.probes.calibrate import Job, Step

COPY_LATENCY = "one copy between two CUDA events, stream idle before"


def gpu_steps(job: Job) -> Iterator[Step]:
    """The plan of a host with GPUs, one rank each."""
    warm(job)
    for rank in range(job.world):
        yield f"GPU{rank}, device memory", lambda rank=rank: _of(job, rank, device_memory)  # type: ignore[misc]
        for node in host_nodes(job):
            place = "" if node is None else f", NUMA node {node}"
            yield (
                f"GPU{rank}, host memory{place}",
                lambda rank=rank, node=node: _of(job, rank, lambda j: host_device(j, node)),  # type: ignore[misc]
            )
    for a, b in permutations(range(job.world), 2):
        yield f"GPU{a} → GPU{b}, copy", lambda a=a, b=b: _of(job, a, lambda j: peer_copy(j, a, b))  # type: ignore[misc]
    if job.world >= 2:
        from costlab.probes.calibrate import messages

        for a, b in ((a, b) for a, b in permutations(range(job.world), 2) if a < b):
            yield f"GPU{a}, GPU{b}: copies both ways", lambda a=a, b=b: _of(job, a, lambda j: peer_both(j, a, b))  # type: ignore[misc]
            for way in ("one", "both"):
                yield (
                    f"GPU{a}, GPU{b}: NCCL, {way} way{'s' if way == 'both' else ''}",
                    lambda a=a, b=b, way=way: messages(job, a, b, "NCCL send/recv", way),  # type: ignore[misc]
                )
        yield "all pairs at once", lambda: _of(job, 0, ring_copies)


def _of(job: Job, rank: int, work: Callable[[Job], list[Sweep]]) -> list[Sweep]:
    return work(job) if job.rank == rank else []


def warm(job: Job) -> None:
    """A collective before any point-to-point call: NCCL wants all ranks at a group's first batch."""
    import torch
    import torch.distributed as dist

    if job.world > 1:
        dist.all_reduce(torch.ones(1, device=job.device))
        torch.cuda.synchronize()


def host_nodes(job: Job) -> list[int | None]:
    """NUMA nodes with memory that this process may use; [None] where there is nothing to choose."""
    permitted = allowed("Mems_allowed_list")
    nodes = [n.index for n in numa_nodes() if n.memory and (permitted is None or n.index in permitted)]
    if len(nodes) < 2:
        return [None]
    try:
        with memory_on(nodes[0]):
            return list(nodes)
    except NumaRefused as error:
        job.skip(f"host memory by NUMA node: {error}")
        return [None]


def timed(stream: torch.cuda.Stream, work: Callable[[], object]) -> Timed:
    """Seconds of `work` on `stream` by CUDA events."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        with torch.cuda.stream(stream):
            begin.record()
            work()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return once


def _name(device: torch.device) -> str:
    return f"cuda{device.index}"


def device_memory(job: Job) -> list[Sweep]:
    """Copies inside the device; bytes count what is read and what is written."""
    import torch

    free, _ = torch.cuda.mem_get_info(job.device)
    sizes = [size for size in MEMORY_SIZES if size <= free // 4]
    if len(sizes) < 2:
        job.skip(f"device memory of GPU{job.rank}: too little of it is free")
        return []
    stream = torch.cuda.Stream(job.device)

    def make(moved: int) -> Timed:
        src = torch.ones(moved // 2, dtype=torch.uint8, device=job.device)
        dst = torch.empty_like(src)
        torch.cuda.synchronize(job.device)
        return timed(stream, lambda: dst.copy_(src))

    found = points([2 * size for size in sizes], make, job.spec.seconds)
    name = _name(job.device)
    del make
    torch.cuda.empty_cache()
    return [sweep("device copy, read + write", "one", name, name, found, COPY_LATENCY)]


def host_device(job: Job, node: int | None) -> list[Sweep]:
    """Pinned host memory to the device, back, and both at once; on `node` where there are several."""
    import torch

    largest, device = DEVICE_SIZES[-1], job.device
    with memory_on(node):
        host = [torch.ones(largest, dtype=torch.uint8).pin_memory() for _ in range(2)]
    there = [torch.ones(largest, dtype=torch.uint8, device=device) for _ in range(2)]
    torch.cuda.synchronize(device)
    where = _placed(host[0].data_ptr(), node)
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)
    name, at = _name(device), f"numa{node}" if node is not None else "host"

    def to_device(size: int) -> Timed:
        return timed(up, lambda: there[0][:size].copy_(host[0][:size], non_blocking=True))

    def to_host(size: int) -> Timed:
        return timed(down, lambda: host[1][:size].copy_(there[1][:size], non_blocking=True))

    def together(size: int) -> Timed:
        def work() -> None:
            down.wait_stream(up)
            there[0][:size].copy_(host[0][:size], non_blocking=True)
            with torch.cuda.stream(down):
                host[1][:size].copy_(there[1][:size], non_blocking=True)
            up.wait_stream(down)

        return timed(up, work)

    plans: list[tuple[Direction, str, str, Callable[[int], Timed]]] = [
        ("one", at, name, to_device),
        ("one", name, at, to_host),
        ("both", at, name, together),
    ]
    return [
        sweep("pinned copy", way, src, dst, points(DEVICE_SIZES, make, job.spec.seconds), COPY_LATENCY, where)
        for way, src, dst, make in plans
    ]


def _placed(address: int, node: int | None) -> str:
    """Where the host buffer lies, by numa_maps."""
    if node is None:
        return ""
    elsewhere = share_elsewhere(pages_by_node(address=address), node)
    if elsewhere is None:
        return f"asked for NUMA node {node}; numa_maps does not show where pinned pages lie"
    return f"NUMA node {node}" if elsewhere < 0.01 else f"asked for NUMA node {node}, {100 * elsewhere:.0f} % elsewhere"


def peer_copy(job: Job, a: int, b: int) -> list[Sweep]:
    """Copies from GPU `a` to GPU `b`, issued by a's rank."""
    import torch

    src, dst = torch.device("cuda", a), torch.device("cuda", b)
    stream = torch.cuda.Stream(src)

    def make(size: int) -> Timed:
        data = torch.ones(size, dtype=torch.uint8, device=src)
        into = torch.empty(size, dtype=torch.uint8, device=dst)
        torch.cuda.synchronize(src)
        torch.cuda.synchronize(dst)
        return timed(stream, lambda: into.copy_(data, non_blocking=True))

    where = "" if torch.cuda.can_device_access_peer(a, b) else "no peer access: the copy goes through host memory"
    found = points(DEVICE_SIZES, make, job.spec.seconds)
    return [sweep("device copy", "one", _name(src), _name(dst), found, COPY_LATENCY, where)]


def peer_both(job: Job, a: int, b: int) -> list[Sweep]:
    """Copies both ways between two GPUs at once; the bandwidth is that of one direction."""
    return _at_once(job, [(a, b), (b, a)], "both")


def ring_copies(job: Job) -> list[Sweep]:
    """Every GPU copies to the next at once; the slowest ends the clock."""
    return _at_once(job, [(g, (g + 1) % job.world) for g in range(job.world)], "all")


def _at_once(job: Job, pairs: list[tuple[int, int]], direction: Direction) -> list[Sweep]:
    import torch

    streams = {a: torch.cuda.Stream(torch.device("cuda", a)) for a, _ in pairs}
    first = streams[pairs[0][0]]

    def make(size: int) -> Timed:
        data = {a: torch.ones(size, dtype=torch.uint8, device=torch.device("cuda", a)) for a, _ in pairs}
        into = {b: torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", b)) for _, b in pairs}
        for a, b in pairs:
            torch.cuda.synchronize(a)
            torch.cuda.synchronize(b)

        def work() -> None:
            for a, b in pairs:
                streams[a].wait_stream(first)
                with torch.cuda.stream(streams[a]):
                    into[b].copy_(data[a], non_blocking=True)
            for stream in streams.values():
                first.wait_stream(stream)

        return timed(first, work)

    found = points(DEVICE_SIZES, make, job.spec.seconds)
    latency = f"{len(pairs)} copies at once between two CUDA events"
    return [sweep("device copy", direction, f"cuda{a}", f"cuda{b}", found, latency) for a, b in pairs]
