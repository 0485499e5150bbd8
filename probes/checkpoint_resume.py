"""Repeating training steps from an earlier moment: the same data and the same random numbers, another state."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from costlab.probes.steps import Trainer

AFTER = (0, 1, 5, 40)  # optimizer updates after a restore at which losses are compared
SHARE = 0.25  # of the remaining budget, for one resumed training


class Repeatable(Protocol):
    """Steps whose data depend on their number alone. `index` is the next step's."""

    index: int

    def loss(self) -> float:
        """Of the last step."""


class Steps:
    """A trainer's steps, timed from the call to an idle device, whatever the device was doing before."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loss: Tensor | None = None

    @property
    def index(self) -> int:
        """The next step."""
        return self._trainer.index

    @index.setter
    def index(self, value: int) -> None:
        self._trainer.index = value

    def timed(self) -> float:
        """One step, ms of wall time. Copies that a save left running count into it where they outlast it."""
        began = time.perf_counter()
        self._loss = self._trainer.step()
        self._trainer.synchronize()
        return (time.perf_counter() - began) * 1e3

    def loss(self) -> float:
        """Of the last step, this rank's."""
        return float(self._loss.item()) if self._loss is not None else float("nan")


@dataclass(frozen=True)
class Moment:
    """A step's number and the random state before it."""

    index: int
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, steps: Repeatable, device: torch.device) -> Moment:
        """The moment before the next step."""
        import torch

        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(steps.index, torch.get_rng_state(), cuda)

    def put_back(self, steps: Repeatable, device: torch.device) -> None:
        """Make the next step the one that followed this moment."""
        import torch

        steps.index = self.index
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


def horizon(step_s: float, left_s: float) -> int:
    """How many updates after the restore can be reached: the largest of `AFTER` that fits, -1 for none.

    A repeated step has a twin in the training that goes on, so each costs two.
    """
    fits = [n for n in AFTER if 2 * (n + 1) * step_s <= SHARE * left_s]
    return max(fits, default=-1)
