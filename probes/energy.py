"""Energy by phase from counters, never from sampled power: NVML's total energy for a GPU, RAPL packages for a CPU.

A counter is read before and after; where there is none, it cannot be read or it did not move, there is no row and
a reason instead. RAPL counts whole CPU packages, other processes included, so one rank per machine reports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costlab.probes.nvml import Nvml, visible
from costlab.probes.records import PowerRow

POWERCAP = Path("/sys/class/powercap")
RAPL_MAX_W = 1000.0  # no CPU package draws more; a longer phase could wrap the counter twice unseen


@dataclass(frozen=True)
class Package:
    """One RAPL package domain: its counter (microjoules) and where that wraps."""

    name: str
    counter: Path
    wraps_uj: int

    def read(self) -> int:
        """Microjoules so far; OSError where the counter may not be read."""
        return int(self.counter.read_text(encoding="ascii"))

    def spent_uj(self, before: int, after: int) -> int:
        """Microjoules between two readings at most one wrap apart."""
        return after - before if after >= before else after + self.wraps_uj - before


@dataclass
class Reading:
    """What one phase yielded: a row, or the reason why there is none. `steps` may be corrected within the phase."""

    phase: str
    steps: int
    row: PowerRow | None = None
    reason: str = ""


@dataclass(frozen=True)
class Counter:
    """A source of energy: `read` gives an opaque reading, `joules` what two readings span."""

    source: str
    read: Callable[[], Any]
    joules: Callable[[Any, Any], float]
    longest_s: float = float("inf")


def rapl_packages(root: Path = POWERCAP) -> tuple[list[Package], str]:
    """The readable CPU packages, and why there are none."""
    found: list[Package] = []
    denied = ""
    for zone in sorted(root.glob("intel-rapl:*")):
        if zone.name.count(":") != 1:  # subdomains (core, dram) are parts of a package
            continue
        try:
            name = (zone / "name").read_text(encoding="ascii").strip()
            if not name.startswith("package"):
                continue
            package = Package(name, zone / "energy_uj", int((zone / "max_energy_range_uj").read_text(encoding="ascii")))
            package.read()
            found.append(package)
        except PermissionError:
            denied = "the CPU energy counter (RAPL) is readable by root only"
        except (OSError, ValueError) as error:
            denied = f"the CPU energy counter (RAPL) cannot be read: {error.__class__.__name__}"
    if found:
        return found, ""
    return [], denied or "this machine has no CPU energy counter (RAPL)"


def cpu_counter(root: Path = POWERCAP, local_rank: int = 0) -> tuple[Counter | None, str]:
    """All CPU packages of the machine, for its first rank only."""
    packages, reason = rapl_packages(root)
    if not packages:
        return None, reason
    if local_rank != 0:
        return None, "the CPU energy counter is the machine's: its first rank reports it"

    def joules(before: list[int], after: list[int]) -> float:
        return sum(p.spent_uj(b, a) for p, b, a in zip(packages, before, after, strict=True)) / 1e6

    names = ", ".join(p.name for p in packages)
    longest = min(p.wraps_uj for p in packages) / 1e6 / RAPL_MAX_W
    source = f"RAPL {names} (the whole machine, other processes included)"
    return Counter(source, lambda: [p.read() for p in packages], joules, longest), ""


def gpu_counter(index: int, nvml: Nvml | None = None, uuid: str = "") -> tuple[Counter | None, str]:
    """NVML's total energy of the CUDA device `index` (found by its UUID where torch can tell)."""
    session = nvml or Nvml()
    if not session.available:
        return None, session.reason
    identity = uuid or _cuda_uuid(index)
    handle = session.handle_by_uuid(identity) if identity else None
    if handle is None:
        devices = visible(session.handles(), session)
        handle = devices[index][1] if index < len(devices) else None
    if handle is None:
        return None, f"NVML does not show GPU {index}"
    if session.call("nvmlDeviceGetTotalEnergyConsumption", handle) is None:
        words = session.refused.get("nvmlDeviceGetTotalEnergyConsumption", "no answer")
        return None, f"GPU {index} has no energy counter: {words}"

    def read() -> int:
        value = session.call("nvmlDeviceGetTotalEnergyConsumption", handle)
        if value is None:
            raise OSError(session.refused.get("nvmlDeviceGetTotalEnergyConsumption", "no answer"))
        return int(value)

    return Counter(f"NVML energy counter of GPU {index}", read, lambda before, after: (after - before) / 1e3), ""


def _cuda_uuid(index: int) -> str:
    """The device's UUID when torch is loaded and knows it; torch is never imported for this."""
    import sys

    torch: Any = sys.modules.get("torch")
    try:
        return str(torch.cuda.get_device_properties(index).uuid) if torch and torch.cuda.is_initialized() else ""
    except (AttributeError, AssertionError, RuntimeError):
        return ""


class EnergyProbe:
    """Energy of named phases: of one GPU, or with `device_index` None of the machine's CPU packages."""

    def __init__(
        self,
        device_index: int | None,
        *,
        local_rank: int = 0,
        nvml: Nvml | None = None,
        powercap: Path = POWERCAP,
        uuid: str = "",
    ) -> None:
        if device_index is None:
            self._counter, self.reason = cpu_counter(powercap, local_rank)
        else:
            self._counter, self.reason = gpu_counter(device_index, nvml, uuid)
        self.readings: list[Reading] = []

    @contextmanager
    def phase(self, name: str, *, steps: int) -> Iterator[Reading]:
        """Measure the enclosed work; synchronise the device before entering and before leaving."""
        reading = Reading(name, steps, reason=self.reason)
        self.readings.append(reading)
        before = self._read(reading)
        started = time.perf_counter()
        try:
            yield reading
        finally:
            self._finish(reading, before, time.perf_counter() - started)

    def _read(self, reading: Reading) -> Any | None:
        if self._counter is None:
            return None
        try:
            return self._counter.read()
        except (OSError, ValueError) as error:
            reading.reason = f"{self._counter.source}: {error}"
            return None

    def _finish(self, reading: Reading, before: Any | None, seconds: float) -> None:
        after = self._read(reading)
        if self._counter is None or before is None or after is None:
            return
        joules = self._counter.joules(before, after)
        if seconds > self._counter.longest_s:
            reading.reason = (
                f"the phase took {seconds:.0f} s; the counter may wrap after {self._counter.longest_s:.0f} s"
            )
        elif joules <= 0:
            reading.reason = f"the {self._counter.source} did not move within {seconds * 1e3:.0f} ms"
        else:
            reading.row = PowerRow(
                rank=0,
                phase=reading.phase,
                joules=joules,
                seconds=seconds,
                steps=reading.steps,
                source=self._counter.source,
            )

    def rows(self, rank: int) -> list[PowerRow]:
        """The phases that yielded a figure."""
        rows = [r.row for r in self.readings if r.row is not None]
        for row in rows:
            row.rank = rank
        return rows

    def reasons(self) -> list[str]:
        """Why phases have no figure, without repetition."""
        return list(dict.fromkeys(r.reason for r in self.readings if r.row is None and r.reason))
