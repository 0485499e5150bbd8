"""What the look at a model for fused kernels finds, as it crosses the process boundary. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from costlab.kernels.fused.plan import How

SCAN_FILE = "scan.json"


class SiteRow(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel and the places where it fits, or (path "eager") looks as if it did and does not.

    `where` is a module FQN with "*" for indices. `bytes` is what the kernel moves at all places in a step, forward and
    backward; null where sizes are not known.
    """

    kernel: str
    how: How
    where: str
    places: int = 1
    path: Literal["specialised", "dynamic", "eager"] = "specialised"
    reason: str = ""
    source: str = ""
    dtype: str = ""
    rows: int | None = None
    columns: int | None = None
    bytes: int | None = None
    inside: tuple[str, ...] = ()  # the modules whose code a swapped module replaces, where they are known


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One step with rewrites against the same step without: relative differences of loss and gradients."""

    names: list[str]
    ok: bool
    loss: float | None = None
    loss_error: float | None = None
    worst: float | None = None  # of a parameter's gradient, relative to its norm
    worst_tensor: str = ""
    bound: float = 0.0
    path: str = ""  # which code ran: Triton kernels or their eager references
    why: str = ""


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found. `unavailable` says why Triton kernels cannot run here, "" where they can."""

    environment: dict[str, str] = {}
    unavailable: str = ""
    sites: list[SiteRow] = []
    checks: list[Check] = []
    findings: list[str] = []
    cache_bytes: int | None = None  # of the last-level cache: the GPU's L2, the CPU's L3
    cache: str = ""


class CacheRow(msgspec.Struct, frozen=True, kw_only=True):
    """L2 hit rate of one kernel, sectors, over its launches in one step."""

    kernel: str
    hit_rate: float
    launches: int
