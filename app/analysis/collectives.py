"""Communication across ranks: transfer apart from waiting, bandwidth as nccl-tests defines it, who arrives last.

A collective ends on all ranks at about the same time, so the rank with the shortest call arrived last and its duration
is the transfer; what the others spent beyond it is waiting. That needs no common clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from costlab.app.analysis.frames import real
from costlab.app.analysis.views import CollectivesView, CollectiveView, Figure
from costlab.app.text import plain

if TYPE_CHECKING:
    import pandas as pd

CONVENTION = (
    "bandwidth as nccl-tests: size = the larger of one rank's input and output (all_gather: output, reduce_scatter: "
    "input), algbw = size / transfer time, busbw = algbw x 2(n-1)/n for all_reduce, x (n-1)/n for all_gather, "
    "reduce_scatter, all_to_all, gather and scatter, x 1 for broadcast, reduce, send and recv; GB = 1e9 bytes"
)
RESOLUTION_US = 1.0  # a lead below the profilers' time resolution names nobody
LEAST_LATE = 3  # times a rank must have been last before it is named: once or twice is chance
_CALL = ["step", "group", "seq"]
_LIKE = ["kind", "schedule", "group_size", "dtype", "bytes_in", "bytes_out"]
_UNEVEN = frozenset({"all_to_all", "gather", "scatter", "send_recv"})  # sizes may differ by rank
_RING = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
_POINT = frozenset({"broadcast", "reduce", "send", "recv", "send_recv"})


def bus_factor(kind: str, group_size: int) -> float | None:
    """busbw / algbw of a collective over n ranks; None for an unknown kind or size.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    if kind in _POINT:
        return 1.0
    if group_size < 1:
        return None
    if kind == "all_reduce":
        return 2 * (group_size - 1) / group_size
    return (group_size - 1) / group_size if kind in _RING else None


def collectives_view(
    rows: pd.DataFrame,
    *,
    expected_bytes: int | None,
    formula: str,
    steps: int,
    clock_uncertainty_us: Mapping[int, float] | float | None = None,
) -> CollectivesView:
    """The collectives of `steps` profiled steps, as `records.CollectiveRow` of all ranks.

    A rank is named as the last only where it lags by more than the clocks' uncertainty and the profilers' resolution.
    """
    expected = _expected(expected_bytes, formula)
    if rows.empty or steps < 1:
        return CollectivesView(expected_bytes=expected, convention=CONVENTION, note="no collectives were recorded")
    calls, unmatched = with_transfer(rows)
    ranks = calls["rank"].nunique()
    late = last_arrivals(calls, clock_uncertainty_us)
    per_rank_step = ranks * steps
    total = float(calls.ms.sum()) / per_rank_step
    exposed = float(calls.exposed_ms.sum()) / per_rank_step
    transfer, wait = _split(calls, per_rank_step)
    return CollectivesView(
        rows=[
            _line(like, steps, late, clock_uncertainty_us) for _, like in calls.groupby(_LIKE, dropna=False, sort=False)
        ],
        bytes_per_step=_measured_bytes(calls, per_rank_step),
        expected_bytes=expected,
        total_ms=total,
        exposed_ms=exposed,
        transfer_ms=transfer,
        wait_ms=wait,
        wait_doubt_ms=_wait_doubt(calls, per_rank_step, clock_uncertainty_us),
        clock_uncertainty_us=_uncertainty(clock_uncertainty_us) or None,
        overlapped=1 - exposed / total if total > 0 else None,
        straggler=_straggler(calls, late, steps, _uncertainty(clock_uncertainty_us)),
        convention=CONVENTION,
        note=_note(calls, late, unmatched),
    )


