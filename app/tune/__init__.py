"""Profile-guided fusion: candidates from a run's trace, measured one by one, kept where they win. Torch-free."""
