"""The tensors that `costlab codec` measures: of a file, a folder, or a model trained here. Runs no code of theirs.

Pickles are the danger: torch files are loaded with `weights_only`, and a DCP folder's metadata by an unpickler that
knows DCP's own classes and nothing else; values of a DCP folder that aren't tensors are left out, for they are pickles.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costlab.probes.checkpoint_attempt import words

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_DCP = "torch.distributed.checkpoint."
_KNOWN = {
    f"{_DCP}metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "dict", "list", "tuple"},
}  # fmt: skip


class SourceError(Exception):
    """The tensors cannot be had; the message says what, where and what to do."""


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """(kind, values by name); tensors are on the CPU, mapped from the file where its format allows it."""
    from costlab.kernels.codec import CheckpointError

    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path)
        what = "neither a file nor a folder" if path.exists() else "no such file or folder"
        raise SourceError(f"{path}: {what}")
    except CheckpointError as error:
        raise SourceError(str(error)) from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from error


def _folder(path: Path) -> tuple[str, dict[str, Any]]:
    from costlab.kernels.codec import latest
    from costlab.kernels.codec.manifest import NAME

    if (path / NAME).is_file():
        return "costlab", _checkpoint(path)
    if (path / ".metadata").is_file():
        return "DCP", _dcp(path)
    found = latest(path)
    if found is None:
        raise SourceError(f"{path}: neither a costlab checkpoint nor a DCP folder (no .metadata in it)")
    return "costlab", _checkpoint(found)


def _checkpoint(path: Path) -> dict[str, Any]:
    from costlab.kernels.codec import Checkpoint
    from costlab.kernels.codec.interchange import tensor_names

    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.tensor(name) for name in tensor_names(checkpoint)}


def _file(path: Path) -> tuple[str, dict[str, Any]]:
    from costlab.kernels.codec import Container
    from costlab.kernels.codec.layout import MAGIC
    from costlab.kernels.codec.safetensors_io import read_safetensors

    with path.open("rb") as source:
        first = source.read(len(MAGIC))
    if first == MAGIC:
        with Container.open(path) as container:
            return "costlab", {n: container.tensor(n) for n, e in container.entries.items() if e.kind.name == "TENSOR"}
    if path.suffix == ".safetensors":
        return "safetensors", dict(read_safetensors(path))
    if path.suffix in TORCH_ENDINGS:
        return "torch", _torch(path)
    endings = ", ".join((".safetensors", *TORCH_ENDINGS))
    raise SourceError(f"{path}: neither a costlab container nor a file named {endings}")


def _torch(path: Path) -> dict[str, Any]:
    """A torch file, only if it loads with `weights_only`: else it could run code."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # what `weights_only` refuses
        raise SourceError(
            f"{path}: holds more than tensors and plain values, and loading it could run code: refused. "
            "Save its state_dict with torch.save, or as safetensors"
        ) from error
    except Exception as error:  # a damaged pickle ends in any class
        raise SourceError(f"{path}: not a readable torch file ({words(error)[:160]})") from error
    if not isinstance(found, Mapping):
        raise SourceError(f"{path}: holds a {type(found).__name__}, not a dict of tensors")
    return dict(found)


class _Metadata(pickle.Unpickler):
    """Reads DCP's metadata: its own dataclasses, torch's dtypes and sizes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The named class, if it is one that DCP's metadata is made of."""
        import torch

        if module.startswith("pathlib") and name.startswith(("PosixPath", "PurePosixPath", "Path")):
            return getattr(__import__("pathlib"), name)
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, torch.dtype | torch.layout) or found in (torch.Size, torch.device):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into DCP metadata")


def _dcp(path: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
            with (path / ".metadata").open("rb") as source:
                found = _Metadata(source).load()
            if not isinstance(found, Metadata):
                raise pickle.UnpicklingError("no metadata of DCP")
            found.storage_meta = StorageMeta(load_id=self.load_id)
            return found

    reader = Reader(str(path))
    try:
        items = reader.read_metadata().state_dict_metadata
        tensors = {n: i for n, i in items.items() if isinstance(i, TensorStorageMetadata)}
        claimed = sum(i.size.numel() * i.properties.dtype.itemsize for i in tensors.values())
        held = sum(f.stat().st_size for f in path.iterdir() if f.is_file())
        if claimed > held:
            raise ValueError(f"its tensors would have {claimed} bytes, its files have {held}")
        state: dict[str, Any] = {n: torch.empty(i.size, dtype=i.properties.dtype) for n, i in tensors.items()}
        load(state, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # a damaged pickle ends in any class
        raise SourceError(f"{path}: not a readable DCP folder ({words(error)[:200]})") from error
    return state


def trained(model: str, size: str, steps: int, device: torch.device) -> dict[str, Tensor]:
    """Weights and Adam's state of a built-in model after `steps` training steps, by names as checkpoints have them."""
    import torch

    from costlab.probes.workloads.base import WorkloadContext
    from costlab.probes.workloads.batches import to_device
    from costlab.probes.workloads.loader import load

    torch.manual_seed(0)
    workload = load(model, WorkloadContext(device, torch.float32, size, 0, 0, 0, 0, 1))
    workload.model.to(device).train()
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=3e-4)
    for step in range(steps):
        workload.loss(workload.model, to_device(workload.batch(step), device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Tensor] = {}
    for name, parameter in workload.model.named_parameters():
        found[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optim.state.{name}.{key}"] = value
    return found
