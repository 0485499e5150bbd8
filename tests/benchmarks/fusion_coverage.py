"""How much of a recorded run's GPU busy time its kernel spans cover, counted against the raw Kineto trace.

The denominator is taken from the trace file itself, not from costlab's tables: the union of all device intervals
(kernels, collectives, copies, sets) inside the profiled steps.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from costlab.probes.fusion.matching import kernel_name

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = "costlab::step::"
FRAME = "costlab::frame::"


def coverage(run: Path) -> dict[str, Any]:
    """`value` (fraction), busy and span times in ms a step, and the kernels without a span, longest first.

    A span counts if following its parents ends at the step. Where streams overlap, kernel times sum to more than the
    busy time; what has no span is then taken off the busy time whole, so `value` is a lower bound.
    """
    steps, by_name, busy = device_time(run / "raw" / "rank-00000.trace.json.gz")
    spans = pq.read_table(run / "rank-00000" / "spans.parquet").to_pylist()
    kinds, unplaced = span_time(spans)
    raw = sum(by_name.values()) / steps
    covered = sum(kinds.values())
    remainder = raw - covered
    return {
        "value": 1 - abs(remainder) / busy * steps,  # spans of more time than there was are as wrong as too few
        "steps": steps,
        "busy_ms": busy / steps,
        "kernel_ms": raw,
        "span_ms": covered,
        "span_ms_by_kind": dict(kinds.most_common()),
        "without_layer_ms": sum(unplaced.values()),
        "without_layer": dict(unplaced.most_common(8)),
        "remainder_ms": remainder,
        "remainder": dict(uncovered(by_name, run, steps).most_common(12)),
    }


def device_time(path: Path) -> tuple[int, Counter[str], float]:
    """(profiled steps, kernel name -> ms, ms in which the device did anything), over all steps of a trace file."""
    with gzip.open(path, "rb") as stream:
        events = json.load(stream)["traceEvents"]
    named = [e for e in events if e.get("ph") == "X"]
    windows = [
        (e["ts"], e["ts"] + e["dur"])
        for e in named
        if e.get("cat") == "user_annotation" and str(e["name"]).startswith(STEP)
    ]
    inside: Counter[str] = Counter()
    intervals: list[tuple[float, float]] = []
    for e in named:
        if e.get("cat") not in DEVICE_EVENTS:
            continue
        middle = e["ts"] + e["dur"] / 2
        if any(start <= middle <= end for start, end in windows):
            inside[kernel_name(e["name"])] += e["dur"] / 1e3
            intervals.append((e["ts"], e["ts"] + e["dur"]))
    if not windows or not intervals:
        raise ValueError(f"{path.name} has no profiled step with device events")
    return len(windows), inside, union(intervals) / 1e3


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def span_time(spans: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """(kernel kind -> ms of spans with an unbroken chain of parents, name -> ms of those that name no layer)."""
    parents = {s["span_id"]: s["parent_span_id"] for s in spans}
    step = next(s["span_id"] for s in spans if s["kind"] == "step")
    kinds: Counter[str] = Counter()
    unplaced: Counter[str] = Counter()
    for span in (s for s in spans if s["kind"] == "kernel" and s["ms"]):
        above, hops = span["parent_span_id"], 0
        while above is not None and above != step and hops < len(parents):
            above, hops = parents.get(above), hops + 1
        if above == step:
            kinds[span["kernel_kind"]] += span["ms"]
            if not span["layer"]:
                unplaced[span["name"]] += span["ms"]
    return kinds, unplaced


def uncovered(by_name: Counter[str], run: Path, steps: int) -> Counter[str]:
    """Kernel name -> ms a step that no span with a parent holds: the raw traces joined once more, launch by launch."""
    import msgspec

    from costlab.probes.fusion.leaves import leaf_of
    from costlab.probes.fusion.matching import Matcher
    from costlab.probes.fusion.model import FusionTrace
    from costlab.probes.trace import kineto
    from costlab.probes.trace.analyse import analyse

    raw = run / "raw"
    manifest = json.loads((run / "manifest.json").read_bytes())
    classes = list((manifest.get("workload") or {}).get("layer_classes") or ())
    events = kineto.read(raw / "rank-00000.trace.json.gz")
    blocks = sorted({n.removeprefix(FRAME) for n in events.names if n.startswith(FRAME)})
    trace = analyse(events, device="cuda", blocks=blocks)
    fusion = msgspec.json.decode(gzip.decompress((raw / "rank-00000.fusion.json.gz").read_bytes()), type=FusionTrace)
    placed: dict[str, float] = defaultdict(float)
    for match in Matcher(fusion.graphs, [*blocks, *classes]).match(trace.launches):
        if leaf_of(fusion.graphs, match).placed:
            placed[match.name] += match.launch.dur / 1e3
    left = {name: (ms - placed[name]) / steps for name, ms in by_name.items()}
    return Counter({name: ms for name, ms in left.items() if ms > 1e-4})
