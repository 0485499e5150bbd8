"""The run directory: list, open, index."""
