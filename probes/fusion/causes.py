"""Why operators were not fused: the scheduler's reason, the cause a user understands, and what mends it. Torch-free.

A cause is *addressable* when an edit of the model, the data layout or a setting can remove it; the others are
*structural*: a matrix product, a collective or a reduction lies between, and no edit fuses across it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Cause:
    """A user-level cause. `hard` breaks a layer whatever its rate."""

    name: str
    addressable: bool
    text: str
    mend: str
    hard: bool = False


_ALL = (
    Cause(
        "device_mismatch",
        True,
        "the operands live on different devices",
        "keep every operand of the layer on the compute device",
        hard=True,
    ),
    Cause(
        "device_copy",
        True,
        "a tensor is copied to another device and back inside the layer",
        "remove the .cpu()/.to() round trip, or move it outside the compiled region",
        hard=True,
    ),
    Cause(
        "layout_mismatch",
        True,
        "producer and consumer walk the same data in different orders",
        "give both the same memory layout: drop the flip, transpose or strided view between them, or place it "
        "next to a matrix product that takes strides",
    ),
    Cause(
        "layout_copy",
        True,
        "a kernel does nothing but copy a tensor into another layout",
        "produce the layout that the consumer needs, or use an operator that takes strides, instead of "
        ".contiguous()/.reshape() after a transpose",
    ),
    Cause(
        "dtype_copy",
        True,
        "a kernel does nothing but convert the element type",
        "keep one dtype through the layer; store parameters in the compute dtype (FSDP2 MixedPrecisionPolicy)",
    ),
    Cause(
        "data_dependency",
        True,
        "another operation has to run between the two",
        "reorder the operations so that the consumer follows its producer directly",
    ),
    Cause(
        "reduction_shape",
        False,
        "a reduction over one axis is followed by work over another axis, so the whole tensor is needed first",
        "none by editing: it needs an algorithm that reduces online",
    ),
    Cause(
        "iteration_shape",
        True,
        "the two loops run over different shapes (a broadcast, a slice or padding)",
        "compute at the consumer's shape: slice before, not after, and avoid padding in between",
    ),
    Cause(
        "backend_loop_mismatch",
        True,
        "the code generator could not give both one loop nest",
        "write both over the same shape and memory order",
    ),
    Cause(
        "extern_boundary",
        False,
        "one side is a library routine (matrix product, convolution, attention, user Triton kernel)",
        "none by editing: an epilogue kernel or max-autotune templates may take it in",
    ),
    Cause(
        "through_extern",
        False,
        "a matrix product, convolution or attention lies between producer and consumer",
        "none by editing",
    ),
    Cause(
        "library_op",
        False,
        "Inductor calls the library for this operator instead of generating a loop",
        "none by editing, unless the operator can be replaced by elementwise and reduction operators",
    ),
    Cause("collective_boundary", False, "a collective lies between producer and consumer", "none by editing"),
    Cause(
        "mutation",
        True,
        "an in-place write or an alias has to be kept in order",
        "write out of place inside the layer and assign the result once at its end",
    ),
    Cause(
        "rng_fallback",
        True,
        "random numbers are drawn by the library, not inside the kernel",
        "turn off torch._inductor.config.fallback_random",
    ),
    Cause(
        "opaque_op",
        True,
        "a custom operator hides its arithmetic from the compiler",
        "write the operator in PyTorch, or as a Triton kernel through torch.library.triton_op",
    ),
    Cause(
        "heuristic_limit",
        True,
        "a size, memory or register limit of the scheduler stopped the fusion",
        "raise the limit named in the reason (for example torch._inductor.config.max_fusion_size)",
    ),
    Cause("config_off", True, "a setting forbids the fusion", "turn on the option named in the reason"),
    Cause(
        "graph_break",
        True,
        "the layer is cut into several graphs, and tensors travel between them through memory",
        "remove the print, .item(), data-dependent branch or unsupported call at the named line",
        hard=True,
    ),
    Cause("foreach", False, "operations over lists of tensors are grouped among themselves only", "none by editing"),
    Cause(
        "stream_boundary", True, "the two run on different CUDA streams", "keep the layer's arithmetic on one stream"
    ),
    Cause(
        "not_attempted",
        True,
        "the scheduler never tried this pair",
        "report it: usually the two are far apart in a large graph",
    ),
    Cause(
        "uncompiled",
        True,
        "the layer's operators ran one by one, outside any compiled graph",
        "compile the block that contains it (per-block compile with FSDP2)",
        hard=True,
    ),
    Cause(
        "per_parameter_loop",
        True,
        "one small kernel runs per parameter",
        "use a fused or foreach optimizer (fused=True), or torch._foreach_* functions",
    ),
    Cause("other", True, "the scheduler gave a reason that costlab does not know", "read the reason"),
)
CAUSES: dict[str, Cause] = {c.name: c for c in _ALL}
HARD = frozenset(c.name for c in _ALL if c.hard)
STRUCTURAL = frozenset(c.name for c in _ALL if not c.addressable)

# Order matters: the scheduler's texts share words ("template ... reduction", "numel/rnumel mismatch (reduce)").
_RULES: tuple[tuple[str, str], ...] = (
    (r"device mismatch", "device_mismatch"),
    (r"^indexing: .*(broadcast|different numel)", "iteration_shape"),
    (r"^indexing: ", "layout_mismatch"),
    (r"^no shared data due to indexing", "layout_mismatch"),
    (r"^no shared data", "no_shared_data"),
    (r"^backend: ", "backend_loop_mismatch"),
    (r"foreach", "foreach"),
    (r"grouped node|explicit disabled|turned off|not enabled", "config_off"),
    (r"intermediate nodes|create cycle|must go before", "data_dependency"),
    (r"peak memory|exceeds max|too_many_reads|score_fusion|register spilling|too far away", "heuristic_limit"),
    (r"strict sum|Split scan|\(reduce\)|is a reduction", "reduction_shape"),
    (r"buf layouts|indices differ|compatible reshape", "layout_mismatch"),
    (r"mutation|aliasing", "mutation"),
    (
        r"extern|is nop|template|epilogue|prologue|cutlass|EVT|CUTLASS|triton kernel|Pointwise op|ComputedBuffer"
        r"|differs from .* size",
        "extern_boundary",
    ),
    (r"memory deps|tiling|loop order|numel incompatib|rnumel incompatib", "layout_mismatch"),
    (r"numel/rnumel mismatch", "iteration_shape"),
    (r"stream", "stream_boundary"),
)
_FIRST: tuple[tuple[str, str], ...] = (
    (r"numel/rnumel mismatch \(reduce\)", "reduction_shape"),
    (r"numel/rnumel mismatch", "iteration_shape"),
    (r"epilogue fusion is not enabled|prologue fusion turned off", "extern_boundary"),
    (r"invalid loop order and tiling", "layout_mismatch"),
    (r"is a reduction", "reduction_shape"),
)


@lru_cache(maxsize=4096)
def cause_of(reason: str) -> str:
    """The cause behind a scheduler reason (its template or its text); "other" when nothing is known about it."""
    for expression, name in (*_FIRST, *_RULES):
        if re.search(expression, reason):
            return name
    return "other"


def addressable(cause: str) -> bool:
    """Whether a user can remove the cause. Unknown causes count as addressable, so that nothing is excused."""
    known = CAUSES.get(cause)
    return known is None or known.addressable


def text_of(cause: str) -> str:
    """What the cause means, in a sentence fragment."""
    return CAUSES.get(cause, CAUSES["other"]).text


def mend_of(cause: str) -> str:
    """What removes the cause."""
    return CAUSES.get(cause, CAUSES["other"]).mend
