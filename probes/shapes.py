"""Runs seen shapes through static specialisation, mark_dynamic and eager steps: the job behind `costlab shapes`.

One rank, unsharded, because what is asked is how the compiler treats the shapes. Every path starts from a reset Dynamo
with the graph caches off; kernels that earlier paths built may still come from disk.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from costlab.probes import failures
from costlab.probes.compile_internals import compile_module
from costlab.probes.job import run_rank
from costlab.probes.parallel import adamw, compiled_modules
from costlab.probes.session import Voice
from costlab.probes.shapes_spec import (
    MOST_SHAPES,
    PATHS,
    RESULT_FILE,
    PathResult,
    Recompile,
    Shape,
    ShapeCost,
    ShapesResult,
    ShapesSpec,
)
from costlab.probes.spec import SpecError
from costlab.probes.tables import write_bytes
from costlab.probes.workloads.batches import mapped, tensors, to_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from costlab.probes.workloads.base import Workload

WARM = 2  # steps between the first of a shape and the timed ones


@dataclass
class Stage:
    """The model that all paths share, its largest batch, and where it runs."""

    spec: ShapesSpec
    device: torch.device
    workload: Workload
    shapes: list[Shape]
    largest: Shape
    optimizer: torch.optim.Optimizer

    def batch(self, step: int, shape: Shape) -> Any:
        """The workload's batch cut down to a shape."""
        return cut(to_device(self.workload.batch(step), self.device), self.largest, shape)


def body(run_dir: Path, options: bytes, _rank: int, voice: Voice) -> None:
    """All paths; the result file is written after each."""
    import torch

    spec = msgspec.json.decode(options, type=ShapesSpec)
    voice.enter("build", f"{spec.workload} {spec.size}")
    shapes = seen(spec)
    stage = build(spec, shapes)
    cuda = stage.device.type == "cuda"
    result = ShapesResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(stage.device) if cuda else "cpu",
        torch=str(torch.__version__),
        spec=spec,
        title=stage.workload.title or stage.workload.name,
        shapes=shapes,
        recompile_limit=recompile_limit(),
    )
    voice.enter("measure", f"{len(shapes)} shapes")
    total = len(PATHS) * len(shapes)
    for done, path in enumerate(PATHS):

        def told(index: int, shape: Shape, done: int = done, path: str = path) -> None:
            voice.progress(done * len(shapes) + index, total, f"{path} {shape.batch} x {shape.seq}")

        result.paths.append(run_path(stage, path, told))
        write_bytes(run_dir / RESULT_FILE, msgspec.json.encode(result))
    result.complete = True
    write_bytes(run_dir / RESULT_FILE, msgspec.json.encode(result))
    voice.progress(total, total, "done")


def seen(spec: ShapesSpec) -> list[Shape]:
    """The shapes given, or those the user's sampler yields, equal ones counted, in the order first seen."""
    pairs = [(s.batch, s.seq, s.count) for s in spec.shapes]
    if spec.sampler:
        pairs = [(b, s, 1) for b, s in sampled(spec.sampler, spec.samples)]
    counts: Counter[tuple[int, int]] = Counter()
    for batch, seq, count in pairs:
        counts[batch, seq] += count
    if not 1 <= len(counts) <= MOST_SHAPES:
        raise SpecError(f"{len(counts)} different shapes; give 1 to {MOST_SHAPES} (a sampler may round its lengths)")
    return [Shape(batch=b, seq=s, count=n) for (b, s), n in counts.items()]


def sampled(name: str, most: int) -> list[tuple[int, int]]:
    """(batch, seq) pairs of the user's `file.py:function`, at most `most` of them. Raises SpecError, WorkloadError."""
    from costlab.probes.workloads.loader import _function

    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise SpecError(f"no such file: {file}; give your sampler as path/to/file.py:function")
    make: Callable[..., object] = _function(path, function)
    called = f"{path.name}:{function}"
    try:
        found = make()
        items = list(islice(found, most)) if isinstance(found, Iterable) else []
    except (Exception, SystemExit) as error:
        raise SpecError(f"sampler {called} raised {type(error).__name__}: {error}") from error
    pairs = [_pair(item, called) for item in items]
    if not pairs:
        raise SpecError(f"sampler {called} yielded nothing; yield pairs (batch, sequence)")
    return pairs


def _pair(item: object, called: str) -> tuple[int, int]:
    """A pair as plain integers; those of NumPy and torch count as integers, true and false do not."""
    values = tuple(islice(item, 3)) if isinstance(item, Iterable) else ()
    try:
        pair = tuple(operator.index(x) for x in values if not isinstance(x, bool))
    except TypeError:
        pair = ()
    if len(values) != 2 or len(pair) != 2 or min(pair) < 1:
        raise SpecError(f"sampler {called} yielded {item!r:.60}; yield pairs (batch, sequence), both above zero")
    return pair[0], pair[1]


