"""Findings: rules that read view models and return evidence, saving and the change that brings it."""
