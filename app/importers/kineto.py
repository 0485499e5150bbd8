"""Kineto/Chrome traces recorded elsewhere, turned into a run that every pane and report opens."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from costlab.app.importers import ImportProblem
from costlab.app.importers.identity import Claims, assign
from costlab.app.importers.sources import read_all
from costlab.probes.records import (
    CollectiveRow,
    Environment,
    Gpu,
    KernelRow,
    Manifest,
    PartRow,
    Row,
    StepRow,
    WorkloadFacts,
)
from costlab.probes.tables import write_bytes, write_rows
from costlab.probes.trace.analyse import analyse, rows
from costlab.probes.trace.columns import DEVICE, TraceEvents
from costlab.probes.trace.model import RankTrace
from costlab.probes.trace.summary import device_totals, ranks_in_events

NOTHING_ELSE = (
    "imported trace: no unprofiled steps, fusion spans, checkpoint, compile events, memory or energy were recorded; "
    "step times include the profiler's own cost"
)


@dataclass(slots=True)
class _Imported:
    """One analysed trace; its events are gone by now."""

    claims: Claims
    trace: RankTrace
    world_size: int | None
    totals: dict[str, float] | None
    device_name: str
    starts_ns: list[int]


def import_traces(paths: list[Path], out: Path) -> Path:
    """Write the traces in `paths` (files, folders, tar archives of ranks) as a run directory `out` and return it.

    `out` must be absent or empty. Raises ImportProblem when it is not, when a path does not exist, or when no trace
    can be read, and then leaves no folder behind. A trace that cannot be read beside others that can is left out and
    named in the manifest's notes.
    """
    _check_free(out)
    try:
        imported, notes = _read_all(paths)
    except ImportProblem:
        if out.is_dir():
            out.rmdir()
        raise
    ranks, rank_notes = assign([i.claims for i in imported])
    for rank, item in zip(ranks, imported, strict=True):
        _write_rank(out / f"rank-{rank:05d}", rank, item)
    notes = [NOTHING_ELSE, *rank_notes, *notes, *_problems(ranks, imported)]
    write_bytes(out / "manifest.json", msgspec.json.encode(_manifest(paths, out, ranks, imported, notes)))
    return out


def _read_all(paths: list[Path]) -> tuple[list[_Imported], list[str]]:
    """Everything that can be read, and a note on each trace that cannot; ImportProblem where that is all of them."""
    imported: list[_Imported] = []
    notes: list[str] = []
    for name, events in read_all(paths):
        if isinstance(events, TraceEvents):
            imported.append(_analyse(name, events))
        else:
            notes.append(f"left out: {events}")
    if not imported:
        reason = notes[0].removeprefix("left out: ") if notes else "no trace was given; give files, folders or a tar"
        raise ImportProblem(reason + (f" (and {len(notes) - 1} more files alike)" if len(notes) > 1 else ""))
    return imported, notes


def _check_free(out: Path) -> None:
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ImportProblem(f"{out} exists and is not an empty folder; give another --out")
    except OSError as error:
        raise ImportProblem(f"{out} cannot be used: {error.strerror}; give another --out") from error


def _analyse(name: str, events: TraceEvents) -> _Imported:
    on_device = bool(events.is_cat(*DEVICE).any())
    trace = analyse(events, device="cuda" if on_device else "cpu", blocks=[])
    if not on_device and len(events):
        trace.problems.append("no device events: analysed as training on the CPU")
    totals = device_totals(events)
    return _Imported(
        claims=Claims(name, events.rank, frozenset(ranks_in_events(events))),
        trace=trace,
        world_size=events.world_size,
        totals=asdict(totals) if totals else None,
        device_name=_device_name(events) if on_device else "",
        starts_ns=[_unix_ns(events, window.start) for window in trace.steps],
    )


def _device_name(events: TraceEvents) -> str:
    """Name of the device with the events, "" where the trace does not say."""
    used = Counter(events.device[events.is_cat(*DEVICE)].tolist())
    index = used.most_common(1)[0][0] if used else -1
    return events.device_names[index] if 0 <= index < len(events.device_names) else ""


def _unix_ns(events: TraceEvents, us: float) -> int:
    """Unix time of a moment of the trace, 0 where the file's clock has no stated origin."""
    if events.base_ns is not None:
        return events.base_ns + round((events.base_us + us) * 1000)
    return 0


