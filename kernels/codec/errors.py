"""The exceptions of the checkpoint engine."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint can't be written or read: the only type that opening or reading a file raises, whatever its bytes.

    The text names the file, the tensor and the byte offset where those are known.
    """


class CheckpointRefused(CheckpointError):
    """A lossy save was refused because its first resumed optimizer update would be off by more than the threshold."""
