"""The adapter to torch's compiler: records every Inductor schedule while a model compiles.

Tried on torch 2.11.0 and 2.13.0, both without a GPU; `REQUIRED` lists the internals it needs, and a test checks them
on the running version. Where one is missing nothing is patched and the trace says so. Each patch replaces a method by
one that calls the original, is taken back on exit, and counts its own errors instead of raising them.

Only this module and `extract`, which reads a finished schedule, touch torch._inductor, torch._dynamo and torch._guards.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from types import TracebackType
from typing import Any, TypeVar

import torch

from costlab.probes.compile_internals import salted_caches
from costlab.probes.fusion import extract, fqn
from costlab.probes.fusion.facts import GraphFacts, Rejection
from costlab.probes.fusion.model import FusionTrace, GraphBreak
from costlab.probes.fusion.sources import Sources
from costlab.probes.fusion.trace import build
from costlab.probes.sources import user_frame, wrapped

T = TypeVar("T")

REQUIRED: tuple[tuple[str, str], ...] = (
    ("torch._inductor.scheduler", "Scheduler.fuse_nodes"),
    ("torch._inductor.scheduler", "Scheduler.can_fuse"),
    ("torch._inductor.scheduler", "Scheduler.codegen"),
    ("torch._inductor.scheduler", "Scheduler.decide_fusion_fail_reason"),
    ("torch._inductor.scheduler", "WhyNoFuse.__call__"),
    ("torch._inductor.scheduler", "BaseSchedulerNode.get_read_buffer_sizes"),
    ("torch._inductor.scheduler", "BaseSchedulerNode.get_write_buffer_sizes"),
    ("torch._inductor.scheduler", "ExternKernelSchedulerNode"),
    ("torch._inductor.scheduler", "NopKernelSchedulerNode"),
    ("torch._inductor.debug", "set_kernel_post_grad_provenance_tracing"),
    ("torch._inductor.codecache", "FxGraphHashDetails.__init__"),
    ("torch._inductor.virtualized", "V"),
    ("torch._inductor.ir", "MultiOutput"),
    ("torch._inductor.ir", "UserDefinedTritonKernel"),
    ("torch._inductor.fx_utils", "count_flops_fx"),
    ("torch._guards", "CompileContext.current_compile_id"),
    ("torch._guards", "TracingContext.try_get"),
)
_PROVENANCE = "set_kernel_post_grad_provenance_tracing"
# A backend imported later would bind the wrapper by name and keep it after exit.
_BACKENDS = ("torch._inductor.codegen.cpp", "torch._inductor.codegen.triton", "torch._inductor.codegen.simd")


_SKIPPED_FRAME = re.compile(r"frame skipped: \w+ \((.+) line (\d+)\)")


def _forward_codes(model: torch.nn.Module | None) -> dict[tuple[str, int], str]:
    """(file, first line) of every module's forward -> FQN of the first module that has it."""
    found: dict[tuple[str, int], str] = {}
    for name, module in model.named_modules() if model is not None else ():
        code = getattr(type(module).forward, "__code__", None)
        if code is not None:
            found.setdefault((PurePath(code.co_filename).name, code.co_firstlineno), fqn.normalise(name))
    return found


def missing_internals() -> list[str]:
    """The entries of `REQUIRED` that this torch does not have."""
    absent = []
    for module, path in REQUIRED:
        try:
            owner: Any = importlib.import_module(module)
            for part in path.split("."):
                owner = getattr(owner, part)
        except (ImportError, AttributeError):
            absent.append(f"{module}.{path}")
    return absent


@dataclass(slots=True)
class _Live:
    """A graph between the start of its fusion and the end of its code generation."""

    facts: GraphFacts
    rejected: dict[tuple[str, str], Rejection] = field(default_factory=dict)


