"""Wraps a workload's model as asked: DDP, FSDP2 or HSDP, compiled per block, whole or not, with recomputation.

Order: recomputation (innermost), then compile of each block, then sharding, so that one graph serves all blocks
and FSDP's hooks stay outside the compiled region. Also states which bytes the wrapping must communicate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from costlab.probes.compile_internals import compile_module, passed_over
from costlab.probes.schedule_choice import ScheduleChoice
from costlab.probes.spec import Compile, RunSpec, SpecError, recompute_budget
from costlab.probes.workloads.base import Workload, batch_beside

_FOR_GOOD = ExitStack()  # never left: graphs are made at the first step, and again when something recompiles

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


@dataclass
class Wrapped:
    """The model to train and how it was put together."""

    model: nn.Module
    base: nn.Module  # the model without wrapper classes, for FQNs
    blocks: list[str]
    compiled: list[str] = field(default_factory=list)  # FQNs whose call is compiled; "" is the whole model
    autocast: torch.dtype | None = None  # of the forward pass and the loss
    expected_bytes: int | None = None
    formula: str = ""
    notes: list[str] = field(default_factory=list)  # what was decided while wrapping, for the log
    calls: Mapping[str, int] = field(default_factory=dict)  # a batch's, of the model ("") and blocks not called once
    passed_over: dict[str, int] = field(default_factory=dict)  # by class: compiled, but not by Module.compile() alone
    schedules: list[ScheduleChoice] = field(default_factory=list)  # grows as the steps meet new sizes of messages

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast where the wrapper itself does not cast (DDP in bf16), or where it is asked for."""
        if self.autocast is None:
            return nullcontext()
        device = next(self.base.parameters()).device.type
        return torch.autocast(device, dtype=self.autocast)


def wrap(
    model: nn.Module,
    blocks: list[str],
    spec: RunSpec,
    device: torch.device,
    dynamic: bool | None = None,
    calls: Mapping[str, int] = MappingProxyType({}),
) -> Wrapped:
    """Apply recomputation, compile and the parallel strategy of `spec`, in place where possible.

    `dynamic` is the workload's wish for torch.compile, taken where `spec.dynamic` is "auto"; `calls` say how often a
    batch calls the model ("") and the blocks (by FQN) that it does not call once.
    """
    modules = dict(model.named_modules())
    missing = [b for b in blocks if b not in modules]
    if missing:
        raise SpecError(f"the workload names blocks that the model does not have: {', '.join(missing[:4])}")
    if spec.recompute in ("block", "operator"):
        if not blocks:
            raise SpecError(
                f"--recompute {spec.recompute}: the model has no repeated blocks; budget:0.5 suits any model, or name "
                "blocks in a costlab Workload"
            )
        _recompute(model, blocks, spec.recompute)
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    options = _compile_options(spec, dynamic)
    chosen = compiled_modules(spec.compile, blocks)
    library = dict(Counter(type(modules[name]).__name__ for name in chosen if passed_over(modules[name])))
    wrapped = Wrapped(model=model, base=model, blocks=blocks, compiled=chosen, passed_over=library, calls=calls)
    if spec.compile == "block":
        for name in chosen:
            compile_module(modules[name], **options)
    if not blocks:
        wrapped.notes.append("no repeated blocks were found: the model is one unit for sharding and compiling")
    if spec.parallel == "ddp":
        _ddp(wrapped, spec, dtype, device)
    else:
        _shard(wrapped, spec, dtype, device)
    if dist.get_world_size() == 1:
        wrapped.expected_bytes, wrapped.formula = 0, "one rank has nobody to talk to"
    if spec.compile == "model":
        compile_module(wrapped.base, **options)  # within DDP's forward, which no graph can hold
    return wrapped


def compiled_modules(how: Compile, blocks: list[str]) -> list[str]:
    """FQNs of what is compiled; "" is the model, also where there are no blocks: it is one, its hooks lie outside."""
    return {"block": blocks or [""], "model": [""], "none": []}[how]


