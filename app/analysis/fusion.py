"""Fusion rate by layer and class, missed fusions and kernels, from the span, miss and kernel tables of one rank.

rate = 1 - addressable lost bytes / actual bytes of the fusible kernels, as Inductor scheduled them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from costlab.app.analysis import layers as tree
from costlab.app.analysis.frames import finite, real, records, whole
from costlab.app.analysis.layers import Traffic
from costlab.app.analysis.views import Figure, FusionView, KernelView, MissView
from costlab.probes.fusion.causes import text_of
from costlab.probes.records import FusionStatus, WorkloadFacts

if TYPE_CHECKING:
    import pandas as pd

RATE_HOW = "1 - addressable lost bytes / actual bytes of the fusible kernels of a step, as Inductor scheduled them"
QUALITY_HOW = "share of profiled kernel time whose span has an unbroken chain of parents up to the step"
_TRAFFIC = ("layer", "ms", "bytes_read", "bytes_written", "addressable_lost", "structural_lost", "fusion_status",
            "main_cause")  # fmt: skip
_SCHEDULED = ("name", "layer", "phase", "kernel_kind", "fusion_status", "bytes_read", "bytes_written", "flops", "ops",
              "source")  # fmt: skip
LIBRARY = ("extern", "template", "foreach", "collective", "wait", "nop", "user_triton", "copy")


def fusion_view(
    spans: pd.DataFrame, misses: pd.DataFrame, kernels: pd.DataFrame, facts: WorkloadFacts, note: str = ""
) -> FusionView | None:
    """The fusion trace of one rank; None where neither spans nor kernels were recorded."""
    if spans.empty and kernels.empty:
        return None
    own = own_traffic(spans)
    leave_out_collectives(own, spans)
    add_misses(own, misses)
    named = spans[(spans.kind == "layer") & (spans.layer_class != "")]
    classes = facts.layer_classes | dict(zip(named.layer, named.layer_class, strict=True))
    root = tree.build_tree(own, classes)
    root.verdict = _step_status(
        spans
    )  # a span of the model itself speaks for what no submodule owns, not for the model
    copy = facts.copy_gbps
    whole_step = root.all
    return FusionView(
        rate=_rate_figure(whole_step),
        strict_rate=whole_step.strict_rate,
        target=tree.target_of("") if whole_step.rate is not None else None,
        status=root.status,
        quality=quality(spans, kernels),
        classes=tree.class_rows(root, copy),
        layers=tree.layer_rows(root, copy) if own else [],
        misses=miss_views(misses, copy),
        kernels=kernel_views(spans, kernels, copy),
        note=note or _note(spans, whole_step),
    )


def _step_status(spans: pd.DataFrame) -> FusionStatus | None:
    steps = spans.fusion_status[spans.kind == "step"]
    return cast(FusionStatus, steps.iloc[0]) if len(steps) else None


def _rate_figure(t: Traffic) -> Figure | None:
    if t.rate is None:
        return None
    return Figure(value=t.rate, unit="rate", source="derived", how=RATE_HOW, n=t.kernels)


def _note(spans: pd.DataFrame, t: Traffic) -> str:
    if spans.empty:
        return "no fusion spans were recorded: rate and status are unknown"
    if t.rate is None:
        return "no compiled kernel moved bytes that could be fused: there is no rate"
    return ""


def own_traffic(spans: pd.DataFrame) -> dict[str, Traffic]:
    """Module FQN -> its own traffic over all phases, children left out.

    Layer spans may or may not include their children; which, is seen from their sum against the phases'.
    """
    own: dict[str, Traffic] = {}
    layers = spans[spans.kind == "layer"]
    for phase, rows in layers.groupby("phase", sort=False):
        by_layer = {r["layer"]: _span_traffic(r) for r in records(rows, _TRAFFIC)}
        if includes_children(by_layer, spans[spans.phase == phase]):
            _subtract_children(by_layer)
        for layer, traffic in by_layer.items():
            own.setdefault(layer, Traffic()).__iadd__(traffic)
    counts = spans[spans.kind == "kernel"].groupby("layer").size()
    for layer, count in counts.items():
        own.setdefault(str(layer), Traffic()).kernels = int(count)
    return own


def leave_out_collectives(own: dict[str, Traffic], spans: pd.DataFrame) -> None:
    """Take the collectives' time out of their layers, in place: most of it is waiting, and none of it can be fused."""
    collectives = spans[(spans.kind == "kernel") & (spans.kernel_kind == "collective")]
    for layer, spent in collectives.groupby("layer").ms.sum().items():
        if str(layer) in own:
            own[str(layer)].ms = max(own[str(layer)].ms - float(spent), 0.0)


