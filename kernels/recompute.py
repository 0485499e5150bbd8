"""Activation recomputation: what backward keeps and what it computes again, chosen apart from how modules are wrapped.

| granularity | backward keeps | backward computes again |
|---|---|---|
| none | everything autograd saves | nothing |
| block | the inputs of the named blocks | the blocks |
| operator | those, and the results of costly operators inside (matrix products, attention, collectives) | the rest |
| budget | what the partitioner of torch.compile picks within a share of the memory (1 = as without) | the rest |

`apply` replaces the forward of the named blocks in place: no wrapper module, so names, sharding and compilation
units stay as they are. Call it before `torch.compile` and `fully_shard`.

A budget below 1 may compute dropout again with fresh randomness in compiled graphs, which gives silently wrong
gradients (pytorch#190758): it is refused where the forward draws random numbers.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
COSTLY = MATMULS | {
    "aten::convolution",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_mm",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
}


class RecomputeError(ValueError):
    """A recomputation that can't be applied, or that would give wrong gradients."""


class Granularity(StrEnum):
    """How finely is chosen what to recompute."""

    NONE = "none"
    BLOCK = "block"
    OPERATOR = "operator"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True)
class Recompute:
    """One way to recompute.

    `blocks`: FQNs of the modules, for block and operator. `save`: operators whose results are kept, for
    operator, and of matrix products only every `every_matmul`-th. `budget`: share of the memory, 0 to 1, for
    budget.
    """

    granularity: Granularity = Granularity.NONE
    blocks: tuple[str, ...] = ()
    save: frozenset[str] = COSTLY
    every_matmul: int = 1
    budget: float = 1.0

    @property
    def label(self) -> str:
        """Such as `operator, every 2nd matmul`."""
        if self.granularity is Granularity.BUDGET:
            return f"budget {self.budget:g}"
        if self.granularity is Granularity.OPERATOR and self.every_matmul > 1:
            return f"operator, 1 of {self.every_matmul} matmuls"
        return str(self.granularity)


def _operator_policy(choice: Recompute) -> Callable[..., Any]:
    """A policy for one call of one block; matrix products are counted apart in forward and in recomputation."""
    from torch.utils.checkpoint import CheckpointPolicy

    counts: defaultdict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> Any:
        name = operator.name().split(".")[0]
        if name in MATMULS:
            counts[context.is_recompute] += 1
            keep = name in choice.save and (counts[context.is_recompute] - 1) % choice.every_matmul == 0
        else:
            keep = name in choice.save
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _contexts(choice: Recompute) -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_operator_policy(choice))


def apply(model: nn.Module, choice: Recompute) -> Callable[[], None]:
    """Make the named blocks recompute; returns what undoes it. Budget and none change no module.

    Raises `RecomputeError` for blocks that the model doesn't have.
    """
    if choice.granularity in (Granularity.NONE, Granularity.BUDGET):
        return lambda: None
    modules = dict(model.named_modules())
    missing = [name for name in choice.blocks if name not in modules]
    if missing or not choice.blocks:
        raise RecomputeError(f"no such blocks: {', '.join(missing[:4])}" if missing else "no blocks are named")
    if choice.every_matmul < 1:
        raise RecomputeError(f"every {choice.every_matmul}-th matrix product can't be kept")
    for name in choice.blocks:
        _patch(modules[name], choice)

    def undo() -> None:
        for name in choice.blocks:
            modules[name].__dict__.pop("forward", None)

    return undo


def _patch(block: nn.Module, choice: Recompute) -> None:
    from torch.utils.checkpoint import checkpoint

    if "forward" in vars(block):
        raise RecomputeError(f"the forward of a {type(block).__name__} is already replaced")
    forward = block.forward
    more: dict[str, Any] = (
        {"context_fn": partial(_contexts, choice)} if choice.granularity is Granularity.OPERATOR else {}
    )

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    block.forward = recomputed