def _write_rank(directory: Path, rank: int, item: _Imported) -> None:
    collectives, parts = rows(item.trace, rank)
    tables: list[tuple[type[Row], list[Any]]] = [
        (StepRow, _steps(item, rank)),
        (CollectiveRow, collectives),
        (PartRow, parts),
        (KernelRow, kernel_rows(item.trace, rank)),
    ]
    for kind, table in tables:
        write_rows(directory, kind, table)


def _steps(item: _Imported, rank: int) -> list[StepRow]:
    windows = zip(item.trace.steps, item.starts_ns, strict=True)
    return [
        StepRow(rank=rank, step=w.step, role="profiled", ms=(w.end - w.start) / 1000, start_ns=ns) for w, ns in windows
    ]


def kernel_rows(trace: RankTrace, rank: int) -> list[KernelRow]:
    """All launches of one kernel from one place as a row, per step, the longest first."""
    calls: Counter[tuple[str, ...]] = Counter()
    times: dict[tuple[str, ...], float] = defaultdict(float)
    moved: dict[tuple[str, ...], list[int | None]] = defaultdict(list)
    for x in trace.launches:
        key = (x.name, x.category, x.phase, x.layer, x.stream, x.op)
        calls[key] += 1
        times[key] += x.dur
        moved[key].append(x.bytes_moved)
    steps = max(len(trace.steps), 1)
    return [
        KernelRow(
            rank=rank,
            name=key[0],
            category=key[1],  # type: ignore[arg-type]
            phase=key[2],
            layer=key[3],
            stream=key[4],
            op=key[5],
            calls=calls[key] / steps,
            ms=us / 1000 / steps,
            bytes_moved=_sum(moved[key], steps),
        )
        for key, us in sorted(times.items(), key=lambda item: -item[1])
    ]


def _sum(values: list[int | None], steps: int) -> int | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / steps) if len(known) == len(values) else None


def _problems(ranks: list[int], imported: list[_Imported]) -> list[str]:
    """What each trace lacks, the same words of several ranks in one note."""
    who: dict[str, list[int]] = defaultdict(list)
    for rank, item in sorted(zip(ranks, imported, strict=True), key=lambda pair: pair[0]):
        for text in item.trace.problems:
            who[text].append(rank)
    return [f"rank{'s' if len(r) > 1 else ''} {_some(r)}: {text}" for text, r in who.items()]


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _manifest(paths: list[Path], out: Path, ranks: list[int], imported: list[_Imported], notes: list[str]) -> Manifest:
    world = max([max(ranks) + 1, *(i.world_size for i in imported if i.world_size is not None)])
    origin = paths[0].resolve().name if len(paths) == 1 else f"{paths[0].resolve().name} and {len(paths) - 1} more"
    by_rank = sorted(zip(ranks, imported, strict=True), key=lambda pair: pair[0])
    on_device = any(i.totals for i in imported)
    environment = Environment(
        device="cuda" if on_device else "cpu",
        gpus=[Gpu(index=rank, name=i.device_name) for rank, i in by_rank if i.device_name],
        limits=["the machine is not recorded in a trace beyond its devices' names"],
    )
    totals = {str(rank): i.totals for rank, i in by_rank if i.totals}
    return Manifest(
        run_id=re.sub(r"[^\w.+-]", "_", out.resolve().name),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        status="complete",
        ranks=world,
        environment=environment,
        workload=WorkloadFacts(name=f"trace {origin}", title="imported trace"),
        notes=notes,
        imported_from=origin,
        extra={"device_totals": totals} if totals else {},
    )
