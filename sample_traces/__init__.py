"""Runs recorded by costlab on real machines, one compressed run directory each."""
