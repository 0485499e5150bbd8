"""From a run's trace and the scan of its model to candidates, each with what the roofline says it would save.

The prediction is of this run's own figures: the measured time of the memory-bound kernels of the layers that a rewrite
covers, less the time that the fused kernel's traffic takes at the copy bandwidth measured in the run. Where the
kernel's sizes are not known it is the bytes of the missed fusions at that bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from costlab.app.analysis.views import CandidateView, FusionView, KernelView, RunReport
from costlab.kernels.fused.plan import any_index
from costlab.probes.records import MissRow
from costlab.probes.tune_records import CacheRow, Scan, SiteRow

SEED_MISS, SEED_RATIO = 0.15, 0.6
LEAST_SHARE = 0.002  # of the step: a smaller saving is not worth a leg
UNCOVERED = 6  # candidates shown for which there is no kernel
_EXTERN = ("extern", "template", "collective", "wait", "nop")


@dataclass(frozen=True)
class Evidence:
    """What candidates are judged by."""

    report: RunReport
    misses: Sequence[MissRow]
    scan: Scan
    hits: dict[str, float] = field(default_factory=dict)  # kernel -> measured L2 hit rate
    copy_gbps: float | None = None

    @property
    def fusion(self) -> FusionView | None:
        """The run's fusion trace."""
        return self.report.fusion

    @property
    def step_ms(self) -> float | None:
        """Median step of the run."""
        return self.report.steps.step_ms.value if self.report.steps else None


def candidates(evidence: Evidence) -> list[CandidateView]:
    """One for each place a kernel fits, the largest predicted saving first; then losses that no kernel mends."""
    fitting = [s for s in evidence.scan.sites if s.path != "eager"]
    found = [candidate(evidence, site) for site in fitting]
    found.sort(key=lambda c: -(c.predicted_ms or 0.0))
    covered = {layer for c in found for layer in c.layers}
    return [*found, *uncovered(evidence, covered)]


def candidate(evidence: Evidence, site: SiteRow) -> CandidateView:
    """The candidate of a site."""
    layers = list(site.inside) or [site.where]
    kernels = memory_kernels(evidence.fusion, layers)
    span = sum(k.ms for k in kernels) if kernels else None
    lost = sum(m.bytes for m in evidence.misses if any_index(m.layer) in layers)
    predicted, how = predict(span, site.bytes, lost, evidence.copy_gbps)
    pair = pair_of(evidence, layers, kernels)
    miss, miss_how = miss_rate(evidence, pair)
    moved = sum(k.bytes or 0 for k in kernels)
    flops = sum(k.flops or 0 for k in kernels)
    share = predicted / evidence.step_ms if predicted is not None and evidence.step_ms else None
    seed, why = seed_rule(pair, miss)
    return CandidateView(
        name=f"{site.kernel}@{site.where or 'model'}",
        kernel=site.kernel,
        how=site.how,
        where=site.where,
        places=site.places,
        layers=layers,
        span_ms=span,
        kernel_bytes=site.bytes,
        lost=lost,
        predicted_ms=predicted,
        predicted_how=how,
        intensity=flops / moved if moved and flops else None,
        miss_rate=miss,
        miss_how=miss_how,
        latency_ratio=pair[1].ms / (pair[0].ms + pair[1].ms) if pair and pair[0].ms + pair[1].ms else None,
        roofline=share is not None and share >= LEAST_SHARE,
        seed=seed,
        seed_why=why,
        **checked(evidence.scan, f"{site.kernel}@{site.where or 'model'}"),  # type: ignore[arg-type]
    )


def memory_kernels(fusion: FusionView | None, layers: Iterable[str]) -> list[KernelView]:
    """The measured memory-bound kernels of the layers."""
    wanted = set(layers)
    rows = fusion.kernels if fusion else []
    return [k for k in rows if k.category == "memory" and any_index(k.layer) in wanted]


def predict(
    span_ms: float | None, kernel_bytes: int | None, lost: int, copy_gbps: float | None
) -> tuple[float | None, str]:
    """(ms saved per step, how): see the module. None where nothing was measured that it could follow from."""
    if not copy_gbps:
        return None, "the run did not measure this machine's copy bandwidth"
    if span_ms is not None and kernel_bytes is not None:
        floor = kernel_bytes / (copy_gbps * 1e6)
        how = f"{span_ms:.3g} ms of the layers' memory-bound kernels less {floor:.3g} ms, the fused kernel's traffic"
        return max(span_ms - floor, 0.0), f"{how} at {copy_gbps:.0f} GB/s"
    if lost:
        return lost / (copy_gbps * 1e6), f"bytes of the missed fusions at {copy_gbps:.0f} GB/s; sizes not known"
    return None, "no missed fusion and no measured kernel of these layers in the trace"


