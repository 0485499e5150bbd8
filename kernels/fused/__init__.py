"""Triton kernels, one file each, with an eager reference."""
