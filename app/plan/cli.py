"""`costlab plan`: parse, call, print. Registered by the command line."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costlab.app.command import Form, stop
from costlab.app.exit_codes import Exit
from costlab.app.topology.commands import known, machine_of

if TYPE_CHECKING:
    from costlab.app.topology.model import Topology

MOST_RANKS = 65_536
MOST_BYTES = 1 << 50
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class Wiring(StrEnum):
    """How hosts are connected."""

    switch = "switch"
    line = "line"


def plan(
    topology: Annotated[
        list[Path] | None,
        typer.Option("--topology", "-t", help="A host: NCCL/RCCL XML, hwloc XML, nvidia-smi topo -m; repeatable"),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", "-r", help="Host of a stored run: path, id, or 'last'")] = None,
    size: Annotated[str, typer.Option("--size", "-s", help="Message: 64MB (10^6), 1GiB (2^30), 4096")] = "1GiB",
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Ranks of the group; 0: one host's")] = 0,
    per_host: Annotated[int | None, typer.Option("--per-host", help="Ranks on a host; default: its GPUs")] = None,
    wiring: Annotated[Wiring, typer.Option("--wiring", help="Between hosts: switch, or line (daisy chain)")] = (
        Wiring.switch
    ),
    leaf: Annotated[int, typer.Option("--leaf", help="Hosts under one leaf switch; 0: one flat switch")] = 0,
    oversubscribed: Annotated[float, typer.Option("--oversubscribed", help="With --leaf: 4 is a 4:1 uplink")] = 1.0,
    slow: Annotated[
        list[str] | None, typer.Option("--slow", help="HOST:FRACTION of its NICs' bandwidth; repeatable")
    ] = None,
    inside: Annotated[float | None, typer.Option("--inside", help="GB/s of a rank's port inside its host")] = None,
    nics: Annotated[int | None, typer.Option("--nics", help="NICs of a host")] = None,
    network: Annotated[float | None, typer.Option("--network", help="GB/s of one NIC and direction")] = None,
    step: Annotated[float | None, typer.Option("--step", help="us of host time for a step of our schedules")] = None,
    format: Annotated[Form, typer.Option("--format", "-f", help="text, md or json")] = Form.text,
) -> None:
    """Choose an all-reduce schedule for a machine: all schedules over sizes, the choice and why, the lower bound."""
    from costlab.app.plan.machine import PlanProblem, Shape, Wanted, machine
    from costlab.app.plan.render import render
    from costlab.app.plan.report import make_report

    if topology and run:
        stop("give --topology or --run, not both", Exit.USAGE)
    _positive(("--per-host", per_host), ("--inside", inside), ("--nics", nics), ("--network", network))
    _positive(("--oversubscribed", oversubscribed))
    if leaf < 0 or (step is not None and not 0 <= step < 1e6):
        stop("--leaf and --step cannot be negative", Exit.USAGE)
    if not 0 <= ranks <= MOST_RANKS:
        stop(f"--ranks must be between 1 and {MOST_RANKS:,}, got {ranks:,}", Exit.USAGE)
    wanted = Wanted(per_host=per_host, inside_gbps=inside, nics=nics, network_gbps=network, step_us=step)
    host = machine(_topology(topology, run), wanted)
    if (ranks or host.ranks) > MOST_RANKS:
        stop(f"--per-host {host.ranks:,}: a plan has at most {MOST_RANKS:,} ranks", Exit.USAGE)
    shape = Shape(
        ranks=ranks or host.ranks,
        wiring=wiring.value,
        leaf=leaf,
        oversubscribed=oversubscribed,
        slow=_slow(slow or []),
    )
    try:
        found = make_report(host, shape, parse_size(size))
    except PlanProblem as error:
        stop(str(error), Exit.USAGE)
    sys.stdout.write(render(found, format.value))


def _positive(*options: tuple[str, float | None]) -> None:
    for name, value in options:
        if value is not None and not 0 < value < 1e9:
            stop(f"{name} must be above zero and below 1e9, got {value:g}", Exit.USAGE)


def _topology(files: list[Path] | None, run: str | None) -> Topology:
    from costlab.app.topology.load import load_files
    from costlab.app.topology.model import TopologyProblem

    if not files:
        return machine_of(run, "; give --topology FILE") if run else known()
    try:
        return load_files(files)
    except TopologyProblem as error:
        stop(str(error), Exit.BAD_INPUT)


def parse_size(text: str) -> int:
    """Bytes of "4096", "64MB" (10^6), "1GiB" (2^30), "1.5G"; ends with a usage error for anything else."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)(b?)\s*", text.lower())
    if match is None or (match[3] and not match[2]):
        stop(f"--size {text[:40]!r} is not a size; 4096, 64MB (10^6 bytes) and 1GiB (2^30) are", Exit.USAGE)
    unit = _UNITS[match[2]]
    if match[3]:
        unit = 1 << (10 * " kmgt".index(match[2]))
    found = int(float(match[1]) * unit)
    if not 1 <= found <= MOST_BYTES:
        stop(f"--size must be between 1 byte and {MOST_BYTES >> 40} TiB", Exit.USAGE)
    return found


def _slow(texts: list[str]) -> dict[int, float]:
    found = {}
    for text in texts:
        match = re.fullmatch(r"(\d{1,6}):(0?\.\d{1,9}|1(?:\.0+)?)", text)
        if match is None:
            stop(f"--slow {text[:40]!r}: give HOST:FRACTION, such as 3:0.25", Exit.USAGE)
        found[int(match[1])] = float(match[2])
    return found
