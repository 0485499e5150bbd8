"""Anti-patterns of the user's model: one line for each kind, layer and source line, the costliest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from costlab.app.analysis import layers as tree
from costlab.app.analysis.views import PatternView

if TYPE_CHECKING:
    import pandas as pd


def pattern_views(rows: pd.DataFrame, copy_gbps: float | None) -> list[PatternView]:
    """Rows alike but for the layer's index are one line; bytes and counts add up."""
    groups: dict[tuple[str, ...], list[dict[Any, Any]]] = defaultdict(list)
    for row in rows.to_dict("records"):
        key = (row["kind"], tree.strip_index(row["layer"]), row["phase"], row["source"])
        groups[key].append(row)
    views = [_view(key, found, copy_gbps) for key, found in groups.items()]
    return sorted(views, key=lambda v: (-v.bytes, v.kind, v.layer, v.source))


def _view(key: tuple[str, ...], rows: list[dict[Any, Any]], copy_gbps: float | None) -> PatternView:
    size = sum(int(r["bytes"]) for r in rows)
    return PatternView(
        kind=key[0],
        text=rows[0]["text"],
        mend=rows[0]["mend"],
        layer=key[1],
        phase=key[2],
        source=key[3],
        bytes=size,
        saves_ms=tree.saves_ms(size, copy_gbps) if size else None,
        count=sum(int(r["count"]) for r in rows),
        ops=", ".join(_distinct(r["ops"] for r in rows)),
    )


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(t for t in texts if t))[:4]