def _recompute(model: nn.Module, blocks: list[str], granularity: str) -> None:
    """Recompute the blocks' activations in backward, without wrapper modules that would change their FQNs."""
    from costlab.kernels.recompute import Granularity, Recompute, RecomputeError, apply

    try:
        apply(model, Recompute(Granularity(granularity), tuple(blocks)))
    except RecomputeError as error:
        raise SpecError(f"--recompute {granularity}: {error}") from error


def set_activation_budget(workload: Workload, spec: RunSpec) -> None:
    """Let the partitioner keep the share of activations that `spec.recompute` names, for all graphs of this process.

    Call it on the unwrapped model. Costs one forward pass, to see whether it draws random numbers: SpecError if so.
    """
    from costlab.kernels.recompute import RecomputeError, activation_budget, random_operators

    budget = recompute_budget(spec.recompute)
    if budget is None:
        return
    drawn = random_operators(_Loss(workload), batch_beside(workload)) if budget < 1 else []
    try:
        _FOR_GOOD.enter_context(activation_budget(budget, drawn))
    except RecomputeError as error:
        raise SpecError(f"--recompute {spec.recompute}: {error}") from error


class _Loss(nn.Module):
    """A workload's forward pass as a module."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model
        self._loss = workload.loss

    def forward(self, batch: Any) -> Tensor:
        """The loss, a scalar."""
        return self._loss(self.model, batch)


def _compile_options(spec: RunSpec, dynamic: bool | None) -> dict[str, Any]:
    options: dict[str, Any] = {"dynamic": {"auto": dynamic, "off": False, "on": True}[spec.dynamic]}
    if spec.compile_mode != "default":
        options["mode"] = spec.compile_mode
    if spec.cudagraphs and spec.compile_mode == "default":
        options["options"] = {"triton.cudagraphs": True}
    return options


def _ddp(wrapped: Wrapped, spec: RunSpec, dtype: torch.dtype, device: torch.device) -> None:
    from torch.nn.parallel import DistributedDataParallel

    wrapped.autocast = dtype if spec.dtype == "bf16" else None
    ids = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(wrapped.base, device_ids=ids, gradient_as_bucket_view=True)
    wrapped.model = ddp
    _compress_gradients(ddp, spec, device)
    if spec.schedule != "stock" and dist.get_world_size() > 1:
        from costlab.probes.schedule import planned_ddp

        wrapped.notes += planned_ddp(ddp, spec, device, wrapped.schedules)
    gradients = sum(p.numel() * p.element_size() for p in wrapped.base.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in ddp.modules_buffers) if ddp.broadcast_buffers else 0
    buffers *= max(wrapped.calls.get("", 1), 1)
    wrapped.expected_bytes = gradients + buffers
    wrapped.formula = "gradients in the parameters' dtype, all-reduced once" + (
        "; buffers broadcast in each call" if buffers else ""
    )
    if spec.grad_compression in ("bf16", "fp16"):
        wrapped.expected_bytes = gradients // 2 + buffers
        wrapped.formula = wrapped.formula.replace("the parameters' dtype", spec.grad_compression)
    elif spec.grad_compression == "powersgd":
        wrapped.expected_bytes, wrapped.formula = None, ""  # factors of matrices, whole gradients of vectors


def _compress_gradients(ddp: DistributedDataParallel, spec: RunSpec, device: torch.device) -> None:
    """Register DDP's hook of that name. PowerSGD of rank 1, from the third step on: it needs two whole ones before.

    Only NCCL has bf16 reductions, and only there do the collectives that PowerSGD chains in callbacks come in the same
    order on all ranks: with gloo they meet those of other buckets, and the process aborts.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    if spec.grad_compression in ("bf16", "powersgd") and device.type != "cuda":
        raise SpecError(f"--grad-compression {spec.grad_compression} needs GPUs with NCCL; on CPU there is fp16")
    if spec.grad_compression == "powersgd":
        state = power.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, power.powerSGD_hook)
    elif spec.grad_compression != "none":
        hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        ddp.register_comm_hook(None, hook[spec.grad_compression])


