"""Compilation: time cold and warm, graphs, breaks, recompiles, caches per rank, phases and peak memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costlab.app.analysis.frames import finite, largest, real, total, whole
from costlab.app.analysis.views import BreakView, CacheView, CompileView, Figure, GraphView, Part

if TYPE_CHECKING:
    import pandas as pd

EAGER = "the run was eager: nothing was compiled"
OUTCOMES = ("hit", "miss", "bypass")
# Wall times of whole steps or of all of compilation; not phases of it.
WHOLE = ("total", "first step", "second step")
_NUMBER = r"\d+(\.\d+)?(e[+-]?\d+)?"


def compile_view(
    rows: pd.DataFrame, memory: pd.DataFrame, step_ms: float | None, run_steps: int, compiled: bool | None
) -> CompileView | None:
    """What compiling cost; None where nothing was recorded. `step_ms` is a plain step, taken off the first one.

    `compiled` is None where it is not known, as for a trace recorded elsewhere.
    """
    if rows.empty:
        return CompileView(note=EAGER) if compiled is False else None
    cold = None if compiled is False else _seconds(rows, "cold", step_ms)
    return CompileView(
        cold_s=cold,
        warm_s=None if compiled is False else _seconds(rows, "warm", step_ms),
        graphs=_graphs(rows),
        breaks=_events(rows, "break"),
        recompiles=_events(rows, "recompile"),
        caches=_caches(rows),
        phases=_phases(rows),
        peak_host_bytes=_peak(rows, memory, "host"),
        peak_device_bytes=_peak(rows, memory, "device"),
        amortised_ms=cold.value * 1e3 / run_steps if cold and cold.value is not None and run_steps else None,
        note=EAGER if compiled is False else "",
    )


def _of_run(rows: pd.DataFrame, run: str) -> pd.DataFrame:
    """Rows of the cold compile; where runs are not named, all rows count as cold."""
    wanted = rows.run.isin(("cold", "") if run == "cold" else (run,))
    return rows[wanted]


def _seconds(rows: pd.DataFrame, run: str, step_ms: float | None) -> Figure | None:
    """Compile time of the slowest rank: as recorded, else the first step less a plain one, else the graphs' sum."""
    phases = _of_run(rows[rows.kind == "phase"], run)
    whole_time = largest(phases.seconds[phases.name == "total"])
    if whole_time is not None:
        return Figure(value=whole_time, unit="s", source="measured", how=f"{run} compile, slowest rank")
    first = largest(phases.seconds[phases.name == "first step"])
    if first is not None:
        value, how = max(first - (step_ms or 0.0) / 1e3, 0.0), f"first step of the {run} run less a plain step"
        return Figure(value=value, unit="s", source="derived", how=f"{how}, slowest rank")
    graphs = _of_run(rows[rows.kind == "graph"], run)
    sums = [sum(finite(g.seconds)) for _, g in graphs.groupby("rank")]
    if not sums or not max(sums):
        return None
    return Figure(value=max(sums), unit="s", source="derived", how=f"sum over the graphs of the {run} compile")


def _first_rank(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["rank"].isin([rows["rank"].min()])]


def _graphs(rows: pd.DataFrame) -> list[GraphView]:
    graphs = _first_rank(_of_run(rows[rows.kind == "graph"], "cold"))
    return [
        GraphView(compile_id=str(r["name"]), name=str(r["detail"]), ops=whole(r["count"]), seconds=real(r["seconds"]))
        for r in graphs.to_dict("records")
    ]


def _events(rows: pd.DataFrame, kind: str) -> list[BreakView]:
    """Breaks or recompiles, the same ones together; counts are those of the rank that had most.

    The same are those of one line whose texts differ between ranks by numbers only, such as a guard on a value.
    """
    chosen = _of_run(rows[rows.kind == kind], "cold")
    if chosen.empty:
        return []
    times = chosen.assign(times=chosen["count"].fillna(1))
    per_rank = times.groupby(["detail", "source", "rank"], sort=False, as_index=False).agg(
        {"times": "sum", "name": "first", "seconds": total}
    )
    per_rank["alike"] = per_rank.detail.str.replace(_NUMBER, "#", regex=True)
    ranks = per_rank.groupby(["alike", "source", "rank"], sort=False, as_index=False).agg({"times": "sum"})
    most = ranks.sort_values("times", ascending=False, kind="stable").drop_duplicates(["alike", "source"])
    worst = per_rank.merge(most[["alike", "source", "rank"]]).sort_values("times", ascending=False, kind="stable")
    return [
        BreakView(
            reason=str(r["detail"]),
            source=str(r["source"]),
            count=int(r["times"]),
            compile_id=str(r["name"]),
            seconds=real(r["seconds"]),
        )
        for r in worst.to_dict("records")
    ]


def _caches(rows: pd.DataFrame) -> list[CacheView]:
    counts: dict[tuple[int, str, str], dict[str, int]] = {}
    for r in rows[rows.kind == "cache"].to_dict("records"):
        name, outcome = str(r["name"]), str(r["detail"])
        if outcome not in OUTCOMES:
            name, _, outcome = name.rpartition("_")
        if outcome in OUTCOMES:
            entry = counts.setdefault((int(r["rank"]), str(r["run"]), name), dict.fromkeys(OUTCOMES, 0))
            entry[outcome] += whole(r["count"]) or 0
    return [CacheView(rank=rank, run=run, cache=cache, **c) for (rank, run, cache), c in sorted(counts.items())]


def _phases(rows: pd.DataFrame) -> list[Part]:
    phases = _first_rank(_of_run(rows[rows.kind == "phase"], "cold"))
    timed = [(str(n), real(s)) for n, s in zip(phases.name, phases.seconds, strict=True) if n not in WHOLE]
    known = [(n, s * 1e3) for n, s in timed if s is not None]
    return [Part(name=n, ms=ms) for n, ms in known]


def _peak(rows: pd.DataFrame, memory: pd.DataFrame, which: str) -> Figure | None:
    recorded = rows[(rows.kind == "memory") & (rows.name.str.replace("_", " ") == f"{which} peak")]
    value, how = largest(recorded.bytes), f"{which} memory peak while compiling, largest rank"
    if value is None:
        column = "host_peak" if which == "host" else "allocated_peak"
        value = largest(memory[column][memory.phase == "compile"])
        how = f"{which} memory peak of the compile phase, first steps included, largest rank"
    return None if value is None else Figure(value=value, unit="B", source="measured", how=how)
