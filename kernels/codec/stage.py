"""Get a planned snapshot into staging memory: through a copy on the device, or at once on the CPU.

On a GPU `begin` enqueues a copy inside the device's memory (see `snapshot`) on a side stream behind the compute
stream and returns; the background then brings it to the host. What the device has no room for is copied straight
to the host, about 32 MiB of small or coded values at a time put together on the device first, and the state must
wait for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from costlab.kernels.codec import log8
from costlab.kernels.codec.codecs import Codec, as_bytes, block_grid, error_bound, raw_blocks
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.fp8 import bad_blocks
from costlab.kernels.codec.plan import Item, Plan, Way
from costlab.kernels.codec.slabs import Region
from costlab.kernels.codec.snapshot import DeviceCopy, choose_direct, device_budget, put
from costlab.kernels.codec.writing import extent_bytes, pack_patch

GROUP = 32 << 20
SMALL = 1 << 20
SnapshotMode = Literal["auto", "device", "stream"]


def cuda_device(items: Sequence[Item]) -> torch.device | None:
    """The CUDA device that the items' tensors are on, or None."""
    return next((item.source.device for item in items if item.source.is_cuda), None)


class Stager:
    """Stages one plan after the other on its side stream. `start`: before the first operation of the last plan;
    `done`: the state may change; None on the CPU.
    """

    def __init__(self, mode: SnapshotMode = "auto") -> None:
        self.mode: SnapshotMode = mode
        self.stream: torch.cuda.Stream | None = None
        self.start: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None
        self.device: torch.device | None = None
        self.snapshot_bytes = 0
        self._arena: torch.Tensor | None = None
        self._counters: torch.Tensor | None = None
        self._on_host: torch.Tensor | None = None

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """What the block enqueues runs on the stream of the copies.

        The device comes first: a thread whose current device is another would, on leaving the stream, switch back to
        that and make a context on it, which takes half a GB of a neighbour's memory.
        """
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            yield

    def begin(self, plan: Plan, fixed: Region, packed: Region) -> None:
        """Enqueue the device's copy; returns before it is made. CPU tensors are copied before it returns."""
        device = cuda_device(plan.items)
        self.start = self.done = self._arena = self._counters = self._on_host = None
        if device is None:
            for item in plan.items:
                (packed if item.packing else fixed).copy_in(item.staged_at, _host_bytes(item))
            fixed.finish()
            packed.finish()
            return
        self.device = device
        if self.stream is None or self.stream.device != device:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.start, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._on_stream():
            self.start.record(self.stream)
            copy = self._device_copy(plan, device)
            for item in [] if not copy.direct else plan.items:
                if not item.source.is_cuda and device.type == "cuda":
                    item.source = item.source.clone()
            if not copy.direct:
                self._finish_device(self.done)

    def _device_copy(self, plan: Plan, device: torch.device) -> DeviceCopy:
        """Take the snapshot; a smaller one, of nothing at worst, when the memory isn't there after all."""
        try:
            if plan.device_copy is None:
                plan.device_copy = DeviceCopy(plan, device, self._direct(plan, device))
            self._arena, self._counters = plan.device_copy.enqueue()
        except torch.OutOfMemoryError as error:
            if self.mode == "device":
                raise CheckpointError(
                    f"the snapshot does not fit into what {device} has free; snapshot='auto' and 'stream' need less"
                ) from error
            plan.device_copy = DeviceCopy(plan, device, len(plan.fixed) + 1)
            self._arena, self._counters = plan.device_copy.enqueue()
        self.snapshot_bytes = plan.device_copy.length
        return plan.device_copy

    def _direct(self, plan: Plan, device: torch.device) -> int:
        if self.mode == "stream":
            return len(plan.fixed) + 1
        return choose_direct(plan, 1 << 62 if self.mode == "device" else device_budget(device))

    def _finish_device(self, done: torch.cuda.Event) -> None:
        """The kernels' counters follow what they coded; then the state may change."""
        if self._counters is not None:
            on_gpu = self._counters.is_cuda
            self._on_host = torch.empty(self._counters.shape, dtype=torch.int32, pin_memory=on_gpu)
            self._on_host.copy_(self._counters, non_blocking=True)
        done.record(self.stream)

    def copy_direct(self, plan: Plan, fixed: Region, packed: Region) -> None:
        """Enqueue the copies of what isn't in the snapshot. In the background, when `begin` has returned."""
        copy = plan.device_copy
        if self.done is None or copy is None or not copy.direct or self._counters is None:
            return
        with self._on_stream():
            row = self._copy(plan.fixed[: copy.direct], fixed, self._counters, 0)
            if not copy.packed:
                self._copy(plan.packed, packed, self._counters, row)
            self._finish_device(self.done)

    def copy_snapshot(self, plan: Plan, fixed: Region, packed: Region) -> None:
        """Bring the snapshot to the host, as fast as slabs come free; returns when the device is done with it."""
        copy, arena = plan.device_copy, self._arena
        if self.done is None or copy is None or arena is None or self.stream is None:
            return
        with self._on_stream():
            if copy.packed:
                packed.copy_in(0, arena[: copy.packed_length])
            if copy.fixed:
                # The first page may hold the end of what was copied directly.
                first = max(copy.fixed[0].staged_at, fixed.position)
                fixed.copy_in(first, arena[copy.fixed_at + first - copy.fixed_base : copy.length])
            fixed.finish()
            packed.finish()
            self._arena = None
            self.stream.synchronize()

    def _copy(self, items: Sequence[Item], region: Region, counters: torch.Tensor, row: int) -> int:
        """Copy items in order; `row` is the counter row of the next kernel item; returns the one after the last."""
        group: list[Item] = []
        for item in items:
            if not item.entry.length:
                continue
            alone = item.way is Way.RAW and (item.entry.length >= SMALL or not item.source.is_cuda)
            if group and (alone or item.end - group[0].staged_at > GROUP):
                row = _copy_group(group, region, counters, row)
                group = []
            if alone:
                region.copy_in(item.staged_at, as_bytes(item.source))
            else:
                group.append(item)
        return _copy_group(group, region, counters, row) if group else row

    def resolve(self, plan: Plan) -> None:
        """Wait for the device; then complete the entries that kernels coded: ranges, raw blocks, bounds."""
        if self.done is None:
            return
        self.done.synchronize()
        with self._on_stream():
            kernel_items = [item for item in plan.items if item.way is Way.KERNEL and item.entry.length]
            counts = self._on_host.tolist() if self._on_host is not None and kernel_items else []
            for item, numbers in zip(kernel_items, counts, strict=False):
                _complete(item, numbers)

    def abandon(self) -> None:
        """After an error: wait until nothing enqueued touches staging memory any more."""
        self._arena = None
        if self.stream is not None:
            self.stream.synchronize()

    def staged_seconds(self) -> float | None:
        """Device seconds until the state might change, of the last plan; None on the CPU."""
        if self.start is None or self.done is None:
            return None
        return float(self.start.elapsed_time(self.done)) / 1e3


