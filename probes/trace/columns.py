"""Trace events as columns: what the analysis needs of a Kineto trace, at about 80 bytes an event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

CATEGORIES = (
    "other",
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_runtime",
    "cuda_driver",
    "cpu_op",
    "user_annotation",
    "gpu_user_annotation",
)
CATEGORY = {name: code for code, name in enumerate(CATEGORIES)}
DEVICE = tuple(CATEGORY[c] for c in ("kernel", "gpu_memcpy", "gpu_memset"))
RUNTIME = tuple(CATEGORY[c] for c in ("cuda_runtime", "cuda_driver"))
_OLD_NAMES = {"memcpy": "gpu_memcpy", "memset": "gpu_memset", "operator": "cpu_op", "runtime": "cuda_runtime"}
_SKIPPED = frozenset({"python_function", "Trace", "overhead", "ac2g", "fwdbwd", "async_gpu", "async_cpu"})
_DESCRIBED = ("gloo:", "nccl:", "c10d::", "symm_mem::", "record_param_comms")
NONE = -1


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that the analysis reads; all others are skipped without being built."""

    correlation: Any = None
    sequence: Any = msgspec.field(name="Sequence number", default=None)
    forward_thread: Any = msgspec.field(name="Fwd thread id", default=None)
    stream: Any = None
    device: Any = None
    bytes: Any = None
    collective: Any = msgspec.field(name="Collective name", default=None)
    elements_in: Any = msgspec.field(name="In msg nelems", default=None)
    elements_out: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = None
    group_size: Any = msgspec.field(name="Group size", default=None)
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    group_rank: Any = msgspec.field(name="Rank", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))


class Event(msgspec.Struct, gc=False):
    """One element of `traceEvents`."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


@dataclass(slots=True, frozen=True)
class Message:
    """What an event says about the collective it belongs to; None where it does not say."""

    collective: str | None = None
    elements_in: int | None = None
    elements_out: int | None = None
    dtype: str | None = None
    group_size: int | None = None
    group_name: str | None = None
    group_ranks: str | None = None
    group_rank: int | None = None  # this rank's place in the group
    dims: tuple[tuple[int, ...], ...] = ()  # shapes of tensor inputs
    types: tuple[str, ...] = ()


@dataclass(slots=True)
class TraceEvents:
    """Complete ("X") events of one trace file, shapes [n]; times in us from `base_us`, sorted by start.

    `name` and `thread` index `names` and `threads` (pid, tid as text); `cat` indexes CATEGORIES. `NONE` (-1)
    stands for a number the event does not carry.
    """

    source: str
    name: NDArray[np.int32]
    cat: NDArray[np.int8]
    thread: NDArray[np.int32]
    start: NDArray[np.float64]
    dur: NDArray[np.float64]
    correlation: NDArray[np.int64]
    sequence: NDArray[np.int64]
    forward_thread: NDArray[np.int64]
    stream: NDArray[np.int64]
    device: NDArray[np.int64]
    bytes: NDArray[np.int64]
    names: list[str]
    threads: list[tuple[str, str]]
    messages: dict[int, Message]
    base_us: float = 0.0
    rank: int | None = None
    world_size: int | None = None
    groups: list[tuple[str, str, int]] = field(default_factory=list)  # name, ranks "0,1", size
    device_names: list[str] = field(default_factory=list)  # of all devices of the host, in the order of their index
    base_ns: int | None = None  # unix time that time zero of the file stands for
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> NDArray[np.float64]:
        """End times, us from `base_us`."""
        return self.start + self.dur

    def is_cat(self, *codes: int) -> NDArray[np.bool_]:
        """Mask of the events in any of these categories."""
        return np.isin(self.cat, codes)


def _int(value: Any) -> int:
    """`value` as int64, NONE where it is absent, no number, or out of range."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return NONE
    return number if -(2**63) <= number < 2**63 else NONE


def _optional(value: Any) -> int | None:
    number = _int(value)
    return None if number == NONE else number


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _ranks(value: Any) -> str | None:
    """`[0, 1]`, as text or as a list, to `0,1`."""
    text = _text(value)
    return None if text is None else text.strip("[] ").replace(" ", "")


def _decoded(raw: msgspec.Raw) -> list[Any]:
    """A list that was left undecoded; what is damaged within counts as absent, as elsewhere in an event."""
    if not memoryview(raw):
        return []
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:  # bytes that are no text: whoever skips a value does not look into its strings
        return []
    return value if isinstance(value, list) else []


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
        return tuple(value)
    return None


def _message(args: Args) -> Message:
    pairs = [(s, str(t)) for d, t in zip(_decoded(args.dims), _decoded(args.types), strict=False) if (s := _shape(d))]
    return Message(
        collective=_text(args.collective),
        elements_in=_optional(args.elements_in),
        elements_out=_optional(args.elements_out),
        dtype=_text(args.dtype),
        group_size=_optional(args.group_size),
        group_name=_text(args.group_name),
        group_ranks=_ranks(args.group_ranks),
        group_rank=_optional(args.group_rank),
        dims=tuple(s for s, _ in pairs),
        types=tuple(t for _, t in pairs),
    )


def _skipped(cat: Any) -> bool:
    return type(cat) is str and cat in _SKIPPED


_NO_ARGS = Args()


