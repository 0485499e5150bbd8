"""`costlab bench kernels`: every fused kernel against eager, Inductor and the device's ceilings."""
