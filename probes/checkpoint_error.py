"""What a lossy checkpoint does to a state: whether values came back within their bound, and the codecs' error table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costlab.probes import checkpoint_state as states
from costlab.probes.records import CheckpointCodecRow

if TYPE_CHECKING:
    from torch import Tensor

    from costlab.kernels.codec.codecs import Choice
    from costlab.kernels.codec.policy import Policy

SAMPLE_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}  # of one class of tensors
LEAST_NORMAL = 2.0**-126
PIECE_VALUES = 8 << 20
ROWS = 128  # a multiple of every block's height


def within_bound(saved: Tensor, restored: Tensor, choice: Choice, bound: float) -> bool:
    """Whether every value lies within `bound`, in the unit of its codec (see `codecs.error_bound`), of what was saved.

    `saved` is the local tensor that was coded, so that its blocks are those of the file. Rounding to the tensor's own
    dtype comes on top. Values that are not finite, and all of a lossless codec, must be the same bits.
    """
    from costlab.kernels.codec.codecs import LOSSLESS

    if choice.codec in LOSSLESS:
        return states.identical(saved, restored)
    if saved.dtype != restored.dtype or saved.shape != restored.shape:
        return False
    pieces = zip(_pieces(saved, choice), _pieces(restored.to(saved.device), choice), strict=True)
    return all(_within(a, b, choice, bound) for a, b in pieces)


def _pieces(tensor: Tensor, choice: Choice) -> Iterator[Tensor]:
    """A large matrix in runs of whole rows of blocks, so that comparing needs little memory; all else as it is."""
    from costlab.kernels.codec.codecs import PER_TENSOR, RAW_BLOCKS

    last = tensor.shape[-1] if tensor.dim() >= 2 else 0
    rows = tensor.numel() // last if last else 0
    step = max(PIECE_VALUES // max(last, 1) // ROWS * ROWS, ROWS)
    if rows <= 2 * step or (choice.codec in RAW_BLOCKS and choice.block == PER_TENSOR):
        yield tensor
        return
    matrix = tensor.reshape(rows, last)
    starts = list(range(0, rows - step, step))  # the last run takes what is left, never less than a block
    for start, end in zip(starts, [*starts[1:], rows], strict=True):
        yield matrix[start:end]


def _within(saved: Tensor, restored: Tensor, choice: Choice, bound: float) -> bool:
    import torch

    finite = torch.isfinite(saved) if saved.is_floating_point() else torch.ones_like(saved, dtype=torch.bool)
    if not states.identical(saved[~finite], restored[~finite]):
        return False
    exact = torch.where(finite, saved, 0).double()
    back = torch.where(finite, restored, 0).double()
    allowed = bound * _magnitude(exact, choice)
    if saved.is_floating_point():
        limits = torch.finfo(saved.dtype)
        allowed += limits.eps * exact.abs().clamp_min(limits.smallest_normal)
    return bool(((back - exact).abs() <= allowed).all())


def _magnitude(exact: Tensor, choice: Choice) -> Tensor:
    """What the codec's bound is relative to, for each value; fp64, shaped as `exact`."""
    from costlab.kernels.codec.blocks import from_blocks, to_blocks
    from costlab.kernels.codec.codecs import RAW_BLOCKS, Codec, block_grid

    size = exact.abs()
    if choice.codec is Codec.LOG8:
        return size.clamp_min(LEAST_NORMAL)
    if choice.codec not in RAW_BLOCKS:
        return size
    grid = block_grid(tuple(exact.shape), choice.block)
    tiles = to_blocks(size.reshape(-1), grid)
    return from_blocks(tiles.amax(dim=(1, 3), keepdim=True).expand_as(tiles), grid).view(exact.shape)


@dataclass(frozen=True)
class CodecErrors:
    """Rows of the error table, and the update error of the whole policy (worst parameter) where there are moments."""

    rows: list[CheckpointCodecRow]
    update_error: float | None
    worst: str = ""


def codec_errors(state: Mapping[str, Any], policy: Policy, rank: int, mode: str, timing: bool = True) -> CodecErrors:
    """Code and decode a sample of a flat state by `policy`: values by name, DTensors by their local shard."""
    from costlab.kernels.codec.codecs import decode, encode
    from costlab.kernels.codec.gate import first_update_error
    from costlab.kernels.codec.policy import classify
    from costlab.kernels.codec.table import CODED, codec_table, paired_moments

    held = dict(sample(state))
    adam = _adam(state)
    choices = {n: policy.choose(n, tuple(t.shape), t.dtype) for n, t in held.items()}
    rows = []
    for kind in dict.fromkeys(classify(n, tuple(t.shape), t.dtype) for n, t in held.items()):
        choice = policy.choices.get(kind)
        if choice is not None and kind in CODED:
            rows += codec_table(held, (choice,), adam, timing, [kind])
    restored = {n: decode(encode(t, choices[n])) for n, t in held.items() if n.endswith(("exp_avg", "exp_avg_sq"))}
    error = first_update_error(paired_moments(held, restored), adam)
    table = [
        CheckpointCodecRow(
            rank=rank, mode=mode, codec=r.codec, tensor_class=str(r.tensor_class), values=r.values, bits=r.bits,
            ratio=r.ratio, rel_l2=r.rel_l2, max_abs=r.max_abs, flushed=r.flushed, update_error=r.update_error,
            encode_gbps=r.encode_gbs, decode_gbps=r.decode_gbs,
        )
        for r in rows
    ]  # fmt: skip
    return CodecErrors(table, error.worst if error else None, error.worst_name if error else "")


def sample(state: Mapping[str, Any], limit: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Leading rows of every tensor, `limit` or SAMPLE_BYTES of a class; steps too.

    Half of that is for the largest tensor, whose coding is timed, the rest for all in equal shares. Both moments of a
    parameter are cut alike. At least 16 rows are taken, a block's height.
    """
    import torch

    from costlab.kernels.codec.policy import TensorClass, classify

    tensors = {name: states.local(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    kinds = {n: classify(n, tuple(state[n].shape), t.dtype) for n, t in tensors.items() if not n.endswith(".step")}
    counts = Counter(kinds.values())
    largest = {kind: max((n for n in kinds if kinds[n] is kind), key=lambda n: tensors[n].nbytes) for kind in counts}
    for name, tensor in tensors.items():
        kind = kinds.get(name)
        if kind is None:
            yield name, tensor
        elif kind is not TensorClass.EXACT and tensor.numel():
            half = (SAMPLE_BYTES.get(tensor.device.type, SAMPLE_BYTES["cpu"]) if limit is None else limit) // 2
            share = half // counts[kind] + (half if largest[kind] == name else 0)
            row = tensor[:1].numel() * tensor.element_size()
            yield name, tensor[: max(share // row // 16 * 16, 16)]


def _adam(state: Mapping[str, Any]) -> Any:
    """The optimizer's constants from its first parameter group; the defaults where it has none."""
    from costlab.kernels.codec.gate import Adam

    find: Callable[[str], Any] = lambda key: next((v for n, v in state.items() if n.endswith(f".{key}")), None)  # noqa: E731
    betas, eps = find("betas"), find("eps")
    if isinstance(betas, list | tuple) and len(betas) == 2 and isinstance(eps, int | float):
        return Adam(float(betas[0]), float(betas[1]), float(eps))
    return Adam()
