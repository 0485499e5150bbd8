"""Accounts of one graph's traffic: what each layer and kernel moves, and what of it is lost. Torch-free."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from costlab.probes.fusion.causes import HARD, STRUCTURAL
from costlab.probes.fusion.model import Lost


@dataclass(slots=True)
class Charge:
    """Traffic of one layer or one kernel, in bytes."""

    read: int = 0
    written: int = 0
    addressable: int = 0
    structural: int = 0
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def actual(self) -> int:
        """Bytes moved."""
        return self.read + self.written


class Ledger:
    """Every lost byte is also a charged one, so a rate is between 0 and 1 by construction."""

    def __init__(self) -> None:
        self.layers: dict[str, Charge] = defaultdict(Charge)
        self.kernels: dict[int, Charge] = defaultdict(Charge)
        self.lost: list[Lost] = []

    def read(self, layer: str, kernel: int, nbytes: int) -> None:
        """A kernel loads `nbytes` for a layer."""
        self.layers[layer].read += nbytes
        self.kernels[kernel].read += nbytes

    def write(self, layer: str, kernel: int, nbytes: int) -> None:
        """A kernel stores `nbytes` for a layer."""
        self.layers[layer].written += nbytes
        self.kernels[kernel].written += nbytes

    def lose(self, item: Lost, kernel: int) -> Lost:
        """Of what was charged to `kernel` and the item's layer, the item's bytes need not have moved."""
        self.lost.append(item)
        for charge in (self.layers[item.layer], self.kernels[kernel]):
            if item.addressable:
                charge.addressable += item.bytes
            else:
                charge.structural += item.bytes
            charge.causes[item.cause] += item.bytes
        return item

    def hard_causes(self) -> dict[str, list[str]]:
        """Layer -> causes that break it whatever its rate."""
        found = {layer: sorted(c for c in charge.causes if c in HARD) for layer, charge in self.layers.items()}
        return {layer: causes for layer, causes in found.items() if causes}


def main_cause(causes: Counter[str]) -> str:
    """The cause with most bytes, addressable ones first."""
    ranked = sorted(causes.items(), key=lambda item: (item[0] in STRUCTURAL, -item[1], item[0]))
    return ranked[0][0] if ranked else ""
