"""Anti-patterns of the user's model: one line for each kind, layer and source line, the costliest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from costlab.app.analysis import layers as tree
from costlab.app.analysis.views import KernelView, LayerRow, PatternView

if TYPE_CHECKING:
    import pandas as pd

CostKind = Literal["derived", "modelled", ""]
COPIES = ("hidden_copy", "cross_device", "dtype_ping_pong")  # kinds whose kernels do nothing else
_COPY_KERNELS = ("layout_copy", "device_copy", "copy")
_CASTS = ("convert_element_type", "_to_copy")


def pattern_views(
    rows: pd.DataFrame,
    copy_gbps: float | None,
    kernels: Sequence[KernelView] = (),
    layers: Sequence[LayerRow] = (),
) -> list[PatternView]:
    """Rows alike but for the layer's index are one line; bytes and counts add up.

    `cost_ms` is per step: the measured time of the kernels that exist only for the pattern where there are such, else
    the bytes at the measured copy bandwidth, times the `layers` alike that run the same graph.
    """
    groups: dict[tuple[str, ...], list[dict[Any, Any]]] = defaultdict(list)
    for row in rows.to_dict("records"):
        key = (row["kind"], tree.strip_index(row["layer"]), row["phase"], row["source"])
        groups[key].append(row)
    views = [_view(key, found, copy_gbps, kernels, layers) for key, found in groups.items()]
    return sorted(views, key=lambda v: (-(v.cost_ms or 0.0), -v.bytes, v.kind, v.layer, v.source))


def _view(
    key: tuple[str, ...],
    rows: list[dict[Any, Any]],
    copy_gbps: float | None,
    kernels: Sequence[KernelView],
    layers: Sequence[LayerRow],
) -> PatternView:
    kind, layer, phase, source = key
    size = sum(int(r["bytes"]) for r in rows)
    cost_ms, cost_kind = _cost(key, rows, copy_gbps, kernels, layers)
    return PatternView(
        kind=kind,
        text=rows[0]["text"],
        mend=rows[0]["mend"],
        layer=layer,
        phase=phase,
        source=source,
        bytes=size,
        saves_ms=tree.saves_ms(size, copy_gbps) if size else None,
        cost_ms=cost_ms,
        cost_kind=cost_kind,
        count=sum(int(r["count"]) for r in rows),
        ops=", ".join(_distinct(r["ops"] for r in rows)),
    )


def _cost(
    key: tuple[str, ...],
    rows: list[dict[Any, Any]],
    copy_gbps: float | None,
    kernels: Sequence[KernelView],
    layers: Sequence[LayerRow],
) -> tuple[float | None, CostKind]:
    """(ms per step, where from): derived from profiled kernels, modelled from bytes, or unknown."""
    kind, layer, phase, source = key
    own = [k.ms for k in kernels if kind in COPIES and k.source == source and k.phase == phase and _only_copies(k)]
    if source and sum(own) > 0:
        return sum(own), "derived"
    size = sum(int(r["bytes"]) for r in rows)
    ms = tree.saves_ms(size, copy_gbps) if size else None
    if ms is None:
        return None, ""
    named = {r["layer"] for r in rows}
    return ms * max(1.0, _alike(layer, layers) / len(named)), "modelled"


def _only_copies(kernel: KernelView) -> bool:
    """Whether a kernel moves or converts data and does nothing else."""
    if kernel.kind in _COPY_KERNELS:
        return True
    ops = [op for op in kernel.ops.split(",") if op]
    return kernel.kind == "pointwise" and bool(ops) and all(any(c in op for c in _CASTS) for op in ops)


def _alike(layer: str, layers: Sequence[LayerRow]) -> int:
    """How many layers of the tree a path with "*" for its indices stands for."""
    return sum(row.alike for row in layers if row.path and tree.strip_index(_first(row.path)) == layer)


def _first(path: str) -> str:
    """A folded path with every list of indices replaced by one index."""
    return ".".join("0" if p[:1].isdigit() or p == "*" else p for p in path.split("."))


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(t for t in texts if t))[:4]