def build(spec: ShapesSpec, shapes: list[Shape]) -> Stage:
    """Load the workload at the largest batch and sequence; smaller shapes are cut out of its batches."""
    import torch

    from costlab.probes.materialise import on_device
    from costlab.probes.workloads.base import WorkloadContext, WorkloadError, find_blocks
    from costlab.probes.workloads.loader import load

    if spec.device == "cuda" and not torch.cuda.is_available():
        raise SpecError("--device cuda was asked for, but torch sees no CUDA device; `costlab doctor` says why")
    cuda = spec.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    largest = Shape(batch=max(s.batch for s in shapes), seq=max(s.seq for s in shapes))
    context = WorkloadContext(device, dtype, spec.size, largest.batch, largest.seq, spec.seed, 0, 1)
    workload = load(spec.workload, context)
    on_device(workload.model, device, spec.seed)
    workload.model.train()
    workload.blocks = workload.blocks or find_blocks(workload.model)
    optimizer = adamw([p for p in workload.model.parameters() if p.requires_grad], 1e-5)
    stage = Stage(spec, device, workload, shapes, largest, optimizer)
    whole = sizes_in(stage.batch(0, largest))
    for shape in shapes:
        if (shape.batch, shape.seq) != (largest.batch, largest.seq) and sizes_in(stage.batch(0, shape)) == whole:
            raise WorkloadError(
                f"no tensor of {spec.workload}'s batch begins with {largest.batch} samples (x {largest.seq}): shapes"
                " cannot be cut from it; let make() follow ctx.batch and ctx.seq"
            )
    return stage


def cut(batch: Any, largest: Shape, shape: Shape) -> Any:
    """Every tensor whose leading dimensions are those of the largest shape, cut to `shape` and made contiguous.

    Tensors [batch, ...] lose samples, those [batch, seq, ...] also tokens; everything else stays.
    """
    import torch

    def smaller(tensor: Tensor) -> Tensor:
        out = tensor
        if out.dim() and out.shape[0] == largest.batch:
            out = out[: shape.batch]
            if out.dim() > 1 and shape.seq and out.shape[1] == largest.seq:
                out = out[:, : shape.seq]
        return out.contiguous() if out.shape != tensor.shape else out.clone(memory_format=torch.preserve_format)

    return mapped(batch, smaller)


def sizes_in(batch: Any) -> list[tuple[int, ...]]:
    """Shapes of all tensors of a nested batch."""
    return [tuple(t.shape) for t in tensors(batch)]


def recompile_limit() -> int:
    """How many versions of one frame Dynamo compiles before it gives up."""
    from torch._dynamo import config

    return int(getattr(config, "recompile_limit", 0) or getattr(config, "cache_size_limit", 8))


def run_path(stage: Stage, path: str, told: Callable[[int, Shape], None]) -> PathResult:
    """All shapes on one path, from a reset Dynamo; a path that fails keeps what it had measured."""
    import torch
    import torch._dynamo

    gc.collect()
    cuda = stage.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(stage.device)
    torch._dynamo.reset()
    result = PathResult(path=path)  # type: ignore[arg-type]
    with compiled(stage, path), caches_off(len(stage.shapes)):
        try:
            for index, shape in enumerate(stage.shapes):
                told(index, shape)
                measure(stage, path, shape, result)
        except Exception as error:  # a model that cannot run dynamically is a finding, not the end of the job
            result.problem = failures.one_line(f"{type(error).__name__}: {error}")
        result.cache_entries = cache_entries(stage.workload.model) if path != "eager" else None
    if cuda:
        result.peak_bytes = int(torch.cuda.max_memory_allocated(stage.device))
    stage.optimizer.zero_grad(set_to_none=True)
    return result


@contextlib.contextmanager
def compiled(stage: Stage, path: str) -> Iterator[None]:
    """Compile the blocks or the model as the path says; taken back on exit."""
    if path == "eager":
        yield
        return
    model, names = stage.workload.model, compiled_modules(stage.spec.compile, stage.workload.blocks)
    dynamic = False if path == "static" else None
    undo = [compile_module(model.get_submodule(name), dynamic=dynamic) for name in names]
    try:
        yield
    finally:
        for restore in undo:
            restore()


