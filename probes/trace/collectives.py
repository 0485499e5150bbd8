"""Collective calls of a rank: what they were from metadata, time from kernels (GPU) or the backend's thread (CPU)."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from costlab.probes.trace import classify as c
from costlab.probes.trace.columns import CATEGORY, NONE, Message, TraceEvents
from costlab.probes.trace.host import COMM, Host
from costlab.probes.trace.intervals import Intervals
from costlab.probes.trace.tags import Tag, TaggedCall, host_calls, parse, under_a_tag
from costlab.probes.trace.work import Work

_BACKENDS = ("gloo:", "mpi:", "ucc:")
_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "send", "recv"})


@dataclass(slots=True)
class Call:
    """One collective call before it is placed in a step; times in us, sizes None where not recorded."""

    kind: str
    start: float
    end: float
    issue: int  # event that issued it: a kernel launch, or the c10d operator
    group: str
    group_size: int
    dtype: str
    bytes_in: int | None
    bytes_out: int | None
    event: int = -1  # the backend's range, where there is one
    schedule: str = ""  # of our own, from its annotation


@dataclass(slots=True, frozen=True)
class _Sizes:
    """Elements in and out with their dtype, as far as they are recorded."""

    elements_in: int | None
    elements_out: int | None
    dtype: str | None
    group_size: int | None


def device_calls(host: Host, work: Work) -> list[Call]:
    """One call per communication kernel, or per annotation where one call launched several kernels.

    Copies count under a tag, and where they go between devices outside of any collective: those are of unknown kind.
    """
    events = host.events
    grouped: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, category in enumerate(work.category):
        is_kernel = events.cat[work.event[i]] == CATEGORY["kernel"]
        if category == c.COMMUNICATION and (is_kernel or work.tag[i] != NONE or _on_its_own(events, work, i)):
            grouped[_key(events, work, i)].append(i)
    return sorted((_device_call(host, work, tuple(m)) for m in grouped.values()), key=lambda call: call.start)


def _on_its_own(events: TraceEvents, work: Work, i: int) -> bool:
    """A copy between devices that no collective's operator or annotation issued."""
    if work.params[i] != NONE or work.named[i] != NONE:
        return False
    issued_by = events.names[events.name[work.op[i]]] if work.op[i] != NONE else ""
    copied = c.device_category(events.names[events.name[work.event[i]]], "gpu_memcpy") == c.COMMUNICATION
    return copied and not issued_by.startswith("symm_mem::")


def _tag(events: TraceEvents, index: int) -> Tag | None:
    """What a tagged range says of its call; None for NONE and for an annotation of somebody else's."""
    return None if index == NONE else parse(events.names[events.name[index]].removeprefix(c.TAG_COMM))


def _key(events: TraceEvents, work: Work, i: int) -> tuple[str, int]:
    if _tag(events, int(work.tag[i])) is not None:
        return "call", int(events.name[work.tag[i]])
    for name, index in (("tag", work.tag[i]), ("params", work.params[i]), ("named", work.named[i])):
        if index != NONE:
            return name, int(index)
    return "kernel", i


def _device_call(host: Host, work: Work, members: tuple[int, ...]) -> Call:
    events, first = host.events, members[0]
    kernels = work.event[list(members)]
    sources = (int(kernels[0]), work.params[first], work.named[first], work.op[first])
    tag = _tag(events, int(work.tag[first]))
    message = _merged(tag.message() if tag else None, *(events.messages.get(int(i)) for i in sources))
    kind = _device_kind(host, work, first, message)
    group, size = _group(events, message, _recorded_sizes(message))
    sizes = _complete(kind, _recorded_sizes(message), size)
    issuer = int(work.issuer[first])
    return Call(
        kind=kind,
        start=float(events.start[kernels].min()),
        end=float((events.start[kernels] + events.dur[kernels]).max()),
        issue=issuer if issuer != NONE else int(kernels[0]),
        group=group,
        group_size=size,
        dtype=c.dtype_name(sizes.dtype),
        bytes_in=_bytes(sizes.elements_in, sizes.dtype),
        bytes_out=_bytes(sizes.elements_out, sizes.dtype),
        schedule=tag.schedule if tag else "",
    )


