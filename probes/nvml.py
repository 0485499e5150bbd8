"""NVML in which every refusal is a `None` with its reason (no library, driver, permission or support). Torch-free."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any


class Nvml:
    """One NVML session; closed by `close` or at process end.

    `reason` is "" when the library answered, else why there is none. `refused` maps a call's name to NVML's words.
    """

    def __init__(self, module: ModuleType | None = None) -> None:
        self.reason = ""
        self.refused: dict[str, str] = {}
        self._module: Any = None
        try:
            library: Any = module or importlib.import_module("pynvml")
            library.nvmlInit()
            self._module = library
        except Exception as error:  # pynvml raises its own types, OSError and AttributeError for damaged drivers
            self.reason = f"NVML: {_words(error)}"

    @property
    def available(self) -> bool:
        """Whether the library and a driver answered."""
        return self._module is not None

    def call(self, name: str, *args: Any) -> Any | None:
        """Result of the NVML function, or None; the refusal is kept in `refused`."""
        if self._module is None:
            return None
        try:
            return getattr(self._module, name)(*args)
        except Exception as error:  # every NVMLError subclass, and functions that this driver lacks
            self.refused[name] = _words(error)
            return None

    def text(self, name: str, *args: Any) -> str:
        """Like `call` for strings; bytes of older bindings are decoded; "" for none."""
        value = self.call(name, *args)
        if value is None:
            return ""
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)

    def handles(self) -> list[tuple[int, Any]]:
        """(NVML index, handle) of every device this process may see, in NVML's order."""
        count = self.call("nvmlDeviceGetCount") or 0
        found = [(i, self.call("nvmlDeviceGetHandleByIndex", i)) for i in range(count)]
        return [(i, handle) for i, handle in found if handle is not None]

    def handle_by_uuid(self, uuid: str) -> Any | None:
        """Handle of the device with this UUID ("GPU-..." or without the prefix)."""
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return self.call("nvmlDeviceGetHandleByUUID", name)

    def close(self) -> None:
        """End the session."""
        self.call("nvmlShutdown")
        self._module = None


def visible(handles: list[tuple[int, Any]], nvml: Nvml, setting: str | None = None) -> list[tuple[int, Any]]:
    """The handles that CUDA_VISIBLE_DEVICES leaves, in its order; all of them where it cannot be read as a list.

    Indices count in NVML's order, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID or with GPUs of one kind.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES") if setting is None else setting
    if value is None:
        return handles
    chosen: list[tuple[int, Any]] = []
    uuids = {nvml.text("nvmlDeviceGetUUID", handle): (index, handle) for index, handle in handles}
    for entry in filter(None, (part.strip() for part in value.split(","))):
        if entry.isdigit() and int(entry) < len(handles):
            chosen.append(handles[int(entry)])
        elif matches := [pair for uuid, pair in uuids.items() if uuid and uuid.startswith(entry)]:
            chosen.append(matches[0])
        else:
            break  # CUDA ignores everything from the first invalid entry on
    return chosen


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
