"""What compilation did: graphs, graph breaks, recompiles, caches, phases and memory, as `CompileRow`s.

Conventions of the rows, by `kind`:

- graph: `name` the compile id, `detail` the function (with "(backward)" for a backward graph compiled lazily),
  `count` operators Dynamo captured (forward only), `seconds` the frame's whole compile.
- break: `detail` the reason, `source` the user's line, `count` how often it was met while compiling. A frame left
  to eager altogether is a break whose reason starts with "not compiled, runs eager".
- recompile: `name` the compile id, `detail` the failed guard, `source` the function, `seconds` what it cost.
- cache: `name` fx_graph or aot_autograd, `detail` hit, miss or bypass, `count`.
- phase: `name`, `seconds`, all compiles together. dynamo, aot, inductor and codegen exclude the phase nested in
  them; backward is a lazily compiled backward with everything in it; total is their sum.
- memory: `name` host peak, host before, child peak, device peak; `bytes`.
"""

from __future__ import annotations

import re
import resource
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Literal

from costlab.probes import compile_internals as internals
from costlab.probes.compile_internals import Break, Compile
from costlab.probes.memory import Window, device_peaks, host_bytes, host_peaks
from costlab.probes.records import CompileRow
from costlab.probes.sources import position, scrub, user_frame, wrapped, wrapper_of

Run = Literal["cold", "warm"]

_RESUME = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")
_IN_GUARD = re.compile(r"#\s*(\S+\.py):(\d+) in \S*")
_LONGEST = 600


class CompileEvents:
    """Collects compile events between enter and exit, whatever the log settings; may be entered again."""

    def __init__(self) -> None:
        self._breaks: Counter[tuple[str, str]] = Counter()
        self._compiles: list[Compile] = []
        self._caches: Counter[tuple[str, str]] = Counter()
        self._memory: dict[str, int] = {}
        self._window: tuple[Window | None, Window | None] | None = None
        self._hooks = internals.Hooks(self._on_break, self._on_start, self._on_end)

    @property
    def notes(self) -> list[str]:
        """What this torch does not offer, and errors of the collector itself."""
        return [f"not recorded on this torch: {m}" for m in self._hooks.missing] + [
            f"collector error: {e}" for e in self._hooks.errors
        ]

    def __enter__(self) -> CompileEvents:
        self._restore_limit = internals.raise_metrics_limit()
        self._known = {id(m): m for m in internals.metrics()}
        self._counts = internals.cache_counts()
        self._children = _waited_children_peak()
        self._hooks.install()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._hooks.remove()
        self._on_end()
        self._compiles += [internals.read_compile(m) for m in internals.metrics() if id(m) not in self._known]
        self._restore_limit()
        for key, count in internals.cache_counts().items():
            before = self._counts[key]
            self._caches[key] += count - before if count >= before else count  # cleared in between
        self._note_children()

    def _on_break(self, event: Break) -> None:
        reason = wrapped(clean_reason(event.reason), (file for file, _ in event.stack))
        self._breaks[reason, position(*user_frame(event.stack))] += 1

    def _on_start(self) -> None:
        device = _current_device()
        self._keep("host before", host_bytes("VmRSS"))
        self._window = (host_peaks().open(), None if device is None else device_peaks(device).open())

    def _on_end(self) -> None:
        if self._window is None:
            return
        host, device = self._window
        self._window = None
        peak = host_peaks().close(host)
        self._keep("host peak", peak[0] if peak else None)
        index = _current_device()
        if device is not None and index is not None:
            peaks = device_peaks(index).close(device)
            self._keep("device peak", peaks[0] if peaks else None)

    def _keep(self, name: str, value: int | None) -> None:
        if value is not None:
            self._memory[name] = max(value, self._memory.get(name, 0))

    def _note_children(self) -> None:
        """Compilers that ended within (where they raised the maximum) and compile workers that still live."""
        ended = _waited_children_peak()
        self._keep("child peak", ended if ended > self._children else None)
        self._keep("child peak", _living_children_peak())

    def rows(self, rank: int, run: Run) -> list[CompileRow]:
        """All events as rows; call after exit."""
        rows = [*self._graph_rows(), *self._break_rows(), *self._recompile_rows()]
        rows += [CompileRow(rank=rank, kind="cache", name=c, detail=o, count=n) for (c, o), n in self._caches.items()]
        rows += [CompileRow(rank=rank, kind="phase", name=n, seconds=s) for n, s in self.phases().items()]
        rows += [CompileRow(rank=rank, kind="memory", name=n, bytes=b) for n, b in self._memory.items()]
        for row in rows:
            row.rank = rank
            row.run = run
        return rows

    def _graph_rows(self) -> list[CompileRow]:
        names = {c.compile_id: function_name(c.function) for c in self._compiles if c.function}
        rows: list[CompileRow] = []
        for c in self._compiles:
            if c.runtime or c.failure or (c.forward and not c.operators):
                continue
            name = names.get(c.compile_id, "")
            rows.append(
                CompileRow(
                    rank=0,
                    kind="graph",
                    name=c.compile_id,
                    detail=name if c.forward else f"{name} (backward)".strip(),
                    source=self._source(c),
                    seconds=c.dynamo_s if c.forward else c.backward_s,
                    count=c.operators,
                )
            )
        return rows

    def _break_rows(self) -> list[CompileRow]:
        breaks = Counter(self._breaks)
        for c in self._compiles:
            # A wrapper's hook around the compiled model is a frame of its own, refused by design: no graph is cut.
            if c.failure and not wrapper_of(c.file):
                where = "" if wrapper_of(c.failure_file) else position(c.failure_file, c.failure_line)
                reason = wrapped(clean_reason(c.failure), [c.failure_file])
                breaks[f"not compiled, runs eager: {reason}", where or self._source(c)] += 1
        return [CompileRow(rank=0, kind="break", detail=d, source=s, count=n) for (d, s), n in breaks.items()]

    def _recompile_rows(self) -> list[CompileRow]:
        return [
            CompileRow(
                rank=0,
                kind="recompile",
                name=c.compile_id,
                detail=clean_guard(c.recompile_reason),
                source=_guard_source(c) or self._source(c),
                seconds=c.dynamo_s,
                count=1,
            )
            for c in self._compiles
            if c.recompile_reason
        ]

    def _source(self, c: Compile) -> str:
        """The compiled function; a backward graph or a refused frame has it from its frame's other compiles."""
        frame = c.compile_id.partition("/")[0]
        until = next((i for i, other in enumerate(self._compiles) if other is c), 0) + 1
        before = reversed(self._compiles[:until])  # the latest one: ids start anew after torch._dynamo.reset()
        found = next((o for o in before if o.file and o.compile_id.partition("/")[0] == frame), c)
        # A frame of costlab's around a class of torch's own has no line, but the class's name.
        return found.function if found.file.endswith("_dynamo/external_utils.py") else position(found.file, found.line)

    def phases(self) -> dict[str, float]:
        """Seconds by phase as the module's docstring defines them; only phases that took time."""
        seconds: dict[str, float] = {}
        for c in self._compiles:
            for name, value in _own_phases(c).items():
                seconds[name] = seconds.get(name, 0.0) + value
        seconds["total"] = sum(seconds.values())
        return {name: value for name, value in seconds.items() if value > 0}


