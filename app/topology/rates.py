"""Line rates of links, NCCL's constants for them, and the seed's weights with what is wrong with them.

GB/s = 1e9 bytes per second, one direction. Sources: PCI-SIG and NVIDIA/AMD data sheets for line rates; NCCL's
src/graph/topo.h (master, 2.30) for the constants of its search.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PCIE_GTS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
NCCL_LINE_SHARE = 0.75  # NCCL takes 12 of 16 GB/s for Gen3 x16 and scales it
LARGEST_NET_MBPS = 3_200_000  # twice today's fastest port; more is a driver's placeholder

# sm -> (NVLink generation, GB/s a link); data-sheet totals divided by the links of that part.
_NVLINK = {60: (1, 20.0), 70: (2, 25.0), 72: (2, 25.0), 80: (3, 25.0), 86: (3, 14.0625), 90: (4, 25.0),
           100: (5, 50.0), 103: (5, 50.0)}  # fmt: skip
_NCCL_NVLINK = ((107, None), (100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (80, 20.0), (70, 20.0), (60, 18.0))
_XGMI = {"gfx90a": 50.0, "gfx940": 64.0, "gfx941": 64.0, "gfx942": 64.0}
_IB = ((6_800, "FDR"), (12_500, "EDR"), (25_000, "HDR"), (50_000, "NDR"), (100_000, "XDR"))  # MB/s of four lanes


@dataclass(frozen=True)
class Rate:
    """A link's rate as far as it is known."""

    label: str
    line: float | None
    payload: float | None
    nccl: float | None


def pcie_generation(speed: str) -> int | None:
    """Generation of "32.0 GT/s PCIe", "16 GT/s", "8.0"; None for an empty or unknown text."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*(?:GT/s.*)?$", speed)
    wanted = float(match[1]) if match else None
    return next((g for g, gts in PCIE_GTS.items() if gts == wanted), None)


def pcie(generation: int | None, width: int | None) -> Rate:
    """A PCIe link; None in either argument gives no figures. NCCL takes x16 for width 0 and Gen3 for unknown speed."""
    nccl_generation, nccl_width = generation or 3, width or 16
    nccl = NCCL_LINE_SHARE * PCIE_GTS[nccl_generation] * nccl_width / 8
    if generation is None or not width:
        name = f"Gen{generation}" if generation else "generation unknown"
        return Rate(f"PCIe {name}{f' x{width}' if width else ', width unknown'}", None, None, nccl)
    line = PCIE_GTS[generation] * width / 8
    return Rate(f"PCIe {generation} x{width}", line, line * encoding(generation), nccl)


def encoding(generation: int) -> float:
    """Share of the line rate that carries data: 8b/10b, 128b/130b, or Gen6's 242 of 256 bytes of a flit."""
    return 0.8 if generation <= 2 else 128 / 130 if generation <= 5 else 242 / 256


def nvlink(sm: int | None, count: int | None) -> Rate:
    """`count` NVLinks of a GPU of compute capability `sm` (90 is 9.0)."""
    generation, each = _NVLINK.get(sm or 0, (None, None))
    label = f"NVLink{f' {generation}' if generation else ''}{f' x{count}' if count else ''}"
    nccl_each = next((bw for least, bw in _NCCL_NVLINK if sm is not None and sm >= least), None)
    line = each * count if each and count else None
    return Rate(label, line, line, nccl_each * count if nccl_each and count else None)


def xgmi(gcn: str, count: int | None) -> Rate:
    """`count` xGMI links of an AMD GPU named by its gfx code."""
    each = _XGMI.get(gcn)
    line = each * count if each and count else None
    return Rate(f"xGMI{f' x{count}' if count else ''}", line, line, None)


def network(mbps: float | None) -> Rate:
    """A network port by its speed in Mbit/s."""
    if mbps is None or not 0 < mbps <= LARGEST_NET_MBPS:
        return Rate("network, speed unknown", None, None, None)
    text = f"{mbps / 1000:g} Gbit/s"
    return Rate(text, mbps / 8000, mbps / 8000, mbps / 8000)


def infiniband_name(mbps: float | None) -> str:
    """FDR ... XDR for the rate of a four-lane port, "" for others."""
    return next((name for mb, name in _IB if mbps is not None and abs(mbps / 8 - mb) < 0.02 * mb), "")


def socket_link(arch: str, vendor: str, family: int | None, model: int | None) -> float | None:
    """GB/s that NCCL takes between two CPUs of this kind, None for kinds it has no constant for."""
    if arch == "x86_64" and vendor == "GenuineIntel" and family is not None and model is not None:
        steps = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))
        return next((bw for least, bw in steps if family == 6 and model >= least), 6.0)
    if arch == "x86_64" and vendor == "AuthenticAMD":
        return 16.0
    return {"arm64": 6.0, "ppc64": 32.0}.get(arch)


@dataclass(frozen=True)
class SeedWeight:
    """A line of the seed's table: its weight, latency (ns) and coefficient, and what is wrong with them."""

    weight: float
    latency_ns: float
    coefficient: float
    error: str


SEED = {
    "PCIe 5 x16": SeedWeight(
        1.0, 850, 1.00,
        "the unit is the raw 64 GB/s (63.0 after encoding, NCCL reckons with 48); a coefficient of 1.00 cannot be: "
        "copies reach 0.86 to 0.88; 850 ns is a read's round trip, not what a transfer takes",
    ),
    "NVLink 4": SeedWeight(
        7.0, 95, 0.85,
        "450 / 64 = 7.0 divides line by line rates; 95 ns is below any latency a program can see (a copy takes 2 to 3 "
        "us, an NCCL step 3.4 us)",
    ),
    "EDR": SeedWeight(
        5.2, 265, 0.78,
        "EDR carries 12.5 GB/s: its weight is 0.195; 5.2 is nearly the inverse (64 / 12.5 = 5.12), a slow-down beside "
        "NVLink's speed-up; 265 ns is one switch hop, a message takes 0.8 us or more; wires reach 0.96",
    ),
}  # fmt: skip
