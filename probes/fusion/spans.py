"""Joins the fusion trace to measured launches: span, miss and kernel tables of one rank. Torch-free.

Every launch ends in one kernel span: of a scheduled kernel, or of an operator outside any graph. Layer spans count
everything inside them; the span of the model itself (layer "") holds only what no submodule owns, since its phase is
the sum. A compiled launch that can be tied to no layer gets a span without a parent, which lowers the trace's quality.
Times are means over the profiled steps; bytes are Inductor's, per step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from costlab.probes.fusion import fqn
from costlab.probes.fusion.classes import class_of, classify
from costlab.probes.fusion.leaves import PHASES, Leaf, collect, instances_of, leaf_of
from costlab.probes.fusion.matching import Match, Matcher
from costlab.probes.fusion.model import FusionTrace
from costlab.probes.fusion.rates import Tally, per_layer, total
from costlab.probes.fusion.verdicts import Verdicts, levels, path_of
from costlab.probes.records import KernelRow, MissRow, SpanRow
from costlab.probes.trace.model import RankTrace

REASON_LIMIT = 400  # characters of a scheduler reason that are stored
_OWN_CLASS = ("optimizer", "fsdp", "loss")


def join(
    trace: FusionTrace,
    rank_trace: RankTrace,
    *,
    trace_id: str,
    rank: int,
    layer_classes: dict[str, str],
    blocks: list[str],
    compiled: bool = True,
) -> tuple[list[SpanRow], list[MissRow], list[KernelRow]]:
    """Span, miss and kernel rows of one rank.

    Args:
        trace: what the collector saw; an unsupported one gives spans with status "unknown".
        rank_trace: measured launches; may be empty, then times are None and a graph counts one call per block.
        trace_id: the same on all ranks.
        rank: rank of the rows.
        layer_classes: module FQN -> class, as the workload tells.
        blocks: FQNs of the modules that may share a compiled graph.
        compiled: whether the run was meant to be compiled; only then eager layers are broken.
    """
    joined = _Joined(trace, rank_trace, layer_classes, blocks, compiled)
    spans = _Spans(joined, trace_id, rank).rows()
    return spans, _misses(joined, rank), _kernels(joined, rank)


def span_id(trace_id: str, path: str, rank: int) -> str:
    """Id of a span from where it is in the tree; equal input gives equal ids on any machine."""
    return blake2b(repr((trace_id, path, rank)).encode(), digest_size=8).hexdigest()


class _Joined:
    """The two traces put together: matches, instances of graphs, own traffic per layer, leaves, verdicts."""

    def __init__(
        self, trace: FusionTrace, measured: RankTrace, classes: dict[str, str], blocks: Sequence[str], compiled: bool
    ) -> None:
        self.graphs = trace.graphs if trace.supported else []
        self.classes = classes
        self.types = trace.module_types
        self.steps = max(1, len(measured.steps) or len({x.step for x in measured.launches}))
        modules = [*blocks, *classes]
        self.matches = Matcher(self.graphs, modules).match(measured.launches)
        self.instances = instances_of(self.graphs, self.matches, self.steps, modules)
        self.own = per_layer(self.instances)
        self.leaves = list(collect(self.graphs, self.matches, self.instances).values())
        self.verdicts = Verdicts(self.own, self.leaves, self.steps, judged=trace.supported and compiled)

    def layer_class(self, layer: str) -> str:
        """Class of a layer, from the workload's table, the module's type, or its name."""
        if layer in self.classes:
            return self.classes[layer]
        if layer in _OWN_CLASS:
            return layer
        typed = self.types.get(layer, "")
        return classify(layer, typed) if typed else class_of(layer, self.classes)


class _Spans:
    """Builds the rows of the span tree."""

    def __init__(self, joined: _Joined, trace_id: str, rank: int) -> None:
        self.x = joined
        self.trace_id, self.rank = trace_id, rank

    def rows(self) -> list[SpanRow]:
        """The tree, parents before children."""
        x = self.x
        present = {leaf.phase for leaf in x.leaves} | set(x.own)
        everything = total(t for layers in x.own.values() for t in layers.values())
        figures = self._figures(everything, x.leaves)
        rows = [self._row("step", "step", None, name="step", fusion_status=x.verdicts.step(), **figures)]
        for phase in (p for p in PHASES if p in present):
            rows.append(self._phase(phase))
            rows += self._layers(phase)
        ordered = sorted(x.leaves, key=lambda leaf: (PHASES.index(leaf.phase), fqn.natural(leaf.layer)))
        return rows + [self._kernel(leaf) for leaf in ordered]

    def _row(self, kind: str, path: str, parent: str | None, **values: Any) -> SpanRow:
        above = None if parent is None else span_id(self.trace_id, parent, self.rank)
        own = span_id(self.trace_id, path, self.rank)
        return SpanRow(
            trace_id=self.trace_id,
            span_id=own,
            parent_span_id=above,
            rank=self.rank,
            kind=kind,  # type: ignore[arg-type]
            **values,
        )

    def _phase(self, phase: str) -> SpanRow:
        leaves = [leaf for leaf in self.x.leaves if leaf.phase == phase]
        figures = self._figures(total(self.x.own.get(phase, {}).values()), leaves)
        verdict = self.x.verdicts.phase(phase)
        return self._row("phase", path_of(phase), "step", name=phase, phase=phase, fusion_status=verdict, **figures)

    def _layers(self, phase: str) -> list[SpanRow]:
        own = self.x.own.get(phase, {})
        below: dict[str, list[Leaf]] = defaultdict(list)
        tallies: dict[str, Tally] = defaultdict(Tally)
        for leaf in self.x.leaves:
            if leaf.phase == phase and leaf.placed:
                for path in levels(leaf.layer):
                    below[path].append(leaf)
        for layer, tally in own.items():
            for path in levels(layer):
                tallies[path] += tally
            tallies[layer].hard |= tally.hard
        paths = sorted({*below, *tallies}, key=fqn.natural)
        return [self._layer(phase, path, tallies[path], below[path]) for path in paths]

    def _layer(self, phase: str, path: str, tally: Tally, leaves: list[Leaf]) -> SpanRow:
        above = fqn.parent(path)
        figures = self._figures(tally, leaves)
        uncompiled = self.x.verdicts.uncompiled(phase, path)
        if uncompiled is not None and not tally.hard:
            figures["main_cause"] = figures["main_cause"] or uncompiled[1]
        return self._row(
            "layer",
            path_of(phase, path),
            path_of(phase, above) if above else path_of(phase),
            name=path or "model",
            phase=phase,
            layer=path,
            layer_class=self.x.layer_class(path),
            fusion_status=self.x.verdicts.layer(phase, path),
            **figures,
        )

    def _figures(self, tally: Tally, leaves: Sequence[Leaf]) -> dict[str, Any]:
        steps = self.x.steps
        measured = [leaf for leaf in leaves if leaf.us or leaf.launches]
        traced = tally.operators > 0
        flops = sum(leaf.kernel.flops * leaf.calls(steps) for leaf in leaves if leaf.kernel is not None)
        return {
            "fusion_rate": tally.rate,
            "strict_rate": tally.strict_rate,
            "calls": round(sum(leaf.launches for leaf in leaves) / steps),
            "ms": sum(leaf.us for leaf in measured) / steps / 1e3 if measured else None,
            "bytes_read": round(tally.read) if traced else None,
            "bytes_written": round(tally.written) if traced else None,
            "addressable_lost": round(tally.addressable) if traced else None,
            "structural_lost": round(tally.structural) if traced else None,
            "main_cause": tally.main_cause,
            "flops": round(flops) or None,
        }

    def _kernel(self, leaf: Leaf) -> SpanRow:
        parent = path_of(leaf.phase, leaf.layer)
        verdict, cause = self.x.verdicts.kernel(leaf)
        steps = self.x.steps
        return self._row(
            "kernel",
            f"{parent}/{leaf.identity}",
            parent if leaf.placed else None,
            name=leaf.name,
            phase=leaf.phase,
            layer=leaf.layer,
            layer_class=self.x.layer_class(leaf.layer),
            kernel_kind=leaf.kind,
            fusion_status=verdict,
            main_cause=cause,
            calls=round(leaf.launches / steps),
            ms=leaf.us / steps / 1e3 if leaf.us or leaf.launches else None,
            compile_id=leaf.compile_id,
            **self._scheduled(leaf),
        )

    def _scheduled(self, leaf: Leaf) -> dict[str, Any]:
        """What the compile knows of a kernel."""
        kernel = leaf.kernel
        if kernel is None:
            return {"ops": ",".join(sorted(leaf.operators))}
        calls = leaf.calls(self.x.steps)
        lost = kernel.addressable_lost
        return {
            "fusion_rate": 1 - lost / kernel.actual if kernel.actual else None,
            "strict_rate": 1 - (lost + kernel.structural_lost) / kernel.actual if kernel.actual else None,
            "bytes_read": round(kernel.bytes_read * calls),
            "bytes_written": round(kernel.bytes_written * calls),
            "addressable_lost": round(lost * calls),
            "structural_lost": round(kernel.structural_lost * calls),
            "flops": round(kernel.flops * calls) or None,
            "ops": ",".join(kernel.ops),
            "source": kernel.source,
        }


def _misses(x: _Joined, rank: int) -> list[MissRow]:
    rows = [
        MissRow(
            rank=rank,
            layer=fqn.join(instance.base, relative),
            phase=instance.phase,
            cause=item.cause,
            addressable=item.addressable,
            bytes=round(item.bytes * instance.calls),
            reason=item.reason[:REASON_LIMIT],
            producer=item.producer,
            consumer=item.consumer,
            producer_source=item.producer_source or item.culprit_source,
            consumer_source=item.consumer_source,
            producer_kernel=item.producer_kernel,
            consumer_kernel=item.consumer_kernel,
            compile_id=instance.graph.compile_id,
        )
        for instance in x.instances
        for relative, traffic in instance.graph.layers.items()
        for item in traffic.lost
    ]
    return sorted(rows, key=lambda r: (not r.addressable, -r.bytes))


def _kernels(x: _Joined, rank: int) -> list[KernelRow]:
    sums: dict[tuple[str, ...], list[Match]] = defaultdict(list)
    for match in x.matches:
        leaf = leaf_of(x.graphs, match)
        launch = match.launch
        sums[match.name, launch.category, leaf.phase, leaf.layer, launch.stream, launch.op].append(match)
    return sorted((_kernel_row(x, rank, key, found) for key, found in sums.items()), key=lambda r: (-r.ms, r.name))


def _kernel_row(x: _Joined, rank: int, key: tuple[str, ...], found: list[Match]) -> KernelRow:
    name, category, phase, layer, stream, op = key
    moved = [m.launch.bytes_moved for m in found if m.launch.bytes_moved is not None]
    flops = sum(
        x.graphs[m.graph].kernels[m.kernel].flops
        for m in found
        if m.graph is not None and m.kernel is not None and not m.alias
    )
    return KernelRow(
        rank=rank,
        name=name,
        category=category,  # type: ignore[arg-type]
        phase=phase,
        layer=layer,
        calls=len(found) / x.steps,
        ms=sum(m.launch.dur for m in found) / x.steps / 1e3,
        bytes_moved=round(sum(moved) / x.steps) if moved else None,
        flops=round(flops / x.steps) or None,
        stream=stream,
        op=op,
    )