def _span_traffic(row: dict[Any, Any]) -> Traffic:
    ms, read, written = real(row["ms"]), whole(row["bytes_read"]), whole(row["bytes_written"])
    return Traffic(
        bytes=(read or 0) + (written or 0),
        lost=whole(row["addressable_lost"]) or 0,
        structural=whole(row["structural_lost"]) or 0,
        ms=ms or 0.0,
        measured=ms is not None,
        traced=read is not None or written is not None,
        statuses=[cast(FusionStatus, row["fusion_status"])],
        hint=row["main_cause"],
    )


def includes_children(by_layer: dict[str, Traffic], phase: pd.DataFrame) -> bool:
    """Whether layer spans of a phase count their children too: then the outermost alone sum to the kernels."""
    top = [t for layer, t in by_layer.items() if _parent(layer, by_layer) is None]
    if len(top) == len(by_layer):
        return False
    kernels = phase[phase.kind == "kernel"]
    truth, every, outermost = sum(finite(kernels.ms)), sum(t.ms for t in by_layer.values()), sum(t.ms for t in top)
    if not truth or every == outermost:
        fusible = kernels[~kernels.kernel_kind.isin(LIBRARY)]
        truth = sum(finite(fusible.bytes_read)) + sum(finite(fusible.bytes_written))
        every, outermost = sum(t.bytes for t in by_layer.values()), sum(t.bytes for t in top)
    return abs(outermost - truth) <= abs(every - truth)


def _parent(layer: str, known: dict[str, Traffic]) -> str | None:
    while layer:
        layer = layer.rpartition(".")[0]
        if layer in known and layer:
            return layer
    return None


def _subtract_children(by_layer: dict[str, Traffic]) -> None:
    """Turn inclusive traffic into own traffic, in place."""
    inclusive = {layer: (t.bytes, t.lost, t.structural, t.ms) for layer, t in by_layer.items()}
    for layer, (size, lost, structural, ms) in inclusive.items():
        parent = _parent(layer, by_layer)
        if parent is None:
            continue
        t = by_layer[parent]
        t.bytes, t.lost = max(t.bytes - size, 0), max(t.lost - lost, 0)
        t.structural, t.ms = max(t.structural - structural, 0), max(t.ms - ms, 0.0)


def add_misses(own: dict[str, Traffic], misses: pd.DataFrame) -> None:
    """Give each layer its causes by bytes, in place."""
    if misses.empty:
        return
    sums = misses.groupby(["layer", "addressable", "cause"])["bytes"].sum()
    for key, size in sums.items():
        layer, can, cause = cast(tuple[str, bool, str], key)
        own.setdefault(layer, Traffic()).causes[bool(can), cause] += int(size)


def quality(spans: pd.DataFrame, kernels: pd.DataFrame) -> Figure | None:
    """Share of kernel time covered by spans with intact parent chains; None without measured kernels."""
    computing = kernels[~kernels.category.isin(("communication", "copy"))]
    whole_ms = sum(finite(computing.ms))
    if not whole_ms or spans.empty:
        return None
    ids, above = (spans[c].to_numpy(dtype=object).tolist() for c in ("span_id", "parent_span_id"))
    parents = dict(zip(ids, above, strict=True))
    steps = set(spans.span_id[spans.kind == "step"])
    known: dict[str, bool] = dict.fromkeys(steps, True)
    others = set(kernels.name) - set(computing.name)
    leaves = spans[(spans.kind == "kernel") & ~spans.name.isin(others)]
    intact = [rooted(i, parents, known) for i in leaves.span_id]
    covered = sum(finite(leaves.ms[intact])) if len(leaves) else 0.0
    return Figure(value=min(covered / whole_ms, 1.0), unit="fraction", source="derived", how=QUALITY_HOW, n=len(leaves))


