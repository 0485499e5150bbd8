"""What makes a training step cheaper: fused kernels, collective schedules, checkpoint codecs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from costlab.kernels.fused.plan import Plan
    from costlab.kernels.fused.planned import Applied


def apply(model: Any, plan: Plan | str | Path) -> Applied:
    """Put the rewrites of a fusion plan (a `Plan`, or a file that `costlab tune` wrote) into force on a model.

    Call it before `torch.compile` and before `fully_shard`. Raises PlanError for a plan that cannot be used; what is
    not put in, and why, is in the result's `findings` and `record`.
    """
    from costlab.kernels.fused.planned import apply as put_in

    return put_in(model, plan)
