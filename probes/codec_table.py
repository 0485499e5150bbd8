"""`python -m costlab.probes.codec_table REQUEST.json RESULT.json`: the codec table of a file or a model, with torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from costlab.probes.checkpoint_error import sample
from costlab.probes.codec_source import SourceError, read, trained
from costlab.probes.codec_spec import BITS_CLAIMED, ClaimRow, CodecRequest, CodecResult, CodecTableRow, check
from costlab.probes.session import die_with_launcher
from costlab.probes.spec import SpecError
from costlab.probes.tables import write_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def main(argv: list[str]) -> int:
    """Answer one request; what is wrong with its source is in the result's `error`."""
    die_with_launcher()
    request = msgspec.json.decode(Path(argv[1]).read_bytes(), type=CodecRequest)
    try:
        check(request)
        result = measure(request)
    except (SourceError, SpecError) as error:
        result = CodecResult(error=str(error), usage=isinstance(error, SpecError))
    write_bytes(Path(argv[2]), msgspec.json.encode(result))
    return 0


def measure(request: CodecRequest) -> CodecResult:
    """Raise SourceError where there are no tensors to measure."""
    import torch

    from costlab.kernels.codec.policy import TensorClass, classify
    from costlab.kernels.codec.table import codec_table

    device = _device(request.device)
    kind, name, state = _tensors(request, device)
    floats = {n: t for n, t in state.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    exact = sum(t.numel() for n, t in floats.items() if classify(n, tuple(t.shape), t.dtype) is TensorClass.EXACT)
    limit = round(request.limit_mb * 2**20) or (256 << 20 if device.type == "cuda" else 2 << 20)
    held = {n: t.to(device) for n, t in sample(state, limit)}
    rows = codec_table(held, timing=request.timing)
    if not rows:
        raise SourceError(f"{name}: no matrix of fp32, bf16 or fp16 values in it, so nothing that a codec would code")
    return CodecResult(
        source=name,
        kind=kind,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        tensors=len(floats),
        values=sum(t.numel() for t in floats.values()),
        sampled=sum(t.numel() for n, t in held.items() if n in floats and not n.endswith(".step")),
        exact=exact,
        rows=[
            CodecTableRow(
                codec=r.codec, tensor_class=str(r.tensor_class), values=r.values, bits=r.bits, ratio=r.ratio,
                rel_l2=r.rel_l2, max_abs=r.max_abs, flushed=r.flushed, update_error=r.update_error,
                encode_gbps=r.encode_gbs, decode_gbps=r.decode_gbs,
            )
            for r in rows
        ],
        claim=_claim(held, [r for r in rows if r.tensor_class is TensorClass.WEIGHT and r.codec == "fp8 16x16"]),
        notes=_notes(held, kind),
    )  # fmt: skip


def _device(asked: str) -> torch.device:
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise SpecError("--device cuda was asked for, but torch sees no CUDA device")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def _tensors(request: CodecRequest, device: torch.device) -> tuple[str, str, Mapping[str, Any]]:
    """(kind, name, values by flat name)."""
    from costlab.kernels.codec import CheckpointError
    from costlab.kernels.codec.state import flatten

    if request.model:
        model, _, size = request.model.partition(":")
        name = f"{model} {size or 'tiny'} after {request.steps} steps"
        return "model", name, trained(model, size or "tiny", request.steps, device)
    path = Path(request.path)
    kind, values = read(path)
    try:
        return kind, path.name, flatten(values)
    except CheckpointError as error:
        raise SourceError(f"{path}: {error}") from error


def _claim(held: Mapping[str, Tensor], rows: list[Any]) -> ClaimRow:
    """The zeros that FP8 16x16 makes of the weights, and those it would need."""
    from costlab.kernels.codec.codecs import Choice, Codec, dense_codes, encode
    from costlab.kernels.codec.policy import TensorClass, classify
    from costlab.kernels.codec.table import claim

    needed = claim(BITS_CLAIMED)
    zeros = total = 0
    for name, tensor in held.items():
        if classify(name, tuple(tensor.shape), tensor.dtype) is TensorClass.WEIGHT:
            codes = dense_codes(encode(tensor, Choice(Codec.FP8, (16, 16), sparse=False)))
            zeros += int(((codes & 0x7F) == 0).sum())
            total += codes.numel()
    return ClaimRow(
        bits=needed.bits, bitmap_zeros=needed.bitmap_zeros, csr16_zeros=needed.csr16_zeros,
        csr32_zeros=needed.csr32_zeros, least_error=2.0**-needed.bits, zeros=zeros / total if total else None,
        measured_bits=rows[0].bits if rows else None,
    )  # fmt: skip


def _notes(held: Mapping[str, Tensor], kind: str) -> list[str]:
    moments = any(n.endswith(".exp_avg_sq") for n in held)
    notes = []
    if not moments:
        notes.append("no Adam moments in it: the error of the first resumed update cannot be told")
    elif kind != "model":
        notes.append("the first update's gradient is drawn from N(0, v), as no gradient is stored")
    else:
        notes.append("synthetic data; the first update's gradient is drawn from N(0, v)")
    return notes


if __name__ == "__main__":
    sys.exit(main(sys.argv))
