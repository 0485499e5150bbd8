"""The one place that touches torch's compile-time internals for compile events.

Tried on torch 2.11.0 and 2.13.0 (tests/probes/test_compile_events.py). Whatever is absent in another version is
named in `Hooks.missing` and its figures are left out; nothing here raises into a compile.

- `CompilationMetrics` records: `torch._dynamo.utils.get_compilation_metrics()`, a bounded deque (64 by default).
- Graph breaks: `torch._dynamo.output_graph.GraphCompileReason.__post_init__`, because the list of reasons is emptied
  by `torch._dynamo.reset()`.
- Start and end of the outermost compile: `CompilationCallbackHandler.run_start_callbacks` / `run_end_callbacks`, for
  the same reason patched on the class instead of registered.
- Cache counters: `torch._dynamo.utils.counters`.
- Frames that are not taken: `torch._dynamo.trace_rules.check`, and `external_utils.wrap_inline` around them.
- Keys of the FX-graph and AOTAutograd caches: `torch._inductor.codecache.FxGraphHashDetails`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

METRICS_LIMIT = 8192
CACHES: dict[str, tuple[str, str]] = {
    "fx_graph": ("inductor", "fxgraph_cache_{}"),
    "aot_autograd": ("aot_autograd", "autograd_cache_{}"),
}
OUTCOMES = ("hit", "miss", "bypass")


def passed_over(module: Any) -> bool:
    """Whether `module.compile()` would do nothing: Dynamo takes no frame of torch's own code, as of nn.Sequential.

    `torch.compile(module)` puts a frame around such a module (torch._dynamo.eval_frame.OptimizedModule).
    """
    try:
        from torch._dynamo.external_utils import wrap_inline  # noqa: F401
        from torch._dynamo.trace_rules import check

        return bool(check(module.forward))
    except Exception:  # a torch without these compiles as it does
        return False


def compile_module(module: Any, **options: Any) -> Callable[[], None]:
    """`module.compile(**options)`, after a frame was put around a forward that would be passed over.

    It lies within the module's hooks: those of a sharding wrapper, which no graph can hold, stay outside. Modules of
    one structure share the frame's code, and with it their graphs; others have code of their own, since Dynamo compiles
    code anew for every other structure and gives up after a few. Returns what makes the module as it was.
    """
    before, framed = module._compiled_call_impl, False
    if passed_over(module):
        from torch._dynamo.external_utils import wrap_inline

        frame = wrap_inline(module.forward)
        structure = (type(module), repr(module))
        if structure not in _frames:
            _frames[structure] = frame.__code__.replace(co_name=f"{type(module).__name__}.forward")
        frame.__code__ = _frames[structure]
        module.forward, framed = frame, True
    module.compile(**options)

    def undo() -> None:
        module._compiled_call_impl = before
        if framed:
            vars(module).pop("forward", None)

    return undo


_frames: dict[tuple[type, str], CodeType] = {}


@contextlib.contextmanager
def salted_caches(salt: str) -> Iterator[None]:
    """Inside, the caches of graphs hold only what was compiled under the same salt, in this process or another.

    Nothing changes where the salt is empty or this torch keys its caches otherwise.
    """
    details: Any = None
    if salt:
        with contextlib.suppress(ImportError, AttributeError):
            from torch._inductor.codecache import FxGraphHashDetails as details
    original = getattr(details, "__init__", None)
    if details is None or original is None:
        yield
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.costlab_salt = salt

    details.__init__ = init
    try:
        yield
    finally:
        details.__init__ = original


def read_cache_keys() -> None:
    """Hash torch's and Triton's files, as cache keys need it, once for this process and its forks: half a second.

    Needs no device; what this torch does not have is left to the compile.
    """
    with contextlib.suppress(Exception):
        from torch._inductor.codecache import torch_key

        torch_key()
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def probe_cpu_vectors() -> None:
    """Try which vector instructions Inductor's C++ code may use, once for this process and its forks: a second."""
    with contextlib.suppress(Exception):
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        valid_vec_isa_list()


@dataclass(frozen=True)
class Break:
    """A graph break as Dynamo recorded it; `stack` is (file, line), outermost frame first."""

    reason: str
    stack: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Compile:
    """What costlab needs of one CompilationMetrics record; times in seconds, None where not recorded."""

    compile_id: str
    function: str
    file: str
    line: int
    forward: bool
    operators: int | None
    recompile_reason: str
    failure: str  # why the frame was left to eager, or ""
    failure_file: str
    failure_line: int
    dynamo_s: float | None
    aot_s: float | None
    inductor_s: float | None
    codegen_s: float | None
    backward_s: float | None
    autotune_s: float | None  # at run time
    cudagraph_s: float | None  # recording, at run time
    runtime: bool  # work at run time only, no graph of its own


