"""Checkpoint codecs, the mapped checkpoint file and the staging pipeline."""
