"""Measured sweeps over one choice of a training step, each with a recommendation: `costlab sweep ...`."""
