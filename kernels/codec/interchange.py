"""Convert between checkpoint directories, safetensors files and torch.distributed.checkpoint (DCP) directories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.codecs import Codec, dense_codes
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import readable
from costlab.kernels.codec.layout import Kind
from costlab.kernels.codec.manifest import RankFile, directory_name, new_manifest, rank_name, write_manifest
from costlab.kernels.codec.policy import Policy
from costlab.kernels.codec.safetensors_io import read_safetensors, write_safetensors
from costlab.kernels.codec.state import Leaf
from costlab.kernels.codec.writing import write_container


def save_plain(
    root: Path | str, values: Mapping[str, Leaf], step: int, policy: Policy | None = None, run: str = "00000000"
) -> Path:
    """Write flat values as a one-rank checkpoint, synchronously; returns its directory. Deltas need the pipeline."""
    policy = policy or Policy("exact")
    if policy.keyframe_every is not None:
        raise CheckpointError("the delta preset needs the pipeline, which holds the last save's values")
    directory = Path(root) / directory_name(step, run)
    with readable(f"creating {directory}"):
        directory.mkdir(parents=True)
    written = write_container(directory / rank_name(0), values, step, policy.choose)
    file = RankFile(rank_name(0), written.size, written.digest.hex())
    with readable(f"writing the manifest of {directory}"):
        write_manifest(directory, new_manifest(step, policy.name, [file], None, None))
    return directory


def tensor_names(checkpoint: Checkpoint) -> list[str]:
    """Names of the tensors (not numbers, text or bytes)."""
    return [name for name in checkpoint.names if checkpoint.places[name][0][1].kind is Kind.TENSOR]


def export_safetensors(
    checkpoint: Checkpoint, path: Path | str, names: Iterable[str] | None = None, keep_fp8: bool = False
) -> None:
    """Write tensors (default: all) into one safetensors file, shards put together.

    With `keep_fp8` a tensor stored whole as FP8 blocks is written as its codes (`F8_E4M3`) and
    `<name>_scale_inv` (fp32, a value a block), which inference engines read for 128x128 blocks; all else is
    decoded to its original dtype.
    """
    out: dict[str, torch.Tensor] = {}
    for name in tensor_names(checkpoint) if names is None else names:
        coded = _fp8_parts(checkpoint, name) if keep_fp8 else None
        out |= coded if coded else {name: checkpoint.tensor(name)}
    write_safetensors(path, out, {"format": "pt", "step": str(checkpoint.manifest.step)})


def _fp8_parts(checkpoint: Checkpoint, name: str) -> dict[str, torch.Tensor] | None:
    """Codes and scale grid of a matrix in one file without raw blocks; None for all else."""
    places = checkpoint.places[name]
    rank, entry = places[0]
    height, width = entry.choice.block
    whole = len(places) == 1 and entry.choice.codec is Codec.FP8 and not entry.patch_count and height > 0
    if not whole or len(entry.shape) != 2 or entry.shape[0] < height or entry.shape[1] < width:
        return None
    found = checkpoint.files[rank].encoded(name)
    grid = (-(-entry.shape[0] // height), -(-entry.shape[1] // width))
    codes = dense_codes(found).view(torch.float8_e4m3fn).view(entry.shape)
    return {name: codes, f"{name}_scale_inv": found.scales.view(grid)}


def import_safetensors(path: Path | str, root: Path | str, step: int = 0, policy: Policy | None = None) -> Path:
    """Write a safetensors file's tensors as a checkpoint; returns its directory."""
    return save_plain(root, read_safetensors(path), step, policy)


def export_dcp(checkpoint: Checkpoint, directory: Path | str) -> None:
    """Write all values as a DCP directory, in this process alone."""
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, Leaf] = {name: checkpoint.value(name) for name in checkpoint.names}
    save(state, checkpoint_id=str(directory), no_dist=True)


def import_dcp(directory: Path | str, root: Path | str, step: int = 0, policy: Policy | None = None) -> Path:
    """Write a DCP directory's tensors and plain values as a checkpoint; returns its directory.

    DCP stores its metadata and values that aren't tensors with pickle: import only what you trust.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(str(directory))
    try:
        metadata = reader.read_metadata()
        state: dict[str, Leaf] = {}
        for name, item in metadata.state_dict_metadata.items():
            state[name] = None
            if isinstance(item, TensorStorageMetadata):
                state[name] = torch.empty(item.size, dtype=item.properties.dtype)
        load(state, storage_reader=reader, no_dist=True)
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise CheckpointError(f"{directory}: not a readable DCP checkpoint: {error}") from error
    return save_plain(root, state, step, policy)