@dataclass
class Hooks:
    """Reversible patches on the compile stack."""

    on_break: Callable[[Break], None]
    on_start: Callable[[], None]
    on_end: Callable[[], None]
    missing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # exceptions of our own callbacks, first of each kind
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def install(self) -> None:
        """Patch; calling the originals first, so that a failure here cannot change a compile."""
        self._wrap("torch._dynamo.output_graph", "GraphCompileReason", "__post_init__", self._saw_reason)
        handler = ("torch._dynamo.callback", "CompilationCallbackHandler")
        self._wrap(*handler, "run_start_callbacks", lambda *_: self._guard(self.on_start))
        self._wrap(*handler, "run_end_callbacks", lambda *_: self._guard(self.on_end))

    def remove(self) -> None:
        """Put everything back, newest first."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, module: str, owner: str, method: str, after: Callable[..., None]) -> None:
        import importlib

        try:
            target = getattr(importlib.import_module(module), owner)
            original = getattr(target, method)
        except (ImportError, AttributeError) as error:
            text = f"{module}.{owner}.{method}: {error}"
            self.missing += [] if text in self.missing else [text]
            return

        def patched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            after(*args, **kwargs)
            return result

        setattr(target, method, patched)
        self._undo.append(lambda: setattr(target, method, original))

    def _saw_reason(self, reason: Any, *_: object) -> None:
        if not getattr(reason, "graph_break", True):
            return
        frames = getattr(reason, "user_stack", None) or ()
        stack = tuple((str(f.filename), int(f.lineno or 0)) for f in frames)
        self._guard(lambda: self.on_break(Break(str(reason.reason), stack)))

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text not in self.errors:
                self.errors.append(text)


def raise_metrics_limit() -> Callable[[], None]:
    """Let Dynamo keep more than 64 records; returns what restores the former limit."""
    from torch._dynamo import utils

    former = utils._compilation_metrics.maxlen or METRICS_LIMIT
    utils.set_compilation_metrics_limit(max(former, METRICS_LIMIT))
    return lambda: utils.set_compilation_metrics_limit(former)


def metrics() -> list[Any]:
    """The raw records; their identity tells old ones from new."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def cache_counts() -> dict[tuple[str, str], int]:
    """(cache, outcome) -> count since the process started or somebody cleared the counters."""
    from torch._dynamo.utils import counters

    counts: dict[tuple[str, str], int] = {}
    for cache, (group, pattern) in CACHES.items():
        for outcome in OUTCOMES:
            counts[cache, outcome] = int(counters[group][pattern.format(outcome)]) if group in counters else 0
    return counts


def read_compile(raw: Any) -> Compile:
    """One CompilationMetrics record in our terms."""

    def seconds(name: str) -> float | None:
        value = getattr(raw, name, None)
        return None if value is None else value / 1e6

    return Compile(
        compile_id=str(getattr(raw, "compile_id", None) or ""),
        function=getattr(raw, "co_name", None) or "",
        file=getattr(raw, "co_filename", None) or "",
        line=getattr(raw, "co_firstlineno", None) or 0,
        forward=getattr(raw, "is_forward", None) is not False,
        operators=getattr(raw, "graph_op_count", None),
        recompile_reason=getattr(raw, "recompile_reason", None) or "",
        failure=(getattr(raw, "fail_reason", None) or "") if getattr(raw, "fail_type", None) else "",
        failure_file=getattr(raw, "fail_user_frame_filename", None) or "",
        failure_line=getattr(raw, "fail_user_frame_lineno", None) or 0,
        dynamo_s=seconds("dynamo_cumulative_compile_time_us"),
        aot_s=seconds("aot_autograd_cumulative_compile_time_us"),
        inductor_s=seconds("inductor_cumulative_compile_time_us"),
        codegen_s=seconds("inductor_code_gen_cumulative_compile_time_us"),
        backward_s=seconds("backward_cumulative_compile_time_us"),
        autotune_s=seconds("runtime_triton_autotune_time_us"),
        cudagraph_s=seconds("runtime_cudagraphify_time_us"),
        runtime=bool(getattr(raw, "is_runtime", None)),
    )