@contextlib.contextmanager
def caches_off(shapes: int) -> Iterator[None]:
    """Every graph is compiled anew, and no shape is refused because others came before."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    limit = max(recompile_limit(), 4 * shapes)
    with (
        dynamo.patch({name: limit}),
        functorch.patch(enable_autograd_cache=False),
        inductor.patch(fx_graph_cache=False),
    ):
        yield


def measure(stage: Stage, path: str, shape: Shape, result: PathResult) -> None:
    """First, warm and timed steps of one shape; compile events of the first go into `result`."""
    from costlab.probes.compile_events import CompileEvents

    with CompileEvents() as events:
        first = timed(stage, path, shape, 0)
    for row in events.rows(0, "cold"):
        if row.kind == "graph":
            result.graphs += 1
        elif row.kind == "phase" and row.name == "total":
            result.compile_s += row.seconds or 0.0
        elif row.kind == "recompile":
            running = f"{shape.batch} x {shape.seq}"
            guard = Recompile(guard=row.detail, source=row.source, seconds=row.seconds, shape=running)
            result.recompiles.append(guard)
    times = [timed(stage, path, shape, i + 1) for i in range(WARM + stage.spec.steps)][WARM:]
    cost = ShapeCost(
        batch=shape.batch,
        seq=shape.seq,
        count=shape.count,
        step_ms=median(times),
        low_ms=min(times),
        high_ms=max(times),
        first_ms=first,
    )
    result.shapes.append(cost)


def timed(stage: Stage, path: str, shape: Shape, step: int) -> float:
    """ms of one training step from idle device to idle device; the batch is ready before."""
    import torch

    batch = stage.batch(step, shape)
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if path == "mark_dynamic":
        context = marking(stage, batch, shape)
    if stage.device.type == "cuda":
        torch.cuda.synchronize(stage.device)
    with context:
        start = time.perf_counter()
        with autocast(stage):
            loss = stage.workload.loss(stage.workload.model, batch)
        loss.backward()
        stage.optimizer.step()
        stage.optimizer.zero_grad(set_to_none=True)
        if stage.device.type == "cuda":
            torch.cuda.synchronize(stage.device)
        return (time.perf_counter() - start) * 1e3


def autocast(stage: Stage) -> contextlib.AbstractContextManager[Any]:
    """bf16 as DDP runs it: parameters stay fp32."""
    import torch

    if stage.spec.dtype == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(stage.device.type, dtype=torch.bfloat16)


@contextlib.contextmanager
def marking(stage: Stage, batch: Any, shape: Shape) -> Iterator[None]:
    """Mark the varying dimensions of the batch, and of what enters a block that is compiled on its own."""
    for tensor in tensors(batch):
        mark(tensor, stage.shapes, shape)

    def enter(arguments: Any) -> None:
        for tensor in tensors(arguments):
            mark(tensor, stage.shapes, shape)

    handles = outside_hooks(stage, enter) if stage.spec.compile == "block" else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def outside_hooks(stage: Stage, enter: Callable[[Any], None]) -> list[_Restore]:
    """`enter` before each compiled block's call, outside of what is compiled: a hook inside would be traced."""
    handles: list[_Restore] = []
    for name in compiled_modules(stage.spec.compile, stage.workload.blocks):
        module = stage.workload.model.get_submodule(name)
        original = module._compiled_call_impl
        if original is None:
            continue

        def call(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            enter(args)
            return _original(*args, **kwargs)

        module._compiled_call_impl = call
        handles.append(_Restore(module, original))
    return handles


@dataclass
class _Restore:
    """Puts a module's compiled call back."""

    module: Any
    original: Any

    def remove(self) -> None:
        self.module._compiled_call_impl = self.original


def mark(tensor: Tensor, shapes: list[Shape], shape: Shape) -> None:
    """Mark dimension 0 as dynamic where it is the batch and batches vary, and any later one that is the sequence.

    A size of 0 or 1 is always specialised by torch and is left alone.
    """
    import torch._dynamo

    batches, seqs = ({getattr(s, name) for s in shapes} for name in ("batch", "seq"))
    if len(batches) > 1 and tensor.dim() and tensor.shape[0] == shape.batch > 1:
        torch._dynamo.mark_dynamic(tensor, 0)
    for dim in range(tensor.dim()):
        if len(seqs) > 1 and tensor.shape[dim] == shape.seq > 1 and dim in (0, 1):
            if dim == 0 and shape.batch == shape.seq:
                continue  # cannot be told from the batch
            torch._dynamo.mark_dynamic(tensor, dim)


def cache_entries(model: nn.Module) -> int | None:
    """Compiled versions that Dynamo keeps of the model's forward methods; None where this torch cannot say."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    except ImportError:
        return None
    forwards = (vars(m).get("forward", type(m).forward) for m in model.modules())
    codes = {code for forward in forwards if (code := getattr(forward, "__code__", None)) is not None}
    entries: list[Any] = [entry for code in codes for entry in _debug_get_cache_entry_list(code)]
    return len(entries)


def main(argv: list[str]) -> int:
    """A rank's main."""
    return run_rank(argv, body)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
