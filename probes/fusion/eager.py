"""What a launch outside any compiled graph is: which layer it counts to, and whether compiling could fuse it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from costlab.probes.records import FusionStatus
from costlab.probes.trace.model import Launch

_LOSS = re.compile(r"log_softmax|nll_loss|cross_entropy|mse_loss|bce|kl_div|smooth_l1|huber")
_FSDP = re.compile(
    r"fsdp::|_foreach_copy_|all_gather_copy|split_with_sizes_copy|chunk_cat|_allgather_base|reduce_scatter"
)
_ALONE = re.compile(r"embedding|index_select|copy_|clone|fill_|zero_|_to_copy|::to$|sort|topk|nonzero|foreach|fused")
_FUSED_STEP = re.compile(r"_fused_|fusedadam|fused_sgd|FusedAdam|FusedSgd", re.IGNORECASE)
_LIST_STEP = re.compile(r"foreach|multi_tensor", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an eager launch goes in the span tree; `fusible` is elementwise or reducing work."""

    layer: str
    kind: str  # eager | collective | copy | foreach | extern
    fusible: bool


def place(launch: Launch) -> Place:
    """Layer, kernel kind and fusibility of a launch that no compiled graph made.

    Work that no module owns goes to `optimizer`, `fsdp` (copies and collectives of sharding) or `loss`.
    """
    text = f"{launch.op} {launch.name}"
    if launch.category == "communication":
        return Place("fsdp", "collective", False)
    if launch.phase == "optimizer":
        return Place("optimizer", "foreach" if _LIST_STEP.search(text) else "eager", False)
    if _FSDP.search(text):
        return Place("fsdp", "copy", False)
    if launch.category == "copy":
        return Place(launch.layer, "copy", False)
    layer = launch.layer or ("loss" if _LOSS.search(text) else "")
    if launch.category == "matmul":
        return Place(layer, "extern", False)
    fusible = launch.category == "memory" and not _ALONE.search(launch.op or launch.name)
    return Place(layer, "eager", fusible and launch.phase in ("forward", "backward"))


def optimizer_verdict(names: set[str]) -> tuple[FusionStatus, str]:
    """(fusion status, cause) of an optimizer step from its kernels' and operators' names."""
    if any(_FUSED_STEP.search(n) for n in names):
        return "complete", ""
    if any(_LIST_STEP.search(n) for n in names):
        return "partial", "foreach"
    return "broken", "per_parameter_loop"
