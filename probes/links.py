"""Calibration of links: what was measured, and the fit time = alpha + bytes / beta. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

CALIBRATION_FILE = "calibration.json"
KIB, MIB = 1 << 10, 1 << 20
DEVICE_SIZES = (*(4**n * KIB for n in range(2, 10)), 512 * MIB)  # 16 KiB ... 256 MiB, 512 MiB
MEMORY_SIZES = (64 * MIB, 256 * MIB, 1024 * MIB, 2048 * MIB)  # larger than any last-level cache
MESSAGE_SIZES = (1, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
BLOCK_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)

Direction = Literal["one", "both", "all"]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One size: seconds of one transfer, one direction; `gbps` uses the median."""

    bytes: int
    seconds: float  # median
    best: float
    repeats: int

    @property
    def gbps(self) -> float:
        """1e9 bytes per second."""
        return self.bytes / self.seconds / 1e9


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds = alpha + bytes / (gbps x 1e9). `alpha_s` is None where the data ask for a fixed cost below zero."""

    alpha_s: float | None
    gbps: float
    residual: float  # root mean square of (fit - measured) / measured


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """One link measured over sizes in one way."""

    what: str
    direction: Direction
    src: str  # device as `probes.topology` names it: gpu0, host, numa1, disk
    dst: str
    latency_is: str
    points: list[Point]
    fit: Fit
    where: str = ""


class Calibration(msgspec.Struct, kw_only=True):
    """All sweeps of one calibration; `skipped` says in words what was not measured and why."""

    date: str
    device: str
    ranks: int
    fingerprint: str = ""
    complete: bool = False
    sweeps: list[Sweep] = []
    skipped: list[str] = []


class CalibrationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Options: `seconds` is the time for one link and way, `disk` the folder whose disk is measured ("" for none)."""

    seconds: float = 2.0
    disk: str = ""
    fingerprint: str = ""


def fit(points: Sequence[Point]) -> Fit:
    """Least squares on relative errors, so that small and large sizes count alike. ValueError for fewer than two sizes.

    Minimises sum ((alpha + b x - t) / t)^2 over alpha and x = 1 / beta; if alpha comes out negative, over x alone.
    """
    rows = [(1 / p.seconds, p.bytes / p.seconds) for p in points if p.seconds > 0 and p.bytes > 0]
    if len({p.bytes for p in points}) < 2 or len(rows) < 2:
        raise ValueError("a fit needs two sizes")
    uu, uv, vv = (sum(f(u, v) for u, v in rows) for f in (lambda u, _: u * u, lambda u, v: u * v, lambda _, v: v * v))
    u1, v1 = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = uu * vv - uv * uv
    alpha = (u1 * vv - v1 * uv) / determinant if determinant > 0 else -1.0
    inverse = (v1 * uu - u1 * uv) / determinant if determinant > 0 else v1 / vv
    known = alpha >= 0 and inverse > 0
    if not known:
        alpha, inverse = 0.0, v1 / vv
    errors = [(alpha * u + inverse * v - 1) ** 2 for u, v in rows]
    residual = (sum(errors) / len(errors)) ** 0.5
    return Fit(alpha_s=alpha if known else None, gbps=1 / inverse / 1e9, residual=residual)


def sweep(
    what: str, direction: Direction, src: str, dst: str, points: list[Point], latency_is: str, where: str = ""
) -> Sweep:
    """A sweep with its fit."""
    return Sweep(
        what=what, direction=direction, src=src, dst=dst, latency_is=latency_is, points=points, fit=fit(points),
        where=where,
    )  # fmt: skip
