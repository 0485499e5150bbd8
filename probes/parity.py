"""Gradients of one training step, tensor by tensor, so that two runs can be compared where their losses still agree.

A separate forward and backward pass with the step's own batch, after the timed steps and without an optimizer step:
nothing that is timed or profiled is touched. Norms are of the whole tensor, shards added up over the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from costlab.probes.records import GradientRow

if TYPE_CHECKING:
    from costlab.probes.steps import Trainer


def gradient_rows(trainer: Trainer, rank: int) -> list[GradientRow]:
    """L2 norm of every parameter's gradient for the trainer's next batch; every rank must call it.

    The gradients are dropped again. A parameter without a gradient has no row.
    """
    from costlab.probes.fusion.fqn import normalise
    from costlab.probes.workloads.batches import to_device

    trainer.optimizer.zero_grad(set_to_none=True)
    batch = to_device(trainer.workload.batch(trainer.index), trainer.device)
    with trainer.wrapped.forward_context():
        loss = trainer.workload.loss(trainer.wrapped.model, batch)
    loss.backward()
    rows = []
    for name, parameter in trainer.wrapped.base.named_parameters():
        if parameter.grad is not None:
            norm = whole_norm(parameter.grad)
            rows.append(GradientRow(rank=rank, step=trainer.index, tensor=normalise(name), norm=norm))
    trainer.optimizer.zero_grad(set_to_none=True)
    return rows


def whole_norm(gradient: Tensor) -> float:
    """L2 norm of a gradient, in fp32 at least; of a sharded one over all shards, which is a collective call."""
    from torch.distributed.tensor import DTensor

    norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
