"""Curves of all-reduce plans as an earlier leg of the same what-if measured them, so that the others need not.

Kept beside the compiled graphs, under the part of their salt that all arms share. The first rank of the group reads
them for all, since every rank must choose alike; what cannot be read, or was measured for other plans, ranks or sizes,
is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from costlab.kernels.schedule.communicator import Communicator
from costlab.kernels.schedule.errors import ScheduleError
from costlab.kernels.schedule.measure import Measured
from costlab.kernels.schedule.plan import Plan
from costlab.probes.spec import RunSpec
from costlab.probes.tables import write_bytes

Curve = list[tuple[int, float]]  # bytes, seconds


class _Kept(msgspec.Struct):
    alone: list[tuple[Plan, Curve]]
    beside: list[tuple[Plan, Curve]]
    noise: list[tuple[int, float]]
    refused: list[tuple[Plan, str]]


def kept_path(
    spec: RunSpec, communicator: Communicator, plans: Sequence[Plan], sizes: Sequence[int], *, beside: bool
) -> Path | None:
    """Where the curves of these plans are kept, None for a run of no what-if."""
    if not spec.cache_salt:
        return None
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir
    except ImportError:
        return None
    asked = (
        spec.cache_salt.partition("/")[0],
        communicator.layout,
        communicator.peers,
        list(plans),
        list(sizes),
        beside,
    )
    return Path(cache_dir()) / f"costlab-curves-{hashlib.sha256(repr(asked).encode()).hexdigest()[:24]}.json"


def read_curves(path: Path, communicator: Communicator) -> Measured | None:
    """What the group's first rank finds there, the same on all of its ranks; None if it finds nothing of use."""
    found: list[bytes | None] = [None]
    if communicator.rank == 0:
        with contextlib.suppress(OSError, msgspec.MsgspecError, ScheduleError):
            data = path.read_bytes()
            msgspec.json.decode(data, type=_Kept)
            found = [data]
    dist.broadcast_object_list(found, group_src=0, group=communicator.parent, device=torch.device("cpu"))
    if found[0] is None:
        return None
    kept = msgspec.json.decode(found[0], type=_Kept)
    return Measured(dict(kept.alone), dict(kept.beside), dict(kept.noise), dict(kept.refused))


def keep_curves(path: Path, communicator: Communicator, found: Measured) -> None:
    """Leave the curves for later legs; a folder that cannot be written costs them the measurement only."""
    if communicator.rank == 0:
        kept = _Kept(
            list(found.curves.items()),
            list(found.beside.items()),
            list(found.noise.items()),
            list(found.refused.items()),
        )
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, msgspec.json.encode(kept))
