"""The panes in tab order. A new pane is one entry here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from costlab.app.tui.panes.base import Pane
from costlab.app.tui.session import Session


@dataclass(frozen=True)
class PaneSpec:
    """A pane: `place` is module:class under `panes`, imported on the first visit; `short` its narrow tab."""

    id: str
    title: str
    short: str
    place: str

    def load(self, session: Session) -> Pane:
        """Build the pane."""
        module, _, name = self.place.partition(":")
        kind = getattr(importlib.import_module(f"costlab.app.tui.panes.{module}"), name)
        pane: Pane = kind(session, id=self.id)
        return pane


PANES: tuple[PaneSpec, ...] = (
    PaneSpec("overview", "Overview", "Over", "overview:OverviewPane"),
    PaneSpec("fusion", "Fusion", "Fus", "fusion:FusionPane"),
    PaneSpec("comms", "Comms", "Com", "comms:CommsPane"),
    PaneSpec("checkpoint", "Checkpoint", "Ckpt", "checkpoint:CheckpointPane"),
    PaneSpec("compile", "Compile", "Comp", "compile:CompilePane"),
    PaneSpec("cost", "Cost", "Cost", "cost:CostPane"),
    PaneSpec("runs", "Runs", "Runs", "runs:RunsPane"),
    PaneSpec("log", "Log", "Log", "log:LogPane"),
    PaneSpec("topology", "Topology", "Topo", "topology:TopologyPane"),
    PaneSpec("whatif", "What-if", "If", "whatif:WhatIfPane"),
)


def key_of(index: int) -> str:
    """The digit that opens the pane at `index`: 1 to 9, then 0."""
    return str((index + 1) % 10)
