"""A snapshot of the state in its own device's memory, coded and laid out as the file will be.

It takes a few launches whatever the number of tensors, so that the training step waits for a copy inside the device
(some milliseconds for gigabytes) and not for the bus. Costs as much device memory as the file has bytes until they
are on the host; `choose_direct` says how much of a plan is copied straight to the host where memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from costlab.kernels.codec import triton_blocks, triton_tiles
from costlab.kernels.codec.codecs import Codec, as_bytes, block_grid
from costlab.kernels.codec.layout import PAGE, Kind, align, part_offsets
from costlab.kernels.codec.plan import Item, Plan, Way

if TYPE_CHECKING:
    from collections.abc import Callable

    Row = tuple[int, ...]

KEEP_FREE = 1 << 30
KEEP_SHARE = 0.05
NO_RANGE = 0x7F7FFFFF


def choose_direct(plan: Plan, budget: int) -> int:
    """How many of the fixed items, from the first, must go straight to the host to keep the rest in `budget` bytes.

    One more than there are when what is packed must, too.
    """
    if plan.packed_end > budget:
        return len(plan.fixed) + 1
    for number, item in enumerate(plan.fixed):
        start = item.staged_at // PAGE * PAGE
        if item.entry.length and align(plan.packed_end, PAGE) + plan.fixed_end - start <= budget:
            return number
    return len(plan.fixed)


def device_budget(device: torch.device) -> int:
    """Device memory in bytes that a snapshot may take: what is free, less 5 % of the device and 1 GiB."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(KEEP_SHARE * total) - KEEP_FREE)


def counters_of(plan: Plan, device: torch.device) -> torch.Tensor:
    """int32 [kernel items, 4] as the kernels want them at the start.

    Rows have 16 bytes, so that Triton needn't compile for a misaligned pointer as well.
    """
    items = [item for item in plan.items if item.way is Way.KERNEL and item.entry.length]
    rows = [[NO_RANGE, 0, 0, 0] if item.choice.codec is Codec.LOG8 else [0, 0, 0, 0] for item in items]
    return torch.tensor(rows or [[0, 0, 0, 0]], dtype=torch.int32, device=device)