def _host_bytes(item: Item) -> torch.Tensor:
    if item.way is Way.READY and item.ready is not None:
        return torch.from_numpy(extent_bytes(item.ready))
    return as_bytes(item.source)


def _copy_group(group: list[Item], region: Region, counters: torch.Tensor, row: int) -> int:
    base = group[0].staged_at
    together = torch.zeros(group[-1].end - base, dtype=torch.uint8, device=counters.device)
    for item in group:
        put(item, together[item.staged_at - base : item.end - base], counters[row] if len(counters) > row else counters)
        row += item.way is Way.KERNEL
    region.copy_in(base, together)
    return row


def _complete(item: Item, counts: list[int]) -> None:
    entry = item.entry
    if item.choice.codec is Codec.LOG8:
        entry.low, entry.high = log8.normal_range(counts[0], counts[1])
        entry.bound = error_bound(item.choice, entry.low, entry.high)
        if not counts[2]:
            return
        bad = torch.ones(1, dtype=torch.bool, device=item.source.device)
    elif counts[0]:
        bad = bad_blocks(item.source, block_grid(entry.shape, item.choice.block))
    else:
        return
    numbers, values = raw_blocks(item.source, block_grid(entry.shape, entry.choice.block), bad)
    item.patch = pack_patch(numbers, values)
    entry.patch_count, entry.patch_length = numbers.numel(), item.patch.size
