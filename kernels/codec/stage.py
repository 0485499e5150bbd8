"""Copy a planned snapshot into staging memory: on a side stream behind the compute stream, or at once on the CPU.

Values that a kernel codes, and small ones, are first put together in device memory exactly as they will lie in
the file, about 32 MiB at a time, so that few large copies cross to the host. Large raw tensors are copied
directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from costlab.kernels.codec import log8, triton_blocks
from costlab.kernels.codec.codecs import Codec, as_bytes, block_grid, error_bound, raw_blocks
from costlab.kernels.codec.fp8 import bad_blocks
from costlab.kernels.codec.layout import part_offsets
from costlab.kernels.codec.plan import Item, Plan, Way
from costlab.kernels.codec.slabs import Region
from costlab.kernels.codec.writing import extent_bytes, pack_patch

GROUP = 32 << 20
SMALL = 1 << 20


def cuda_device(items: Sequence[Item]) -> torch.device | None:
    """The CUDA device that the items' tensors are on, or None."""
    return next((item.source.device for item in items if item.source.is_cuda), None)


class Stager:
    """Stages one plan after the other on its side stream; `start` and `done` are the last one's device events."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.start: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None
        self._counters: torch.Tensor | None = None

    def stage(self, plan: Plan, fixed: Region, packed: Region) -> None:
        """Enqueue all copies; returns before the device has made them. CPU tensors are copied before it returns."""
        device = cuda_device(plan.items)
        self.start = self.done = None
        if device is None:
            for item in plan.items:
                (packed if item.packing else fixed).copy_in(item.staged_at, _host_bytes(item))
            self._finish(fixed, packed)
            return
        if self.stream is None or self.stream.device != device:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.start, self.done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self.start.record(self.stream)
            kernels = sum(item.way is Way.KERNEL for item in plan.items)
            # Rows of 16 bytes, so that Triton needn't compile for a misaligned pointer as well.
            counters = torch.zeros(max(kernels, 1), 4, dtype=torch.int32, device=device)
            first = self._copy(plan.fixed, fixed, counters, 0)
            self._copy(plan.packed, packed, counters, first)
            self._counters = torch.empty(counters.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._counters.copy_(counters, non_blocking=True)
            self._finish(fixed, packed)
            self.done.record(self.stream)

    @staticmethod
    def _finish(fixed: Region, packed: Region) -> None:
        fixed.finish()
        packed.finish()

    def _copy(self, items: Sequence[Item], region: Region, counters: torch.Tensor, row: int) -> int:
        """Copy items in order; `row` is the counter row of the next kernel item; returns the one after the last."""
        group: list[Item] = []
        for item in items:
            if not item.entry.length:
                continue
            if item.source.is_cuda:
                item.source.record_stream(self.stream)  # type: ignore[arg-type]
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
        if self.done is None or self._counters is None:
            return
        self.done.synchronize()
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            kernel_items = [item for item in plan.items if item.way is Way.KERNEL and item.entry.length]
            for item, counts in zip(kernel_items, self._counters.tolist(), strict=False):
                _complete(item, counts)

    def staged_seconds(self) -> float | None:
        """Device seconds from the first to the last operation of the last staging; None on the CPU."""
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
        extent = together[item.staged_at - base : item.end - base]
        if item.way is Way.KERNEL:
            _code_into(item, extent, counters[row])
            row += 1
        elif item.way is Way.READY and item.ready is not None:
            pieces = (item.ready.codes, item.ready.scales, item.ready.structure)
            for at, piece in zip(part_offsets(item.entry.parts), pieces, strict=True):
                extent[at : at + piece.numel() * piece.element_size()].copy_(as_bytes(piece))
        else:
            extent.copy_(as_bytes(item.source))
    region.copy_in(base, together)
    return row


def _code_into(item: Item, extent: torch.Tensor, counters: torch.Tensor) -> None:
    codes_at, scales_at, _ = part_offsets(item.entry.parts)
    codes = extent[codes_at : codes_at + item.entry.parts[0]]
    source = item.source.contiguous()
    if item.choice.codec is Codec.LOG8:
        triton_blocks.log8_encode_into(source, codes, counters)
        return
    scales = extent[scales_at : scales_at + item.entry.parts[1]].view(torch.float32)
    grid = block_grid(item.entry.shape, item.choice.block)
    fmt: triton_blocks.Format = "e4m3" if item.choice.codec is Codec.FP8 else "int8"
    triton_blocks.encode_into(source, grid, codes, scales, counters[:1], fmt)


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