@dataclass(slots=True)
class Table:
    """Rows for one kernel and how many programs each row has."""

    rows: list[Row] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)

    def add(self, row: Row, programs: int) -> None:
        """Append a row of at most five numbers; the sixth is its first program."""
        first = self.rows[-1][5] + self.programs[-1] if self.rows else 0
        self.rows.append((*row, *([0] * (5 - len(row))), first, 0, 0))
        self.programs.append(programs)

    def upload(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The table int64 [rows, 8], the owner of each program int32, and the number of programs."""
        counts = torch.tensor(self.programs)
        owner = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)
        return torch.tensor(self.rows, dtype=torch.int64).to(device), owner.to(device), owner.numel()


class DeviceCopy:
    """How a plan's items get into the arena. Made once a plan; used by every save with the same tensors."""

    def __init__(self, plan: Plan, device: torch.device, direct: int) -> None:
        self.device, self.direct = device, direct
        self.fixed = [item for item in plan.fixed[direct:] if item.entry.length]
        self.packed = plan.packed if direct <= len(plan.fixed) else []
        self.packed_length = plan.packed_end if self.packed else 0
        self.fixed_at = align(self.packed_length, PAGE)
        self.fixed_base = self.fixed[0].staged_at // PAGE * PAGE if self.fixed else plan.fixed_end
        self.length = self.fixed_at + (plan.fixed_end - self.fixed_base if self.fixed else 0)
        self.counters = counters_of(plan, device)
        kernels = [item for item in plan.items if item.way is Way.KERNEL and item.entry.length]
        self._row = {id(item): number for number, item in enumerate(kernels)}
        self._singles: list[tuple[Item, int]] = []
        self._host: list[tuple[Item, int]] = []
        self._host_bytes = self._pinned(sum(align(i.entry.length, 64) for i in self._on_host()))
        self._launches = self._tables()

    def _pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _placed(self) -> list[tuple[Item, int]]:
        """Items of the arena and where they start in it."""
        fixed = [(item, self.fixed_at + item.staged_at - self.fixed_base) for item in self.fixed]
        return [*fixed, *((item, item.staged_at) for item in self.packed if item.entry.length)]

    def _on_host(self) -> list[Item]:
        """Items that the device reads from pinned memory; literals always, for their slot ends with zeros."""
        return [
            item for item, _ in self._placed()
            if item.entry.kind is not Kind.TENSOR
            or (item.way is Way.RAW and self.device.type == "cuda" and not item.source.is_cuda)
        ]  # fmt: skip

    def _tables(self) -> list[Callable[[torch.Tensor, torch.Tensor], None]]:
        tables: dict[tuple[object, ...], Table] = {}
        host, at_host = {id(item) for item in self._on_host()}, 0
        for item, at in self._placed():
            address = item.source.data_ptr()
            length = item.entry.length
            if id(item) in host:
                self._host.append((item, at_host))
                address, length = self._host_bytes.data_ptr() + at_host, align(item.entry.length, 64)
                at_host += length
            elif item.source.device != self.device or not item.source.is_contiguous() or item.way is Way.READY:
                self._singles.append((item, at))
                continue
            if item.way is Way.RAW:
                copy_rows(tables, address, at, min(length, self.length - at))
            elif not self._coded_row(tables, item, at):
                self._singles.append((item, at))
        return [_launch(key, *table.upload(self.device)) for key, table in tables.items()]

    def _coded_row(self, tables: dict[tuple[object, ...], Table], item: Item, at: int) -> bool:
        """Add a coded item to its kernel's table; False where the kernel can't take it."""
        x, counter = item.source, 4 * self._row[id(item)]
        codes, scales, _ = part_offsets(item.entry.parts)
        if item.choice.codec is Codec.LOG8:
            fits = x.data_ptr() % 16 == 0 and x.numel() % 16 == 0
            if fits:
                table = tables.setdefault(("log8", x.dtype), Table())
                row = (x.data_ptr(), at, 0, counter, x.numel())
                table.add(row, -(-x.numel() // triton_tiles.LOG8_VALUES))
            return fits
        grid = block_grid(item.entry.shape, item.choice.block)
        tile = triton_tiles.encode_tile(grid, x.dtype)
        if tile is None or x.data_ptr() % 16:
            return False
        table = tables.setdefault((item.choice.codec.name, x.dtype, tile), Table())
        row = (x.data_ptr(), at + codes, at + scales, counter, grid.cols)
        table.add(row, grid.rows // 16 * (grid.cols // tile[0]))
        return True

    def enqueue(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy and code everything on the current stream; (arena uint8 [length], counters). Nothing is synchronised."""
        arena = torch.empty(max(self.length, 1), dtype=torch.uint8, device=self.device)
        counters = self.counters.clone()
        for item, at in self._host:
            self._host_bytes[at : at + item.source.nbytes].copy_(as_bytes(item.source))
        for launch in self._launches:
            launch(arena, counters)
        for item, at in self._singles:
            row = counters[self._row[id(item)]] if item.way is Way.KERNEL else counters[0]
            put(item, arena[at : at + item.entry.length], row)
        return arena, counters


def copy_rows(tables: dict[tuple[object, ...], Table], address: int, at: int, length: int) -> None:
    """Add a copy of `length` bytes from an address to offset `at`, in 16-byte words as far as both are aligned."""
    wide = length // 16 * 16 if address % 16 == 0 and at % 16 == 0 else 0
    for word, start, end in ((4, 0, wide), (1, wide, length)):
        if end > start:
            table = tables.setdefault(("copy", word), Table())
            table.add((address + start, at + start, end - start), -(-(end - start) // triton_tiles.COPY_BYTES[word]))


def _launch(
    key: tuple[object, ...], table: torch.Tensor, owner: torch.Tensor, programs: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    kind, what, *tiles = key
    if kind == "copy":
        assert isinstance(what, int)
        return lambda arena, _: triton_tiles.copy_many(table, owner, programs, arena, what)
    assert isinstance(what, torch.dtype)
    like = torch.empty(1, dtype=what, device=table.device)
    if kind == "log8":
        return lambda arena, counters: triton_tiles.log8_many(like, table, owner, programs, arena, counters)
    fmt: triton_blocks.Format = "e4m3" if kind == Codec.FP8.name else "int8"
    tile = cast("tuple[int, int]", tiles[0])
    return lambda arena, counters: triton_tiles.encode_many(like, table, owner, programs, arena, counters, fmt, tile)


def put(item: Item, extent: torch.Tensor, counters: torch.Tensor) -> None:
    """Copy or code one item into its extent on the device (uint8 [length]); `counters` is its row, int32 [4]."""
    if item.way is Way.READY and item.ready is not None:
        pieces = (item.ready.codes, item.ready.scales, item.ready.structure)
        for at, piece in zip(part_offsets(item.entry.parts), pieces, strict=True):
            extent[at : at + piece.numel() * piece.element_size()].copy_(as_bytes(piece))
    elif item.way is Way.KERNEL:
        _code_into(item, extent, counters)
    else:
        extent.copy_(as_bytes(item.source))


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