class FusionCollector:
    """Context manager: compile inside it, then ask for the `trace()`.

    While it is open FX-graph and AOTAutograd caches are missed on purpose (a cached graph has no schedule to look
    at); compiled kernels on disk are still reused. A model that this process compiled before is not compiled again
    and leaves no trace. `model` gives modules their FQNs; it may be wrapped in FSDP, DDP or torch.compile. What is
    compiled can be found again under `salt`, see `salted_caches`; it must be one that no compile had before.
    """

    def __init__(self, model: torch.nn.Module | None = None, salt: str = "") -> None:
        self._names: dict[int, str] = {}
        if model is not None:
            for name, module in model.named_modules():
                self._names.setdefault(id(module), fqn.normalise(name))
        self._known = frozenset(self._names.values())
        self._graphs: list[GraphFacts] = []
        self._roots: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {}
        self._pending: dict[int, _Live] = {}
        self._local = threading.local()
        self._stack = contextlib.ExitStack()
        self._breaks_before = 0
        self._unimplemented_before: dict[str, int] = {}
        self._codes = _forward_codes(model)
        self._sources = Sources()
        self._compile_seconds = 0.0
        self._compile_started = 0.0
        self._hook_seconds = 0.0
        self._salt = salt or f"costlab-{os.getpid()}-{time.time_ns()}"
        self.errors: Counter[str] = Counter()
        self.note = ""
        self.supported = False

    def __enter__(self) -> FusionCollector:
        absent = missing_internals()
        if absent:
            self.note = f"not supported on torch {torch.__version__}: no {', '.join(absent)}; fusion shows unknown"
            return self
        try:
            self._patch()
            self.supported = True
        except Exception as error:  # an unknown torch must degrade, never break the run
            self._stack.close()
            self.note = f"not supported on torch {torch.__version__}: {type(error).__name__}: {error}"
            self.errors[f"patch: {type(error).__name__}: {error}"] += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    # Patches

    def _patch(self) -> None:
        from torch._inductor import scheduler

        for name in _BACKENDS:
            importlib.import_module(name)
        owner = scheduler.Scheduler
        self._stack.enter_context(salted_caches(self._salt))
        self._replace(owner, "fuse_nodes", self._fuse_nodes(owner.fuse_nodes))
        self._replace(owner, "can_fuse", self._can_fuse(owner.can_fuse))
        self._replace(owner, "codegen", self._codegen(owner.codegen))
        self._replace(scheduler.WhyNoFuse, "__call__", self._why(scheduler.WhyNoFuse.__call__))
        self._patch_provenance()
        self._guarded("sources", self._watch_sources)
        self._guarded("mix-order reductions", self._watch_mix_order)
        self._guarded("callbacks", self._watch_compiles)
        from torch._dynamo import utils

        self._breaks_before = len(getattr(utils, "graph_break_reasons", ()))
        self._unimplemented_before = dict(utils.counters.get("unimplemented", {}))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = owner.__dict__[name]
        setattr(owner, name, value)
        self._stack.callback(setattr, owner, name, original)

    def _patch_provenance(self) -> None:
        from torch._inductor import debug

        original = debug.set_kernel_post_grad_provenance_tracing
        wrapper = self._provenance(original)
        for module in list(sys.modules.values()):
            name = getattr(module, "__name__", "")
            ours = isinstance(name, str) and name.startswith("torch._inductor")
            if ours and getattr(module, "__dict__", {}).get(_PROVENANCE) is original:
                self._replace(module, _PROVENANCE, wrapper)

    def _watch_sources(self) -> None:
        """Keep what is written for every kernel; a torch without this method shows kernels without their source."""
        from torch._inductor.codegen import wrapper

        owner = wrapper.PythonWrapperCodegen
        original = owner.__dict__["define_kernel"]

        @functools.wraps(original)
        def define_kernel(code: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> Any:
            live = getattr(self._local, "live", None)
            if live is not None:
                facts = live.facts
                self._guarded("source", self._sources.add, kernel_name, facts.phase, facts.compile_id, kernel_body)
            return original(code, kernel_name, kernel_body, *args, **kwargs)

        self._replace(owner, "define_kernel", define_kernel)

    def _watch_mix_order(self) -> None:
        """Name the kernel of two reductions over different axes: its code generation tells nobody."""
        from torch._inductor.codegen import simd, triton

        original = simd.SIMDScheduling.__dict__.get("codegen_mix_order_reduction")
        define = triton.TritonScheduling.__dict__.get("define_kernel")
        if original is None or define is None:  # a torch without such kernels
            return
        self._replace(simd.SIMDScheduling, "codegen_mix_order_reduction", self._mix_order(original))
        self._replace(triton.TritonScheduling, "define_kernel", self._defined(define))

    def _mix_order(self, original: Any) -> Any:
        local = self._local

        @functools.wraps(original)
        def codegen(backend: Any, node: Any) -> Any:
            live = getattr(local, "live", None)
            if live is None:
                return original(backend, node)
            at, local.defined = len(live.facts.calls), []
            operations = tuple(n.get_name() for n in node.get_nodes())
            try:
                return original(backend, node)
            finally:
                heard = {name for name, _ in live.facts.calls[at:]}
                fresh = [(name, operations) for name in local.defined if name not in heard]
                live.facts.calls[at:at] = fresh[:1]  # the first is the kernel itself, later ones its epilogues
                local.defined = None

        return codegen

    def _defined(self, original: Any) -> Any:
        local = self._local

        @functools.wraps(original)
        def define_kernel(*args: Any, **kwargs: Any) -> Any:
            name = original(*args, **kwargs)
            defined = getattr(local, "defined", None)
            if defined is not None:
                defined.append(name)
            return name

        return define_kernel

    def _watch_compiles(self) -> None:
        """Time the outermost compiles."""
        from torch._dynamo.callback import callback_handler

        def started(*_: Any) -> None:
            self._compile_started = time.perf_counter()

        def ended(*_: Any) -> None:
            self._compile_seconds += time.perf_counter() - self._compile_started

        callback_handler.register_start_callback(started)
        self._stack.callback(_forget, callback_handler.start_callbacks, started)
        callback_handler.register_end_callback(ended)
        self._stack.callback(_forget, callback_handler.end_callbacks, ended)

    def _guarded(self, what: str, action: Callable[..., T], *args: Any) -> T | None:
        """Run one of our own actions; count its error and its time."""
        began = time.perf_counter()
        try:
            return action(*args)
        except Exception as error:  # a probe must never break a compile
            self.errors[f"{what}: {type(error).__name__}: {error}"[:200]] += 1
            return None
        finally:
            self._hook_seconds += time.perf_counter() - began

    def _fuse_nodes(self, original: Any) -> Any:
        @functools.wraps(original)
        def fuse_nodes(scheduler: Any, nodes: Any) -> Any:
            live = self._guarded("begin", self._begin, scheduler, nodes)
            with self._current(live):
                fused = original(scheduler, nodes)
            if live is not None:
                live.facts.nodes_after = len(fused)
            return fused

        return fuse_nodes

    def _codegen(self, original: Any) -> Any:
        @functools.wraps(original)
        def codegen(scheduler: Any) -> Any:
            live = self._pending.pop(id(scheduler), None)
            if live is not None:
                self._guarded("finish", self._finish, scheduler, live)
            with self._current(live):
                return original(scheduler)

        return codegen

    def _why(self, original: Any) -> Any:
        @functools.wraps(original)
        def why(self_: Any, reason: str, *args: Any) -> Any:
            heard = getattr(self._local, "heard", None)
            if heard is not None:
                heard.append((reason, args))
            return original(self_, reason, *args)

        return why

    def _can_fuse(self, original: Any) -> Any:
        local = self._local

        @functools.wraps(original)
        def can_fuse(scheduler: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> Any:
            outer = getattr(local, "heard", None)
            heard: list[tuple[str, Any]] = []
            local.heard = heard
            try:
                allowed = original(scheduler, node1, node2, *args, **kwargs)
            finally:
                local.heard = outer
            live = getattr(local, "live", None)
            if not allowed and live is not None:
                self._guarded("reject", self._reject, live, scheduler, node1, node2, heard)
            return allowed

        return can_fuse

    def _provenance(self, original: Any) -> Any:
        @functools.wraps(original)
        def provenance(node_schedule: Any, kernel_name: str, is_extern: bool = False, *args: Any, **kwargs: Any) -> Any:
            live = getattr(self._local, "live", None)
            if live is not None:
                self._guarded("names", self._name, live, node_schedule, kernel_name, is_extern)
            return original(node_schedule, kernel_name, is_extern, *args, **kwargs)

        return provenance

    @contextlib.contextmanager
    def _current(self, live: _Live | None) -> Iterator[None]:
        """Make `live` the graph of this thread; subgraphs are scheduled inside the code generation of their parent."""
        outer = getattr(self._local, "live", None)
        self._local.live = live
        try:
            yield
        finally:
            self._local.live = outer

    # What the patches record

    def _begin(self, scheduler: Any, nodes: Any) -> _Live:
        from torch._inductor.virtualized import V

        identity = extract.compile_id()
        phase = "backward" if V.graph.is_backward else "inference" if V.graph.is_inference else "forward"
        chain, resumed = self._frame(identity)
        facts = GraphFacts(compile_id=identity, phase=phase, root="", root_chain=(), resumed_at=resumed)
        facts.root_chain = tuple(name for name, _ in chain)
        facts.nodes_before = len(nodes)
        self._graphs.append(facts)
        live = _Live(facts)
        self._pending[id(scheduler)] = live
        return live

    def _frame(self, identity: str) -> tuple[tuple[tuple[str, str], ...], str]:
        """Modules around the compiled frame; a backward may compile in autograd's thread and takes its forward's."""
        if identity and identity in self._roots:
            return self._roots[identity]
        found = (extract.frame_modules(self._names), extract.resumed_at())
        self._roots[identity] = found
        return found

    def _reject(self, live: _Live, scheduler: Any, node1: Any, node2: Any, heard: list[tuple[str, Any]]) -> None:
        reason, args = heard[-1] if heard else ("", ())
        if not heard:
            backend = type(scheduler.get_backend(node1.get_device())).__name__
            reason = f"backend: {backend} gave no reason"
        elif reason.startswith("no shared data"):
            common = node1.read_writes.buffer_names() & node2.read_writes.buffer_names()
            if not common:
                return
            # Inductor gives the generic text for index mismatches too; only at this moment can it say which.
            reason, args = "indexing: " + scheduler.decide_fusion_fail_reason(node1, node2, common), ()
        key = (node1.get_name(), node2.get_name())
        live.rejected.pop(key, None)
        first, second = (frozenset(n.get_operation_names()) for n in (node1, node2))
        live.rejected[key] = Rejection(first, second, reason, args)

    def _finish(self, scheduler: Any, live: _Live) -> None:
        from torch._inductor.virtualized import V

        began = time.perf_counter()
        facts = live.facts
        graph = V.graph.graph
        facts.nodes = extract.fx_nodes(graph, self.errors)
        extract.outputs(graph, facts)
        extract.schedule(scheduler, facts)
        chain = self._roots[facts.compile_id][0]
        facts.root, facts.root_class = extract.frame_root(chain, facts.nodes.values(), self._known)
        facts.rejections = list(live.rejected.values())
        facts.hook_seconds = time.perf_counter() - began
        facts.complete = True

    def _name(self, live: _Live, node_schedule: Any, kernel_name: str, is_extern: bool) -> None:
        from torch._inductor.scheduler import BaseSchedulerNode

        if is_extern:
            operations = [node_schedule.get_operation_name()]
        else:
            operations = [n.get_name() for n in node_schedule if isinstance(n, BaseSchedulerNode)]
        live.facts.calls.append((kernel_name, tuple(operations)))

    # Result

    def _breaks(self) -> list[GraphBreak]:
        from torch._dynamo import utils

        reasons = list(getattr(utils, "graph_break_reasons", ()))
        new = reasons[self._breaks_before :] if len(reasons) >= self._breaks_before else reasons
        found: dict[tuple[str, tuple[str, ...]], GraphBreak] = {}
        for item in new:
            stack = tuple((f.filename, int(f.lineno or 0)) for f in item.user_stack)
            frames = tuple(f"{PurePath(file).name}:{line}" for file, line in stack)
            own = frames[stack.index(user_frame(stack))] if stack else ""
            reason = wrapped(item.reason, (file for file, _ in stack))
            known = found.setdefault((reason, frames), GraphBreak(reason=reason, frames=list(frames), own=own))
            known.count += 1
        return list(found.values()) + self._skipped(utils.counters.get("unimplemented", {}))

    def _skipped(self, unimplemented: dict[str, int]) -> list[GraphBreak]:
        """Frames that were given up as a whole: a break inside a loop leaves no break reason, only this counter."""
        found = []
        for reason, count in unimplemented.items():
            skipped = _SKIPPED_FRAME.search(reason)
            if skipped is None or count <= self._unimplemented_before.get(reason, 0):
                continue
            place = (PurePath(skipped.group(1)).name, int(skipped.group(2)))
            layer = self._codes.get(place, "")
            found.append(GraphBreak(wrapped(reason, []), [f"{place[0]}:{place[1]}"], count, layer, skipped=True))
        return found

    def trace(self) -> FusionTrace:
        """What was collected so far, judged. Call it after the compiles, outside the time that is measured."""
        if not self.supported:
            return FusionTrace(supported=False, note=self.note, errors=dict(self.errors))
        breaks = self._guarded("breaks", self._breaks) or []
        result = build([g for g in self._graphs if g.complete], breaks, self.errors)
        unfinished = sum(not g.complete for g in self._graphs)
        if unfinished:
            self.errors["graphs whose schedule was not seen to the end"] = unfinished
        if not self._graphs:
            result.note = "no graph was compiled while the collector was open (nothing compiled, or compiled before)"
        result.sources = self._sources.kept
        result.errors = dict(self.errors)
        result.hook_seconds = self._hook_seconds
        result.compile_seconds = self._compile_seconds
        return result


def _forget(callbacks: list[Any], callback: Any) -> None:
    """Remove a callback; `torch._dynamo.reset` may have cleared the list before."""
    if callback in callbacks:
        callbacks.remove(callback)