def _merged(*messages: Message | None) -> Message:
    """The first answer to each question."""
    known = [m for m in messages if m is not None]
    answers = {}
    for name in Message.__dataclass_fields__:
        value = next((v for m in known if (v := getattr(m, name)) not in (None, ())), None)
        if value is not None:
            answers[name] = value
    return replace(Message(), **answers)


def _device_kind(host: Host, work: Work, i: int, message: Message) -> str:
    events = host.events
    texts = [message.collective or ""]
    texts += host.text(work.tag[[i]], COMM)
    texts += [events.names[events.name[k]] for k in (work.named[i], work.op[i], work.event[i]) if k != NONE]
    return next((kind for t in texts if t and (kind := c.collective_kind(t))), "unknown")


def _recorded_sizes(message: Message) -> _Sizes:
    """Sizes the profiler stated, else the input tensor's shape."""
    dtype = message.dtype or (message.types[0] if message.types else None)
    given = message.elements_in
    if given is None and len(message.dims) == 1:
        given = math.prod(message.dims[0])
    return _Sizes(given, message.elements_out, dtype, message.group_size)


def _complete(kind: str, sizes: _Sizes, group: int) -> _Sizes:
    """The output of a collective follows from its input where the kind and the group fix it."""
    given, out = sizes.elements_in, sizes.elements_out
    if out is None and given is not None:
        if kind in _SAME_SIZE:
            out = given
        elif kind == "all_gather" and group:
            out = given * group
        elif kind == "reduce_scatter" and group and given % group == 0:
            out = given // group
    return _Sizes(given, out, sizes.dtype, sizes.group_size)


def _bytes(elements: int | None, dtype: str | None) -> int | None:
    size = c.element_size(dtype)
    return None if elements is None or size is None else elements * size


def _group(events: TraceEvents, message: Message, sizes: _Sizes) -> tuple[str, int]:
    """Ranks and size of the process group: as stated, by its name, by the ratio of sizes, or the only one there is."""
    if message.group_ranks:
        stated = message.group_size or message.group_ranks.count(",") + 1
        return message.group_ranks, stated
    named = [(ranks, size) for name, ranks, size in events.groups if name == message.group_name]
    if named:
        return named[0]
    size = message.group_size or _ratio(sizes)
    fitting = {(ranks, n) for _, ranks, n in events.groups if size in (None, n)}
    if len(fitting) == 1:
        return fitting.pop()
    return "", size or 0


def _ratio(sizes: _Sizes) -> int | None:
    """Group size of a gather or scatter from its sizes; None where they do not tell."""
    small, large = sorted((sizes.elements_in or 0, sizes.elements_out or 0))
    return large // small if small and large > small and large % small == 0 else None


def backend_calls(host: Host) -> tuple[list[Call], list[str]]:
    """CPU collectives: the backend's ranges, each joined to the c10d operator that issued it, and what is missing.

    The operator carries both sizes and the name torch gave; the backend's range has the time (gloo implements
    reduce-scatter as an all-reduce and says so in its range's name).
    """
    events = host.events
    ranges = _ranges(events)
    operators = [i for i in np.flatnonzero(host.is_op).tolist() if _is_c10d(events, i)]
    inner = {operators[i] for i in np.flatnonzero(under_a_tag(host, np.array(operators, dtype=np.int64)))}
    calls, unissued = [], 0
    for i in ranges:
        match = next((o for o in operators if _fits(events, o, i)), NONE)
        if match == NONE:
            unissued += 1
        else:
            operators.remove(match)
        if match in inner:
            continue  # a part of a call of our own
        calls.append(_backend_call(events, i, match))
    problems = []
    if unissued:
        problems.append(
            f"{unissued} of {len(ranges)} backend collectives have no c10d operator: their output size is derived"
        )
    operators = [o for o in operators if o not in inner]
    if operators and not ranges:
        problems.append(f"{len(operators)} collectives were issued but the backend recorded no time for them")
    if any(call.bytes_in is None for call in calls):
        problems.append("some collectives carry no sizes: record with record_shapes=True")
    return calls, problems


