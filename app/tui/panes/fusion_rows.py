"""The fusion tree as lines: expand and collapse, filter, search, sort. Plain values, no widgets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import msgspec

from costlab.app.analysis.layers import covers, strip_index
from costlab.app.analysis.views import ClassRow, FusionView, KernelView, LayerRow, MissView
from costlab.probes.records import FusionStatus

Branch = Literal["open", "closed", "leaf"]
Sort = Literal["tree", "saves", "lost", "ms", "rate"]
SORTS: tuple[Sort, ...] = ("tree", "saves", "lost", "ms", "rate")
STATUSES: tuple[FusionStatus | None, ...] = (None, "partial", "broken", "unknown", "complete")
WORST: tuple[FusionStatus, ...] = ("broken", "partial", "unknown", "complete")
T = TypeVar("T")
HEAVY_DEPTH = 6
_INDICES = re.compile(r"(?<![^.])\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*(?![^.])")


@dataclass(frozen=True)
class FusionLine:
    """One line of the table: a layer, or a layer class when grouped."""

    path: str
    label: str
    status: FusionStatus
    rate: float | None
    target: float | None
    ms: float | None
    bytes: int | None
    lost: int | None
    cause: str
    saves_ms: float | None
    depth: int = 0
    branch: Branch = "leaf"
    alike: int = 1
    kernels: int = 0
    layer_class: str = ""
    gap_ms: float | None = None
    gap_run_money: float | None = None  # of a class only


@dataclass(frozen=True)
class Filter:
    """What is left out, and in which order the rest is shown."""

    status: FusionStatus | None = None
    cause: str = ""
    addressable: bool = False
    text: str = ""
    layer_class: str = ""
    sort: Sort = "tree"

    @property
    def flat(self) -> bool:
        """Whether the tree gives way to a list of full names."""
        return self != Filter()

    @property
    def words(self) -> str:
        """The filter in words, "" when there is none."""
        parts = [
            self.status or "",
            self.cause.replace("_", " "),
            "addressable" if self.addressable else "",
            self.layer_class,
        ]
        parts += [f"“{self.text}”"] if self.text else []
        parts += [f"sorted by {self.sort}"] if self.sort != "tree" else []
        return " · ".join(p for p in parts if p)


@dataclass
class FusionTree:
    """The layers of a run and which of them are open."""

    layers: Sequence[LayerRow] = ()
    opened: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, view: FusionView) -> FusionTree:
        """The tree with its root open and the path to the costliest layer unfolded."""
        tree = cls(layers=view.layers, opened=set())
        tree.opened = {row.path for row in view.layers if row.depth == 0 and row.has_children}
        tree.opened |= tree.heaviest()
        return tree

    def heaviest(self) -> set[str]:
        """Paths of the layers on the way down to where most is lost (or, where nothing is, most time goes)."""
        found: set[str] = set()
        inside = [i for i, row in enumerate(self.layers) if row.depth == 0]
        for _ in range(HEAVY_DEPTH):
            heavy = max(inside, key=self._weight, default=None)
            if heavy is None or not self.layers[heavy].has_children or self._weight(heavy) == (0, 0.0):
                break
            found.add(self.layers[heavy].path)
            inside = self.children(heavy)
        return found

    def _weight(self, index: int) -> tuple[int, float]:
        row = self.layers[index]
        return (row.lost or 0, row.ms or 0.0)

    def children(self, index: int) -> list[int]:
        """Indices of the direct children; the layers are in depth-first order."""
        depth = self.layers[index].depth
        found = []
        for at in range(index + 1, len(self.layers)):
            if self.layers[at].depth <= depth:
                break
            if self.layers[at].depth == depth + 1:
                found.append(at)
        return found

    def toggle(self, path: str, open_: bool | None = None) -> None:
        """Open or close a layer."""
        wanted = path not in self.opened if open_ is None else open_
        (self.opened.add if wanted else self.opened.discard)(path)

    def lines(self, wanted: Filter) -> list[FusionLine]:
        """The lines to show."""
        return self._flat(wanted) if wanted.flat else self._tree()

    def _tree(self) -> list[FusionLine]:
        shown: list[FusionLine] = []
        hidden_below: int | None = None
        for row in self.layers:
            if hidden_below is not None and row.depth > hidden_below:
                continue
            hidden_below = None
            branch: Branch = "leaf"
            if row.has_children:
                branch = "open" if row.path in self.opened else "closed"
            if branch == "closed":
                hidden_below = row.depth
            shown.append(layer_line(row, branch))
        return shown

    def _flat(self, wanted: Filter) -> list[FusionLine]:
        rows = [layer_line(row, flat=True) for row in self.layers if matches(row, wanted)]
        if wanted.sort == "rate":
            return sorted(rows, key=lambda r: r.rate if r.rate is not None else 2.0)
        if wanted.sort != "tree":
            return sorted(rows, key=lambda r: -(_value(r, wanted.sort) or 0.0))
        return rows

    def parent_of(self, path: str) -> str | None:
        """The path of the layer around `path`."""
        index = next((i for i, row in enumerate(self.layers) if row.path == path), None)
        if index is None:
            return None
        depth = self.layers[index].depth
        return next((r.path for r in reversed(self.layers[:index]) if r.depth < depth), None)


def _value(row: FusionLine, sort: Sort) -> float | None:
    return {"saves": row.saves_ms, "lost": row.lost, "ms": row.ms}.get(sort)


def layer_line(row: LayerRow, branch: Branch = "leaf", flat: bool = False) -> FusionLine:
    """A layer as a line; `flat` shows its full name."""
    return FusionLine(
        path=row.path,
        label=(row.path or row.label) if flat else row.label,
        status=row.status,
        rate=row.rate,
        target=row.target,
        ms=row.ms,
        bytes=row.bytes,
        lost=row.lost,
        cause=row.main_cause,
        saves_ms=row.saves_ms,
        depth=0 if flat else row.depth,
        branch=branch,
        alike=row.alike,
        kernels=row.kernels,
        layer_class=row.layer_class,
        gap_ms=row.gap_ms,
    )


def class_lines(rows: Iterable[ClassRow]) -> list[FusionLine]:
    """Layer classes as lines."""
    return [
        FusionLine(
            path=r.layer_class,
            label=r.layer_class,
            status=r.status,
            rate=r.rate,
            target=r.target,
            ms=r.ms,
            bytes=r.bytes,
            lost=r.lost,
            cause="",
            saves_ms=r.saves_ms,
            alike=r.layers,
            layer_class=r.layer_class,
            gap_ms=r.gap_ms,
            gap_run_money=r.gap_run_money,
        )
        for r in rows
    ]


def matches(row: LayerRow, wanted: Filter) -> bool:
    """Whether a layer passes the filter. A search without capitals ignores case."""
    text = wanted.text
    name = f"{row.path} {row.layer_class} {row.main_cause}"
    return (
        (wanted.status is None or row.status == wanted.status)
        and (not wanted.cause or row.main_cause == wanted.cause)
        and (not wanted.addressable or bool(row.lost))
        and (not wanted.layer_class or row.layer_class == wanted.layer_class)
        and (text in (name.lower() if text == text.lower() else name))
    )


def causes(layers: Iterable[LayerRow]) -> list[str]:
    """The main causes that occur, the costliest first."""
    lost: dict[str, int] = {}
    for row in layers:
        if row.main_cause:
            lost[row.main_cause] = lost.get(row.main_cause, 0) + (row.lost or 0)
    return sorted(lost, key=lambda cause: -lost[cause])


def within(layer: str, path: str) -> bool:
    """Whether `layer` is one that the line `path` stands for, or inside it; "*" in `layer` stands for any index."""
    return covers(path, layer) or ("*" in layer and covers(_INDICES.sub("*", path), layer))


class LayerIndex:
    """Missed fusions and kernels of a line and all inside it; grouped once, since a model has few distinct layers."""

    def __init__(self, view: FusionView) -> None:
        self._misses: dict[str, list[MissView]] = {}
        self._kernels: dict[str, list[KernelView]] = {}
        self._found: dict[str, tuple[list[MissView], list[KernelView]]] = {}
        for miss in view.misses:
            self._misses.setdefault(miss.layer, []).append(miss)
        for kernel in view.kernels:
            self._kernels.setdefault(kernel.layer, []).append(kernel)

    def of(self, path: str) -> tuple[list[MissView], list[KernelView]]:
        """Misses, the largest first and addressable ones before structural ones; kernels, the slowest first."""
        if path not in self._found:
            misses = [m for layer, rows in self._misses.items() if within(layer, path) for m in rows]
            kernels = [k for layer, rows in self._kernels.items() if within(layer, path) for k in rows]
            misses.sort(key=lambda m: (not m.addressable, -m.bytes))
            self._found[path] = (misses, together(kernels))
        return self._found[path]


def together(kernels: Iterable[KernelView]) -> list[KernelView]:
    """Kernels of alike layers as one each, per step, the slowest first; rates are of those whose bytes are known."""
    groups: dict[tuple[str, str, str, str], list[KernelView]] = {}
    for k in kernels:
        groups.setdefault((k.name, k.phase, k.kind, strip_index(k.layer)), []).append(k)
    return sorted((_merged(alike) for alike in groups.values()), key=lambda k: -k.ms)


def _merged(alike: list[KernelView]) -> KernelView:
    if len(alike) == 1:
        return alike[0]
    sized = [k for k in alike if k.bytes is not None]
    rated = next((k for k in alike if k.gbps and k.of_copy), None)
    busy, moved = sum(k.ms for k in sized), sum(k.bytes or 0 for k in sized)
    gbps = moved / busy / 1e6 if busy and any(k.gbps for k in sized) else None
    return msgspec.structs.replace(
        alike[0],
        layer=strip_index(alike[0].layer),
        calls=sum(k.calls for k in alike),
        ms=sum(k.ms for k in alike),
        bytes=moved if sized else None,
        gbps=gbps,
        of_copy=gbps * (rated.of_copy or 0.0) / (rated.gbps or 1.0) if gbps and rated else None,
        status=min((k.status for k in alike), key=WORST.index),
    )


def next_of(values: Sequence[T], current: T) -> T:
    """The value after `current`, the first after the last."""
    index = values.index(current) if current in values else -1
    return values[(index + 1) % len(values)]


def cleared(wanted: Filter) -> Filter:
    """No filter, same order."""
    return replace(Filter(), sort=wanted.sort)
