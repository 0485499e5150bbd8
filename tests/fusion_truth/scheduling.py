"""Triton's fusion decisions on a machine without a GPU: Inductor schedules CPU tensors for Triton, kernels do nothing.

Only decisions are real; results of the compiled code are not. On a machine with a GPU nothing is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch


class IdleKernel:
    """Stands for a compiled Triton kernel."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def run(self, *_: object, **__: object) -> None:
        """Launch nothing."""


def device() -> str:
    """Where the truth set runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def triton_scheduling() -> Iterator[None]:
    """Schedule for Triton: as it is on a GPU, with idle kernels elsewhere."""
    if torch.cuda.is_available():
        yield
        return
    from torch._inductor import async_compile, config
    from torch.utils import _triton as triton

    with (
        config.patch(cpu_backend="triton"),
        mock.patch.object(async_compile.AsyncCompile, "triton", IdleKernel),
        mock.patch.object(triton, "triton_hash_with_backend", lambda: "idle"),
    ):
        yield