def own_calls(host: Host) -> tuple[list[Call], list[str]]:
    """CPU collectives of our own schedules, from the annotations of the threads that worked on them."""
    found, unseen = host_calls(host)
    problem = f"{unseen} planned collectives ran on threads that the profiler did not record: they are missing here"
    return [_own_call(host.events, call) for call in found], [problem] if unseen else []


def _own_call(events: TraceEvents, call: TaggedCall) -> Call:
    message = call.tag.message()
    return Call(
        event=int(call.ranges[0]),
        kind=call.tag.kind,
        start=float(events.start[call.ranges].min()),
        end=float(events.end[call.ranges].max()),
        issue=call.issue,
        group=call.tag.ranks,
        group_size=message.group_size or 0,
        dtype=c.dtype_name(call.tag.dtype),
        bytes_in=_bytes(message.elements_in, message.dtype),
        bytes_out=_bytes(message.elements_out, message.dtype),
        schedule=call.tag.schedule,
    )


def _ranges(events: TraceEvents) -> list[int]:
    wanted = np.array([n.startswith(_BACKENDS) for n in events.names], dtype=bool)
    mask = (
        wanted[events.name] & events.is_cat(CATEGORY["user_annotation"], CATEGORY["cpu_op"]) if len(wanted) else wanted
    )
    return [int(i) for i in np.flatnonzero(mask)]


def _is_c10d(events: TraceEvents, index: int) -> bool:
    name = events.names[events.name[index]]
    return name.startswith("c10d::") and c.collective_kind(name) != ""


def _fits(events: TraceEvents, operator: int, backend: int) -> bool:
    """Issued before the range, of the same kind, and of the same input where both say."""
    if events.start[operator] > events.start[backend]:
        return False
    asked = c.collective_kind(events.names[events.name[operator]])
    done = c.collective_kind(events.names[events.name[backend]])
    if asked != done and (asked, done) != ("reduce_scatter", "all_reduce"):
        return False
    given = _recorded_sizes(events.messages.get(backend, Message())).elements_in
    wanted = _operator_sizes(events, operator, asked)[0]
    return given is None or wanted is None or given == wanted


def _operator_sizes(events: TraceEvents, operator: int, kind: str) -> tuple[int | None, int | None, str | None]:
    """Elements in, out and dtype from a c10d operator's tensors: `_base_` forms take output, then input."""
    message = events.messages.get(operator, Message())
    counts = [math.prod(d) for d in message.dims]
    dtype = message.types[0] if message.types else None
    if len(counts) == 2:
        return counts[1], counts[0], dtype
    if len(counts) == 1 and kind in _SAME_SIZE:
        return counts[0], counts[0], dtype
    return (None, None, dtype)


def _backend_call(events: TraceEvents, index: int, operator: int) -> Call:
    source = operator if operator != NONE else index
    kind = c.collective_kind(events.names[events.name[source]]) or "unknown"
    message = events.messages.get(index, Message())
    sizes = _recorded_sizes(message)
    if operator != NONE:
        given, out, dtype = _operator_sizes(events, operator, kind)
        sizes = _Sizes(given if given is not None else sizes.elements_in, out, dtype or sizes.dtype, None)
    group, size = _group(events, message, sizes)
    sizes = _complete(kind, sizes, size)
    return Call(
        event=index,
        kind=kind,
        start=float(events.start[index]),
        end=float(events.start[index] + events.dur[index]),
        issue=source,
        group=group,
        group_size=size,
        dtype=c.dtype_name(sizes.dtype),
        bytes_in=_bytes(sizes.elements_in, sizes.dtype),
        bytes_out=_bytes(sizes.elements_out, sizes.dtype),
    )


def exposure(calls: list[Call], compute: Intervals) -> list[float]:
    """Us of each call, in order of start, that no compute hides; a moment under two calls counts for the earlier."""
    start = np.array([call.start for call in calls])
    end = np.array([call.end for call in calls])
    reach = np.concatenate(([-np.inf], np.maximum.accumulate(end)[:-1])) if len(end) else end
    begin = np.maximum(start, reach)
    end = np.maximum(end, begin)
    out: list[float] = np.maximum(end - begin - compute.covered(begin, end), 0.0).tolist()
    return out
