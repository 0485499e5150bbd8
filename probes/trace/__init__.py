"""Kineto traces to kernels, collectives, idle time and a waterfall; torch-free."""
