"""Findings: what a run wastes, what that costs, and what to change. Rules read the report, nothing else."""

from costlab.app.diagnosis.registry import RULES, diagnose

__all__ = ["RULES", "diagnose"]