def with_transfer(rows: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The rows with `size` (bytes) and `transfer` (ms), and how many calls do not match across ranks.

    `transfer` is the minimum over the ranks of a call. It is null where one rank alone recorded the call, and where
    ranks disagree: other kinds or sizes at the same place, more ranks than the group has, or another number of calls in
    the step, after which the n-th call of one rank need not be the n-th of another.
    """
    import pandas as pd

    calls = rows.copy()
    calls["bytes_in"] = pd.to_numeric(calls.bytes_in)
    calls["bytes_out"] = pd.to_numeric(calls.bytes_out)
    calls["size"] = calls[["bytes_in", "bytes_out"]].max(axis=1)
    same = calls.groupby(_CALL, dropna=False, sort=False)
    present = same["rank"].transform("nunique")
    agreed = (same["kind"].transform("nunique") == 1) & (same["rank"].transform("size") == present)
    agreed &= (same["size"].transform("nunique") <= 1) | calls.kind.isin(_UNEVEN)
    agreed &= _same_count(calls) & ((present <= calls.group_size) | (calls.group_size < 1))
    calls["transfer"] = same["ms"].transform("min").where(agreed & (present > 1))
    return calls, len(calls[~agreed].drop_duplicates(_CALL))


def _same_count(calls: pd.DataFrame) -> pd.Series[bool]:
    """Whether all ranks of a group made as many calls in the step."""
    count = calls.groupby(["step", "group", "rank"])["seq"].transform("size")
    in_step = count.groupby([calls.step, calls.group])
    return in_step.transform("max") == in_step.transform("min")


def last_arrivals(
    calls: pd.DataFrame, clock_uncertainty_us: Mapping[int, float] | float | None = None
) -> dict[tuple[Any, ...], int]:
    """(step, group, seq) -> the rank that arrived last, for the calls where it did so beyond doubt.

    The lead is the time that the next-to-last rank waited.
    """
    matched = calls[calls.transfer.notna()].sort_values("ms")
    doubt = max(_uncertainty(clock_uncertainty_us), RESOLUTION_US) / 1000
    late = {}
    for key, call in matched.groupby(_CALL, sort=False):
        shortest, second = call.ms.iloc[0], call.ms.iloc[1]
        if second - shortest >= doubt:
            late[key] = int(call["rank"].iloc[0])
    return late


def _uncertainty(clock: Mapping[int, float] | float | None) -> float:
    """Of a difference between two ranks' times: the two largest together, or the one figure that holds for all."""
    if not isinstance(clock, Mapping):
        return real(clock) or 0.0
    return sum(sorted((v for v in map(real, clock.values()) if v is not None), reverse=True)[:2])


def _wait_doubt(calls: pd.DataFrame, per_rank_step: int, clock: Mapping[int, float] | float | None) -> float | None:
    """Ms per rank and step by which waiting is uncertain: once for every call of a rank that was not the last."""
    doubt = _uncertainty(clock)
    matched = calls[calls.transfer.notna()]
    if not doubt or matched.empty:
        return None
    waiting = len(matched) - len(matched.drop_duplicates(_CALL))
    return waiting * doubt / 1000 / per_rank_step


def _line(
    like: pd.DataFrame,
    steps: int,
    late: Mapping[tuple[Any, ...], int],
    clock_uncertainty_us: Mapping[int, float] | float | None,
) -> CollectiveView:
    first = like.iloc[0]
    kind, group_size = str(first.kind), int(first.group_size)
    rank_steps = like["rank"].nunique() * steps
    size, calls = real(first["size"]), len(like) / rank_steps
    transfer, wait = _split(like, rank_steps)
    matched = like[like.transfer.notna()]
    algbw = _gbps(size, matched.transfer) if len(matched) else _gbps(size, like.ms)
    factor = bus_factor(kind, group_size)
    named = Counter(late[k] for k in like[_CALL].drop_duplicates().itertuples(index=False, name=None) if k in late)
    return CollectiveView(
        kind=kind,
        group=_several(sorted(set(like.group)), "groups"),
        group_size=group_size,
        dtype=str(first["dtype"]),
        calls=calls,
        bytes_in=_whole(first.bytes_in),
        bytes_out=_whole(first.bytes_out),
        bytes_step=None if size is None else round(size * calls),
        ms=float(like.ms.sum()) / rank_steps,
        transfer_ms=transfer,
        wait_ms=wait,
        exposed_ms=float(like.exposed_ms.sum()) / rank_steps,
        algbw_gbps=algbw,
        busbw_gbps=None if algbw is None or factor is None else algbw * factor,
        last_rank=named.most_common(1)[0][0] if named else None,
        layer=_several(list(dict.fromkeys(like.layer)), "layers"),
        schedule=plain(str(first.schedule), 40),
        wait_doubt_ms=_wait_doubt(like, rank_steps, clock_uncertainty_us),
    )


def _whole(value: Any) -> int | None:
    number = real(value)
    return None if number is None else round(number)


def _split(calls: pd.DataFrame, per_rank_step: int) -> tuple[float | None, float | None]:
    """Transfer and wait in ms per rank and step, of the calls that match across ranks; None without any."""
    matched = calls[calls.transfer.notna()]
    if matched.empty:
        return None, None
    transfer = float(matched.transfer.sum()) / per_rank_step
    return transfer, max(float(matched.ms.sum()) / per_rank_step - transfer, 0.0)


def _gbps(size: float | None, ms: pd.Series[float]) -> float | None:
    """Bandwidth of calls of one size that took `ms` each."""
    took = float(ms.sum())
    return None if not size or took <= 0 else size * len(ms) / took / 1e6


def _several(names: list[str], what: str) -> str:
    """One name as it is, more as "first … last (n layers)"."""
    named = [n for n in names if n]
    if len(named) < 2:
        return named[0] if named else ""
    return f"{named[0]} … {named[-1]} ({len(names)} {what})"


def _expected(expected_bytes: int | None, formula: str) -> Figure | None:
    if expected_bytes is None:
        return None
    return Figure(value=expected_bytes, unit="B", source="derived", how=f"one rank, one step: {formula}")


def _measured_bytes(calls: pd.DataFrame, per_rank_step: int) -> Figure | None:
    """None where any call lacks its size: a sum without it would be too small."""
    if calls["size"].isna().any():
        return None
    how = "one rank, one step: the larger of input and output of every collective, mean over ranks and profiled steps"
    return Figure(value=float(calls["size"].sum()) / per_rank_step, unit="B", source="measured", how=how, n=len(calls))


def _straggler(calls: pd.DataFrame, late: Mapping[tuple[Any, ...], int], steps: int, doubt_us: float) -> str:
    """A sentence when one rank causes most of the waiting and is last more often than chance would have it."""
    if not late:
        return ""
    waits: dict[int, float] = dict.fromkeys(late.values(), 0.0)
    for key, call in calls[calls.transfer.notna()].groupby(_CALL, sort=False):
        if key in late:
            waits[late[key]] += float((call.ms - call.transfer).sum()) / (len(call) - 1)
    rank, wait = max(waits.items(), key=lambda item: item[1])
    all_wait, last = sum(waits.values()), Counter(late.values())[rank]
    chance = 0.5 + 0.5 / calls["rank"].nunique()
    matched = len(calls[calls.transfer.notna()].drop_duplicates(_CALL))
    if wait < chance * all_wait or last < max(LEAST_LATE, chance * len(late)):
        return ""
    within = f" ±{last * doubt_us / 1000 / steps:.2g}" if doubt_us else ""
    return (
        f"rank {rank} arrived last in {last} of {matched} collectives; each of the other ranks waited "
        f"{wait / steps:.3g}{within} ms a step for it, {100 * wait / all_wait:.0f} % of all waiting"
    )


def _note(calls: pd.DataFrame, late: Mapping[tuple[Any, ...], int], unmatched: int) -> str:
    ranks = calls["rank"].nunique()
    largest = int(calls.group_size.max())
    notes = []
    if ranks == 1:
        notes.append("one rank recorded: waiting cannot be told from transfer, bandwidths are lower bounds")
    elif largest > ranks:
        notes.append(f"{ranks} of {largest} ranks recorded: transfer is the minimum over those, an upper bound")
    if unmatched:
        notes.append(f"{unmatched} collectives do not match across ranks: not in transfer, wait and bandwidth")
    if calls["size"].isna().any():
        notes.append("some collectives do not say their size")
    if (calls.group_size < 1).any():
        notes.append("some collectives do not say their process group: no busbw for them")
    if late:
        counts = ", ".join(f"rank {r} x{n}" for r, n in Counter(late.values()).most_common())
        notes.append(f"arrived last: {counts}")
    return "; ".join(notes)
