"""Reads `--shapes 4x128,4x96*3,8`: batch x sequence, optionally times how often it is seen. Pure."""

from __future__ import annotations

import re

from costlab.app.text import plain
from costlab.probes.shapes_spec import MOST_SHAPES, Shape

_SHAPE = re.compile(r"(\d{1,7})(?:x(\d{1,7}))?(?:\*(\d{1,9}))?", re.ASCII)


class ShapeProblem(ValueError):
    """Text that names no shapes; one line."""


def is_sampler(text: str) -> bool:
    """Whether the option names a user's `file.py:function`."""
    return ".py:" in text


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The shapes in order; a shape without "x" has no sequence. Raises ShapeProblem."""
    found = []
    for part in (p.strip() for p in text.split(",")):
        match = _SHAPE.fullmatch(part)
        batch, seq, count = (int(g) if g else None for g in match.groups()) if match else (None, None, None)
        if not batch or seq == 0 or count == 0:
            raise ShapeProblem(
                f"'{plain(part, 40)}' is no shape: give batch x sequence above zero, as in 4x128,8x128 or 4x96*3,"
                " or your sampler as file.py:function"
            )
        found.append(Shape(batch=batch, seq=seq or 0, count=count or 1))
    different = len({(s.batch, s.seq) for s in found})
    if different > MOST_SHAPES:
        raise ShapeProblem(f"{different} different shapes are more than {MOST_SHAPES}: round their lengths")
    return tuple(found)


def written(shape: Shape) -> str:
    """A shape as `parse_shapes` reads it."""
    return f"{shape.batch}{f'x{shape.seq}' if shape.seq else ''}{f'*{shape.count}' if shape.count > 1 else ''}"
