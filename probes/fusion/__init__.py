"""Fusion traces: which Inductor kernels were built, from which operators, and why others were not fused."""