Pair = tuple[KernelView, KernelView]


def pair_of(evidence: Evidence, layers: Sequence[str], kernels: Sequence[KernelView]) -> Pair | None:
    """Producer and consumer of the layers' largest missed fusion between two measured kernels."""
    known: dict[str, KernelView] = {}
    for kernel in kernels if kernels else evidence.fusion.kernels if evidence.fusion else []:
        known.setdefault(kernel.name, kernel)
    rows = sorted((m for m in evidence.misses if any_index(m.layer) in layers), key=lambda m: -m.bytes)
    for miss in rows:
        first, second = known.get(miss.producer_kernel), known.get(miss.consumer_kernel)
        if first is not None and second is not None and first is not second:
            return first, second
    return None


def miss_rate(evidence: Evidence, pair: Pair | None) -> tuple[float | None, str]:
    """(share of L2 sectors missed by the pair's consumer, how): measured by ncu, else from sizes."""
    if pair is None:
        return None, ""
    consumer = pair[1]
    if consumer.name in evidence.hits:
        return 1.0 - evidence.hits[consumer.name], "measured by ncu on one replayed step"
    size, cache = evidence.scan.cache_bytes, evidence.scan.cache
    if not size or not consumer.bytes or not consumer.calls:
        return None, "neither ncu's counters nor the sizes are known"
    each = consumer.bytes / consumer.calls
    return max(1.0 - size / each, 0.0), f"estimated: what of the kernel's {each / 1e6:.3g} MB does not fit {cache}"


def seed_rule(pair: Pair | None, miss: float | None) -> tuple[bool | None, str]:
    """The rule L2 miss > 15 % and latency ratio < 0.6; None where it cannot say."""
    if pair is None:
        return None, "no two measured kernels with a missed fusion between them"
    if miss is None:
        return None, "no L2 hit rate"
    total = pair[0].ms + pair[1].ms
    ratio = pair[1].ms / total if total else 1.0
    parts = (f"L2 miss {miss:.0%} {'>' if miss > SEED_MISS else '<='} 15 %", f"latency ratio {ratio:.3g}")
    return miss > SEED_MISS and ratio < SEED_RATIO, f"{parts[0]}, {parts[1]} {'<' if ratio < SEED_RATIO else '>='} 0.6"


def checked(scan: Scan, name: str) -> dict[str, object]:
    """Whether the numerics of a candidate were found equal, and over which code."""
    rows = [c for c in scan.checks if name in c.names]
    if not rows:
        return {}
    row = min(rows, key=lambda c: len(c.names))
    if row.loss_error is None:
        return {"checked": False, "check": row.why}
    words = f"loss off by {row.loss_error:.1e}, worst gradient by {row.worst or 0.0:.1e} (bound {row.bound:g})"
    return {"checked": row.ok, "check": f"{words}, {row.path}" + (f": {row.why}" if row.why else "")}


def uncovered(evidence: Evidence, covered: set[str]) -> list[CandidateView]:
    """The largest addressable losses in layers that no kernel covers; they are shown and never tried."""
    sums: dict[tuple[str, str], int] = {}
    for miss in evidence.misses:
        layer = any_index(miss.layer)
        if miss.addressable and layer not in covered:
            sums[layer, miss.cause] = sums.get((layer, miss.cause), 0) + miss.bytes
    largest = sorted(sums.items(), key=lambda item: -item[1])[:UNCOVERED]
    rows = []
    for (layer, cause), lost in largest:
        predicted, how = predict(None, None, lost, evidence.copy_gbps)
        rows.append(
            CandidateView(
                name=f"{cause}@{layer or 'model'}",
                kernel="",
                how="none",
                where=layer,
                layers=[layer],
                lost=lost,
                predicted_ms=predicted,
                predicted_how=how,
                decision="dropped",
                why="no fused kernel computes this; the Fusion pane says what mends it",
            )
        )
    return rows


def hit_rates(rows: Iterable[CacheRow]) -> dict[str, float]:
    """Kernel -> L2 hit rate."""
    return {row.kernel: row.hit_rate for row in rows}


def chosen(found: Sequence[CandidateView], policy: str) -> list[CandidateView]:
    """The candidates that a policy would try: those whose numerics were not found wrong."""
    return [
        c for c in found if c.how != "none" and c.checked is not False and (c.seed if policy == "seed" else c.roofline)
    ]