def _shard(wrapped: Wrapped, spec: RunSpec, dtype: torch.dtype, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    kwargs: dict[str, Any] = {}
    output: dict[str, Any] = {}
    shard = world
    if spec.parallel == "hsdp":
        shard = spec.shard_size or max(1, world // 2)
        if world % shard:
            raise SpecError(f"--shard-size {shard} does not divide {world} ranks")
        mesh = init_device_mesh(device.type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))
        kwargs["mesh"] = mesh
    if spec.dtype == "bf16":
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        wrapped.autocast = dtype if spec.autocast else None
        if ":" in spec.workload:  # a user's loss meets targets in fp32, and its backward pass takes one type only
            output = {"mp_policy": replace(kwargs["mp_policy"], output_dtype=torch.float32)}
    size = 2 if spec.dtype == "bf16" else 4
    wrapped.expected_bytes, wrapped.formula = _sharded_bytes(wrapped, shard, world, size, spec.accumulation)
    planned = spec.schedule != "stock" and world > shard
    if planned:
        from costlab.probes.schedule import planned_hsdp, replicate

        replicate(wrapped.base, mesh)
        kwargs["mesh"] = mesh["shard"]
    for name in wrapped.blocks:
        fully_shard(wrapped.base.get_submodule(name), **kwargs)
    fully_shard(wrapped.base, **(kwargs | output))
    if planned:
        wrapped.notes += planned_hsdp(wrapped.base, mesh, spec, device, wrapped.schedules)


def _padded(parameter: Tensor, shard: int) -> int:
    """Elements FSDP2 moves for a parameter: dimension 0 is padded to a multiple of the shard count."""
    rows = parameter.shape[0] if parameter.dim() else 1
    per_row = parameter.numel() // rows if rows else 0
    return -(-rows // shard) * shard * per_row


def _sharded_bytes(wrapped: Wrapped, shard: int, world: int, param_bytes: int, micro_batches: int) -> tuple[int, str]:
    """Bytes of one rank and step: all-gather outputs, reduce-scatter inputs and, for HSDP, all-reduced shards."""
    padded = {p: _padded(p, shard) for p in wrapped.base.parameters()}
    training = sum(elements for p, elements in padded.items() if p.requires_grad)
    block_elements, rest = 0, dict(padded)
    for name in wrapped.blocks:
        held = sum(rest.pop(p, 0) for p in wrapped.base.get_submodule(name).parameters())
        block_elements += held * wrapped.calls.get(name, 1)
    root_elements = sum(rest.values())
    gathered = micro_batches * (2 * block_elements + root_elements) * param_bytes
    reduced = training * 4
    if shard == 1:  # FSDP2 calls no collective for a group of one
        return (reduced, f"{training:,} gradients all-reduced x 4 B") if world > 1 else (0, "")
    total = gathered + reduced
    often = " (in all calls)" if wrapped.calls else ""
    formula = (
        (f"{micro_batches} x (" if micro_batches > 1 else "")
        + f"2 x {block_elements:,} block{often} + {root_elements:,} root parameters gathered x {param_bytes} B"
        + (")" if micro_batches > 1 else "")
        + f" + {training:,} gradients scattered x 4 B"
    )
    if world != shard:
        total += reduced // shard
        formula += f" + the shard's gradients all-reduced, {reduced // shard:,} B"
    return total, formula


def make_optimizer(wrapped: Wrapped, spec: RunSpec) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum, whose fused form takes no sharded parameters."""
    parameters = [p for p in wrapped.model.parameters() if p.requires_grad]
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=spec.lr, momentum=0.9)
    return adamw(parameters, spec.lr)


def adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """AdamW, fused unless some parameter is complex."""
    return torch.optim.AdamW(parameters, lr=lr, fused=all(p.is_floating_point() for p in parameters))
