"""Checkpoint codecs, the mapped checkpoint file and the staging pipeline.

In a training loop:

    from costlab.kernels.codec import AsyncCheckpointer, Checkpoint, latest

    checkpointer = AsyncCheckpointer("runs/a", "exact")       # or "lossless", "fp8", "int8", "delta"
    checkpointer.attach(optimizer)                            # optimizer.step() waits for staging only
    if (found := latest("runs/a")) is not None:
        with Checkpoint.open(found) as checkpoint:            # any world size, whatever wrote it
            checkpoint.load({"model": model, "optim": optimizer})
    ...
    checkpointer.save(step, {"model": model, "optim": optimizer, "step": step})
    ...
    checkpointer.close()

| module | what |
|---|---|
| codecs, policy, gate, table | one tensor's codecs; which tensor gets which; the acceptance test; the measured table |
| fp8, integer, log8, sparse, lossless | each codec's definition; `triton_blocks`, `triton_tiles` have the kernels |
| layout, writing, container | the file: bytes, writer, reader |
| manifest, checkpoint | the directory of all ranks' files; loading with resharding |
| device_load, htod, device_crc | from file to GPU, checked there |
| pipeline, plan, snapshot, stage, slabs, finish, commit, replica | asynchronous saving |
| interchange, safetensors_io, gds | other formats; GPUDirect Storage |

What a file or a disk does raises `CheckpointError` (of which `CheckpointRefused` is one) and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costlab.kernels.codec.checkpoint import Checkpoint
    from costlab.kernels.codec.codecs import Choice, Codec, decode, encode
    from costlab.kernels.codec.container import Container
    from costlab.kernels.codec.errors import CheckpointError, CheckpointRefused
    from costlab.kernels.codec.interchange import (
        export_dcp,
        export_safetensors,
        import_dcp,
        import_safetensors,
        save_plain,
    )
    from costlab.kernels.codec.manifest import latest
    from costlab.kernels.codec.pipeline import AsyncCheckpointer, SaveHandle, SaveReport
    from costlab.kernels.codec.policy import PRESETS, Policy, TensorClass, preset
    from costlab.kernels.codec.replica import Replica
    from costlab.kernels.codec.table import claim, codec_table
    from costlab.kernels.codec.writing import write_container

_HOME = {
    "checkpoint": ("Checkpoint",),
    "codecs": ("Choice", "Codec", "decode", "encode"),
    "container": ("Container",),
    "errors": ("CheckpointError", "CheckpointRefused"),
    "interchange": ("export_dcp", "export_safetensors", "import_dcp", "import_safetensors", "save_plain"),
    "manifest": ("latest",),
    "pipeline": ("AsyncCheckpointer", "SaveHandle", "SaveReport"),
    "policy": ("PRESETS", "Policy", "TensorClass", "preset"),
    "replica": ("Replica",),
    "table": ("claim", "codec_table"),
    "writing": ("write_container",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "PRESETS", "AsyncCheckpointer", "Checkpoint", "CheckpointError", "CheckpointRefused", "Choice", "Codec",
    "Container", "Policy", "Replica", "SaveHandle", "SaveReport", "TensorClass", "claim", "codec_table", "decode",
    "encode", "export_dcp", "export_safetensors", "import_dcp", "import_safetensors", "latest", "preset", "save_plain",
    "write_container",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name's module when it is first used, so that importing the package costs nothing."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
