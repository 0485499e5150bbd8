"""Fused kernels for functional code: rules on the graphs that torch.compile captures, where no module is swapped."""