class _RandomRecorder(TorchDispatchMode):
    """Collects the operators that draw random numbers, leaving out dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs or {}):
            self.found.add(func.name())
        return func(*args, **(kwargs or {}))


def _drops_nothing(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dropout_p" in names:
        return not given.get("dropout_p", 0.0)
    return "dropout" in operator.name() and (given.get("p") == 0 or given.get("train") is False)


def random_operators(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Names of the operators that draw random numbers in one forward of an uncompiled model.

    The forward is run without gradients; random state and buffers are put back. Costs one forward.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = list({p.device.index for p in model.parameters() if p.is_cuda})
    recorder = _RandomRecorder()
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        with recorder:
            model(*args, **kwargs)
        for buffer, before in buffers:
            buffer.copy_(before)
    return sorted(recorder.found)


@contextlib.contextmanager
def activation_budget(budget: float, drawn: Sequence[str]) -> Iterator[None]:
    """Compile inside this with `activation_memory_budget`; the graphs are made at the first call, so make it
    inside too.

    `drawn` is what `random_operators` found. Raises `RecomputeError` for a budget outside [0, 1], and below 1
    for a forward that draws random numbers.
    """
    import torch._functorch.config as functorch

    if not 0 <= budget <= 1:
        raise RecomputeError(f"a budget of {budget} is outside 0 to 1")
    if budget < 1 and drawn:
        raise RecomputeError(
            f"the forward draws random numbers ({', '.join(drawn[:3])}): with a budget below 1 torch.compile may draw "
            "them anew in backward and give wrong gradients without a word (pytorch#190758). Set dropout to 0, or use "
            "block or operator recomputation, which put the random state back"
        )
    with functorch.patch(activation_memory_budget=budget):
        yield


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One choice measured: median ms a step, peak device memory in bytes (None on the CPU) and whether it is on the
    Pareto front (no other choice is both faster and smaller). `error` has the text where it could not run.
    """

    label: str
    ms: float | None
    peak_bytes: int | None
    pareto: bool = False
    error: str = ""


def measure(
    step: Callable[[], object], device: torch.device, warmup: int = 2, steps: int = 5
) -> tuple[float, int | None]:
    """Median milliseconds of a step and the peak of allocated device memory over the measured steps."""
    for _ in range(warmup):
        step()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), torch.cuda.max_memory_allocated(device) if cuda else None


def mark_pareto(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """The points with `pareto` set; one without time or memory is never on the front."""
    known = [(p.ms, p.peak_bytes) for p in points if p.ms is not None and p.peak_bytes is not None]

    def on_front(point: SweepPoint) -> bool:
        if point.ms is None or point.peak_bytes is None:
            return False
        here = (point.ms, point.peak_bytes)
        return not any(ms <= here[0] and peak <= here[1] and (ms, peak) != here for ms, peak in known)

    return [SweepPoint(p.label, p.ms, p.peak_bytes, on_front(p), p.error) for p in points]


def sweep(
    build: Callable[[Recompute], tuple[Callable[[], object], Callable[[], None]]],
    choices: Sequence[Recompute],
    device: torch.device,
    warmup: int = 2,
    steps: int = 5,
) -> list[SweepPoint]:
    """Measure every choice: `build` gives the training step and what frees its memory; a choice that fails is
    kept as such.

    `build` is responsible for `apply` and `activation_budget`; compilation belongs into its first warm-up step.
    """
    points = []
    for choice in choices:
        try:
            step, free = build(choice)
        except (RecomputeError, RuntimeError) as error:
            points.append(SweepPoint(choice.label, None, None, error=str(error)[:500]))
            continue
        try:
            points.append(SweepPoint(choice.label, *measure(step, device, warmup, steps)))
        except (RecomputeError, RuntimeError) as error:
            points.append(SweepPoint(choice.label, None, None, error=str(error)[:500]))
        finally:
            free()
    return mark_pareto(points)