def _own_phases(c: Compile) -> dict[str, float]:
    if c.runtime:
        return {"autotune at run time": c.autotune_s or 0.0, "CUDA graph recording": c.cudagraph_s or 0.0}
    if not c.forward:
        return {"backward": c.backward_s or 0.0}
    outer = [c.dynamo_s or 0.0, c.aot_s or 0.0, c.inductor_s or 0.0, c.codegen_s or 0.0, 0.0]
    names = ("dynamo", "aot", "inductor", "codegen")
    return {name: max(0.0, mine - nested) for name, mine, nested in zip(names, outer[:-1], outer[1:], strict=True)}


def function_name(code_name: str) -> str:
    """`f (resumed at line 8)` for Dynamo's resume functions, the name itself otherwise."""
    match = _RESUME.fullmatch(code_name)
    return f"{match[1]} (resumed at line {match[2]})" if match else code_name


def clean_reason(reason: str) -> str:
    """Dynamo's break message in one line: what, why and hints, without debug context, links and paths."""
    lines = [line.strip() for line in reason.partition("Developer debug context")[0].splitlines()]
    kept = [line for line in lines if line and "report an issue" not in line and "For more details" not in line]
    if not kept:
        return "no reason given"
    head, rest = kept[0], [line.removeprefix("Explanation: ") for line in kept[1:]]
    return _cut(scrub(f"{head}: {' '.join(rest)}" if rest else head))


def clean_guard(reason: str) -> str:
    """Dynamo's failed guards in one line, without the position and the stack of each."""
    lines = (line for line in reason.splitlines() if line[:1].strip() and not line.startswith("User stack trace"))
    guards = (" ".join(_IN_GUARD.sub("", line).split()) for line in lines)
    return _cut(scrub("; ".join(guards) or "no guard given"))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _guard_source(c: Compile) -> str:
    match = _IN_GUARD.search(c.recompile_reason)
    if not match:
        return ""
    path = Path(match[1])  # Dynamo cuts long paths in front
    return position(str(path if path.exists() else path.name), int(match[2]))


def _current_device() -> int | None:
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _waited_children_peak() -> int:
    """Largest resident set of any child that has ended, bytes (getrusage(2): ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _living_children_peak() -> int | None:
    """Largest VmHWM among living descendants, bytes."""
    import psutil

    peaks = [host_bytes("VmHWM", Path(f"/proc/{p.pid}/status")) for p in psutil.Process().children(recursive=True)]
    return max((p for p in peaks if p is not None), default=None)