class Builder:
    """Collects decoded events into columns, chunk by chunk, so that the decoded objects never pile up."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._thread_codes: dict[tuple[Any, Any], int] = {}
        self._cats: dict[Any, int] = {None: CATEGORY["other"]}
        self._columns: list[dict[str, NDArray[Any]]] = []
        self._messages: dict[int, Message] = {}
        self._n = 0
        self.counts: Counter[str] = Counter()

    def add(self, events: Sequence[Event]) -> None:
        """Append the complete events of one chunk; others are counted, not kept."""
        kept = [e for e in events if e.ph == "X" and type(e.name) is str and not _skipped(e.cat)]
        self.counts["events"] += len(events)
        if len(kept) < len(events):
            self._count_others(events)
        if not kept:
            return
        args = [e.args or _NO_ARGS for e in kept]
        names = self._names
        columns: dict[str, NDArray[Any]] = {
            "name": np.array([names.setdefault(e.name, len(names)) for e in kept], dtype=np.int32),
            "thread": np.array([self._thread(e) for e in kept], dtype=np.int32),
            "cat": np.array([self._cat(e, a) for e, a in zip(kept, args, strict=True)], dtype=np.int8),
            "start": self._floats([e.ts for e in kept]),
            "dur": self._floats([0.0 if e.dur is None else e.dur for e in kept]),
            "correlation": self._ints([a.correlation for a in args]),
            "sequence": self._ints([a.sequence for a in args]),
            "forward_thread": self._ints([a.forward_thread for a in args]),
            "stream": self._ints([a.stream for a in args]),
            "device": self._ints([a.device for a in args]),
            "bytes": self._ints([a.bytes for a in args]),
        }
        for i, (e, a) in enumerate(zip(kept, args, strict=True)):
            if a.elements_in is not None or a.collective is not None or e.name.startswith(_DESCRIBED):
                self._messages[self._n + i] = _message(a)
        self._columns.append(columns)
        self._n += len(kept)

    def _count_others(self, events: Sequence[Event]) -> None:
        for e in events:
            if e.ph in ("B", "E"):
                self.counts["begin_end"] += 1
            elif e.ph == "X" and type(e.name) is not str:
                self.counts["unnamed"] += 1

    def _thread(self, e: Event) -> int:
        try:
            code = self._thread_codes.get((e.pid, e.tid))
        except TypeError:  # a list or object where an id belongs
            code = None
        if code is None:
            key = (str(e.pid), str(e.tid))
            code = self._threads.setdefault(key, len(self._threads))
            if not isinstance(e.pid, list | dict) and not isinstance(e.tid, list | dict):
                self._thread_codes[(e.pid, e.tid)] = code
        return code

    def _cat(self, e: Event, a: Args) -> int:
        if e.cat is None:
            return self._without_cat(e, a)
        code = self._cats.get(e.cat) if isinstance(e.cat, str) else CATEGORY["other"]
        if code is None:
            lower = e.cat.lower()
            code = CATEGORY.get(_OLD_NAMES.get(lower, lower), CATEGORY["other"])
            self._cats[e.cat] = code
        return code

    def _without_cat(self, e: Event, a: Args) -> int:
        """A device event is known by its stream and correlation; nothing else is guessed."""
        on_device = a.stream is not None and a.correlation is not None and a.device is not None
        if not on_device:
            self.counts["no_cat"] += 1
            return CATEGORY["other"]
        self.counts["no_cat_device"] += 1
        lower = e.name.lower()
        kind = "gpu_memcpy" if lower.startswith("memcpy") else "gpu_memset" if lower.startswith("memset") else "kernel"
        return CATEGORY[kind]

    @staticmethod
    def _floats(values: list[Any]) -> NDArray[np.float64]:
        if all(type(v) is float or type(v) is int for v in values):
            try:
                return np.array(values, dtype=np.float64)
            except OverflowError:  # an integer beyond the range of float
                pass
        return np.array([_float(v) for v in values], dtype=np.float64)

    def _ints(self, values: list[Any]) -> NDArray[np.int64]:
        if values.count(None) == len(values):
            return np.full(len(values), NONE, dtype=np.int64)
        if all(v is None or type(v) is int for v in values):
            try:
                return np.array([NONE if v is None else v for v in values], dtype=np.int64)
            except OverflowError:
                self.counts["big_ints"] += sum(1 for v in values if v is not None and not -(2**63) <= v < 2**63)
        return np.array([_int(v) for v in values], dtype=np.int64)

    def finish(self, source: str) -> TraceEvents:
        """Sort by start (the longer first), drop events without a usable time, and move time zero to the first."""
        merged = (
            {k: np.concatenate([c[k] for c in self._columns]) for k in _COLUMNS} if self._columns else _no_columns()
        )
        usable = np.isfinite(merged["start"]) & np.isfinite(merged["dur"]) & (merged["dur"] >= 0)
        self.counts["bad_times"] += int((~usable).sum())
        order = np.lexsort((-merged["dur"], merged["start"]))
        order = order[usable[order]]
        place = np.full(self._n, NONE, dtype=np.int64)
        place[order] = np.arange(len(order))
        columns = {k: v[order] for k, v in merged.items()}
        base = float(np.floor(columns["start"][0])) if len(order) else 0.0
        columns["start"] = columns["start"] - base
        messages = {int(place[i]): m for i, m in self._messages.items() if place[i] != NONE}
        return TraceEvents(
            source=source,
            names=list(self._names),
            threads=list(self._threads),
            messages=messages,
            base_us=base,
            **columns,
        )


_COLUMNS: dict[str, Any] = {
    "name": np.int32,
    "thread": np.int32,
    "cat": np.int8,
    "start": np.float64,
    "dur": np.float64,
    "correlation": np.int64,
    "sequence": np.int64,
    "forward_thread": np.int64,
    "stream": np.int64,
    "device": np.int64,
    "bytes": np.int64,
}


def _no_columns() -> dict[str, NDArray[Any]]:
    return {name: np.empty(0, dtype=dtype) for name, dtype in _COLUMNS.items()}


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