def rooted(span: str, parents: dict[str, Any], known: dict[str, bool]) -> bool:
    """Whether following `parents` from `span` ends at a step; `known` remembers answers, loops count as broken."""
    chain: list[str] = []
    while span not in known:
        known[span] = False
        chain.append(span)
        parent = parents.get(span)
        if not isinstance(parent, str):
            break
        span = parent
    answer = known[span]
    known.update(dict.fromkeys(chain, answer))
    return answer


def miss_views(misses: pd.DataFrame, copy_gbps: float | None) -> list[MissView]:
    """Missed fusions, those of alike layers and the same source together; what can be mended first, by bytes."""
    groups: dict[tuple[str, str, str, bool], list[dict[Any, Any]]] = {}
    for row in records(misses):
        key = tree.strip_index(row["layer"]), row["cause"], row["producer_source"], bool(row["addressable"])
        groups.setdefault(key, []).append(row)
    views = [_miss_view(key[0], rows, copy_gbps) for key, rows in groups.items()]
    return sorted(views, key=lambda m: (not m.addressable, -m.bytes, m.layer))


def _miss_view(layer: str, rows: Sequence[dict[Any, Any]], copy_gbps: float | None) -> MissView:
    first = max(rows, key=lambda r: r["bytes"])
    size = sum(int(r["bytes"]) for r in rows)
    phases = Counter(r["phase"] for r in rows)
    return MissView(
        layer=layer,
        phase=", ".join(sorted(phases)),
        cause=first["cause"],
        cause_text=text_of(first["cause"]),
        addressable=bool(first["addressable"]),
        bytes=size,
        saves_ms=tree.saves_ms(size, copy_gbps) if first["addressable"] else None,
        reason=first["reason"],
        producer=first["producer"],
        consumer=first["consumer"],
        producer_source=first["producer_source"],
        consumer_source=first["consumer_source"],
        count=len(rows),
    )


def kernel_views(spans: pd.DataFrame, kernels: pd.DataFrame, copy_gbps: float | None) -> list[KernelView]:
    """Measured kernels with what their spans know of them, longest first."""
    rows = records(kernels)
    known = {_key(r): r for r in records(spans[spans.kind == "kernel"], _SCHEDULED)}
    calls: dict[tuple[str, str, str], float] = {}
    for row in rows:
        calls[_key(row)] = calls.get(_key(row), 0.0) + (real(row["calls"]) or 0.0)
    views = [_kernel_view(r, known.get(_key(r), {}), calls[_key(r)], copy_gbps) for r in rows]
    return sorted(views, key=lambda k: (-k.ms, k.name, k.layer))


def _key(row: dict[Any, Any]) -> tuple[str, str, str]:
    return row["name"], row["layer"], row["phase"]


def _kernel_view(row: dict[Any, Any], span: dict[Any, Any], calls: float, copy_gbps: float | None) -> KernelView:
    """`calls` are those of all rows of the span, which may be several streams or operators: they share its bytes."""
    ms, mine = real(row["ms"]) or 0.0, real(row["calls"]) or 0.0
    scheduled = [b for b in (whole(span.get("bytes_read")), whole(span.get("bytes_written"))) if b is not None]
    size = round(sum(scheduled) * mine / calls) if scheduled and calls else whole(row["bytes_moved"])
    gbps = size / (ms * 1e6) if size and ms else None
    return KernelView(
        name=row["name"],
        kind=span.get("kernel_kind", ""),
        category=row["category"],
        layer=row["layer"],
        phase=row["phase"],
        calls=mine,
        ms=ms,
        bytes=size,
        gbps=gbps,
        of_copy=gbps / copy_gbps if gbps and copy_gbps else None,
        flops=whole(row["flops"]) or whole(span.get("flops")),
        status=cast(FusionStatus, span.get("fusion_status") or "unknown"),
        ops=span.get("ops", "") or row["op"],
        source=span.get("source", ""),
    )
