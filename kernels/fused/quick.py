"""Launches of Triton kernels without Triton's binding and specialisation of arguments, which cost 15 to 50 us each.

The first launch with given sizes, dtypes and constants goes through Triton, and the kernel that it compiled is kept;
launches that differ in nothing but addresses (all multiples of 16, as Triton specialises on that) call it directly.
Only eager launches on the current device come here; see `launch.wrap_triton`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

_MOST = 4096  # kept kernels: a program with ever new sizes must not grow for ever


class _Kept(NamedTuple):
    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_kept: dict[tuple[Any, ...], _Kept] = {}


def _runtime() -> Any:
    """Triton's run-time settings, None without Triton."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.runtime


_settings = _runtime()


def _hooked() -> bool:
    """Whether a profiler wants to see launches; then they go through Triton."""
    for hook in (_settings.launch_enter_hook, _settings.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


class Quick:
    """A Triton kernel, called in the same way: `Quick(kernel)[(programs,)](*args, num_warps=4, BLOCK=64)`.

    Its pointers come first among the parameters, named `*_ptr`.
    """

    __slots__ = ("kernel", "names", "pointers")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names = list(kernel.arg_names)
        self.pointers = sum(name.endswith("_ptr") for name in self.names)

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self.launch, grid[0])

    def launch(self, programs: int, *args: Any, num_warps: int, **constants: Any) -> None:
        """`kernel[(programs,)](*args, num_warps=num_warps, **constants)`."""
        tensors, scalars = args[: self.pointers], args[self.pointers :]
        device = tensors[0].get_device()
        addresses = [t.data_ptr() for t in tensors]
        merged = 0
        for address in addresses:
            merged |= address
        key = (id(self), device, num_warps, *[t.dtype for t in tensors], *scalars, *constants.values())
        kept = None if merged & 15 else _kept.get(key)
        if kept is None or _hooked():
            compiled = self.kernel[(programs,)](*args, num_warps=num_warps, **constants)
            if not merged & 15:
                _keep(key, compiled, self.names[len(args) :], constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        kept.run(
            programs, 1, 1, stream, kept.function, kept.metadata, None, None, None,
            *addresses, *scalars, *kept.constants,
        )  # fmt: skip


def _keep(key: tuple[Any, ...], compiled: Any, names: list[str], constants: dict[str, Any]) -> None:
    """Keep a compiled kernel if this version of Triton has what the direct call needs."""
    run, function = getattr(compiled, "run", None), getattr(compiled, "function", None)
    metadata = getattr(compiled, "packed_metadata", None)
    if run is None or function is None or metadata is None or set(names) != set(constants):
        return
    if len(_kept) >= _MOST:
        _kept.clear()
    _kept[key] = _Kept(run, function, metadata, tuple(constants[name] for name in names))
