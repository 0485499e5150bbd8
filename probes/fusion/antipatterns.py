"""Finds code that costs fusion, in the graphs of the user's model. Torch-free."""

from __future__ import annotations

from costlab.probes.fusion.facts import GraphFacts
from costlab.probes.fusion.model import AntiPattern
from costlab.probes.fusion.traffic import TrafficModel


def detect(facts: GraphFacts, model: TrafficModel) -> list[AntiPattern]:
    """Placeholder until the detectors land."""
    return []
