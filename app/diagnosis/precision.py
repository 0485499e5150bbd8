"""Arithmetic wider than the hardware needs."""

from __future__ import annotations

from costlab.app.analysis.views import Finding
from costlab.app.diagnosis.rule import Context
from costlab.app.figures import ms


def full_precision(context: Context) -> list[Finding]:
    """The run computes in fp32 on a GPU."""
    if context.report.run.dtype != "fp32" or not context.on_gpu:
        return []
    matrix, memory = context.parts.get("matrix math", 0.0), context.parts.get("memory-bound kernels", 0.0)
    saved = (matrix + memory) / 2
    if not saved:
        return []
    return [
        context.finding(
            "low-precision",
            "The model computes in fp32; bf16 halves its bytes and runs on the tensor cores",
            [f"matrix math: {context.of_step(matrix)}", f"memory-bound kernels: {ms(memory)} a step"],
            "Compute in bf16 and keep fp32 master weights (--dtype bf16; in code MixedPrecisionPolicy(param_dtype="
            "torch.bfloat16, reduce_dtype=torch.float32)). Compare the loss curves.",
            saves_ms=saved,
            how="half the bytes, and at least twice the matrix rate of TF32",
            proves="--dtype bf16",
        )
    ]
