"""A stand-in for the pynvml module: two GPUs of one kind, whatever a test leaves out is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NvmlError(Exception):
    """As pynvml.NVMLError."""


class FakeNvml:
    """Answers the calls that costlab makes; `refuse` names those it does not support."""

    def __init__(self, count: int = 2, refuse: tuple[str, ...] = ()) -> None:
        self.count = count
        self.refuse = refuse
        self.energy_mj = [1_000_000 * (i + 1) for i in range(count)]
        self.closed = False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "refuse"):
            return self._refused
        return object.__getattribute__(self, name)

    def _refused(self, *_: object) -> None:
        raise NvmlError("Not Supported")

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}aa"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for index in range(self.count):
            if self.nvmlDeviceGetUUID(index) == uuid:
                return index
        raise NvmlError("Not Found")

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"NVIDIA Test {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=(handle + 1) << 34)

    def nvmlDeviceGetCudaComputeCapability(self, _: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetEnforcedPowerLimit(self, _: int) -> int:
        return 700_000

    def nvmlDeviceGetCurrPcieLinkGeneration(self, _: int) -> int:
        return 1

    def nvmlDeviceGetCurrPcieLinkWidth(self, _: int) -> int:
        return 16

    def nvmlDeviceGetMaxPcieLinkGeneration(self, _: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, _: int) -> int:
        return 16

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:1{handle}:00.0")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self.energy_mj[handle]
