"""`costlab topo` and `costlab bench collectives`: parse, call, print. Registered by the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costlab.app.command import Form, cancel_on_signals, narrate, stop
from costlab.app.exit_codes import Exit
from costlab.probes.collective_spec import DTYPES, OPS

if TYPE_CHECKING:
    from costlab.app.topology.model import Topology
    from costlab.probes.collective_spec import BenchResult
    from costlab.probes.links import Calibration
    from costlab.probes.records import AnyEvent


def topo(
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure the links of this machine first")] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--import", help="NCCL/RCCL topology or graph XML, hwloc XML, nvidia-smi topo -m or -p2p; repeatable"
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Machine of a stored run: path, id, prefix or 'last'")
    ] = None,
    format: Annotated[Form, typer.Option("--format", "-f", help="text, md or json")] = Form.text,
    seconds: Annotated[float, typer.Option(help="Calibration: seconds for one link and way")] = 2.0,
    disk: Annotated[
        Path | None, typer.Option(help="Calibration: folder whose disk is measured; default: this one")
    ] = None,
    no_disk: Annotated[bool, typer.Option("--no-disk", help="Calibration: leave the disk out")] = False,
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Calibration: ranks; 0: one per GPU, or 2 on CPU")] = 0,
    device: Annotated[str, typer.Option(help="Calibration: auto, cuda or cpu")] = "auto",
) -> None:
    """Show the machine's devices and links, measured or imported, as a drawing, a weight table and a matrix."""
    from costlab.app.topology.load import load_files
    from costlab.app.topology.model import TopologyProblem

    if calibrate and (files or run):
        stop("--calibrate measures this machine; leave it out with --import and --run", Exit.USAGE)
    if files and run:
        stop("give --import or --run, not both", Exit.USAGE)
    if run:
        _show(machine_of(run), format)
        return
    if files:
        try:
            _show(load_files(files), format)
        except TopologyProblem as error:
            stop(str(error), Exit.BAD_INPUT)
        return
    folder = "" if no_disk else str((disk or Path.cwd()).resolve())
    _show(_here(folder, seconds, ranks, device, format) if calibrate else known(), format)


def _show(topology: Topology, form: Form) -> None:
    from costlab.app.report.topology import render_topology_json, render_topology_markdown, render_topology_text

    if form is Form.json:
        sys.stdout.write(render_topology_json(topology).decode())
    else:
        render = render_topology_markdown if form is Form.md else render_topology_text
        sys.stdout.write(render(topology))


def known() -> Topology:
    """This machine with the last calibration made on it."""
    from costlab.app.store import home
    from costlab.app.topology.calibration import calibrated, stored
    from costlab.app.topology.discovery import HERE, fingerprint, from_rows
    from costlab.probes.topology import machine_rows

    rows = machine_rows()
    last = stored(fingerprint(rows), home())
    topology = from_rows(rows, HERE)
    return calibrated(topology, last) if last is not None else topology


def machine_of(name: str, otherwise: str = "") -> Topology:
    """The machine that a stored run was made on; ends the command where there is none, with `otherwise` as advice."""
    from costlab.app.store import StoreError, home, open_run
    from costlab.app.topology.of_run import read_links, run_topology

    try:
        path = open_run(name).path
    except StoreError as error:
        stop(str(error), Exit.BAD_INPUT)
    topology = run_topology(read_links(path), path, home())
    if topology is None:
        stop(f"{path.name} recorded nothing of its machine's links{otherwise}", Exit.BAD_INPUT)
    return topology


def _here(disk: str, seconds: float, ranks: int, device: str, form: Form) -> Topology:
    """Calibrate, keep the result, and lay it on this machine's topology; what a cancelled one measured is shown."""
    from costlab.app.store import home
    from costlab.app.topology.calibration import JobFailed, calibrated, run_calibration, store
    from costlab.app.topology.discovery import HERE, fingerprint, from_rows
    from costlab.probes.launch import LaunchError
    from costlab.probes.links import CalibrationSpec
    from costlab.probes.spec import SpecError
    from costlab.probes.topology import machine_rows

    if not 0.05 <= seconds <= 600:
        stop(f"--seconds must be between 0.05 and 600, got {seconds:g}", Exit.USAGE)
    rows = machine_rows()
    spec = CalibrationSpec(seconds=seconds, disk=disk, fingerprint=fingerprint(rows))
    try:
        found: Calibration = run_calibration(spec, narrate, ranks=ranks, device=device, started=cancel_on_signals)
    except JobFailed as error:
        if error.partial is not None and error.partial.sweeps:
            _show(calibrated(from_rows(rows, HERE), error.partial), form)
        stop(f"calibration: {error}", Exit.CANCELLED if error.cancelled else Exit.RUN_FAILED)
    except LaunchError as error:
        stop(str(error), Exit.RUN_FAILED)
    except SpecError as error:
        stop(str(error), Exit.USAGE)
    try:
        store(found, home())
    except OSError as error:
        typer.echo(f"costlab: the calibration could not be kept ({error.strerror})", err=True)
    return calibrated(from_rows(rows, HERE), found)


class _OpNarrator:
    """One line on stderr for each operation; sizes would be a hundred."""

    def __init__(self) -> None:
        self.op = ""

    def __call__(self, event: AnyEvent) -> None:
        from costlab.probes.records import Progress

        if isinstance(event, Progress):
            op = event.detail.split(" ")[0]
            if op in OPS and op != self.op:
                self.op = op
                typer.echo(f"  {op}", err=True)
        else:
            narrate(event)


def bench_collectives(
    op: Annotated[list[str] | None, typer.Option("--op", help=f"{', '.join(OPS)} or all; repeatable")] = None,
    least: Annotated[str, typer.Option("--min", help="Smallest size: 8, 64K, 1M")] = "8",
    most: Annotated[str, typer.Option("--max", help="Largest size")] = "128M",
    iterations: Annotated[int, typer.Option("--iters", help="Calls timed together")] = 20,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, int32, uint8")] = "float32",
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Ranks; 0: one per GPU, or 2 on CPU")] = 0,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu")] = "auto",
    beside: Annotated[list[Path] | None, typer.Option(help="Output of nccl-tests to lay beside; repeatable")] = None,
    format: Annotated[Form, typer.Option("--format", "-f", help="text, md or json")] = Form.text,
) -> None:
    """Time collectives by size as nccl-tests does, through torch.distributed, and check their results."""
    from costlab.app.importers.nccl_tests import PeerResult, parse_nccl_tests
    from costlab.app.report.collective_bench import render_bench
    from costlab.probes.collective_spec import BenchSpec

    ops = tuple(OPS if "all" in (op or []) else op or ["all_reduce"])
    unknown = [o for o in ops if o not in OPS]
    if unknown:
        stop(f"no operation '{unknown[0]}'; there are: {', '.join(OPS)}, all", Exit.USAGE)
    if dtype not in DTYPES:
        stop(f"no dtype '{dtype}'; there are: {', '.join(DTYPES)}", Exit.USAGE)
    low, high = _size(least), _size(most)
    if not 0 < low <= high or iterations < 1:
        stop("--min must be above zero and at most --max, --iters at least 1", Exit.USAGE)
    peers: list[PeerResult] = []
    for path in beside or []:
        try:
            peers.append(parse_nccl_tests(path.read_text(encoding="utf-8", errors="replace")))
        except OSError as error:
            stop(f"{path}: {error.strerror}", Exit.BAD_INPUT)
        if not peers[-1].rows:
            stop(f"{path}: no row of nccl-tests' output in it", Exit.BAD_INPUT)
    spec = BenchSpec(ops=ops, least=low, most=high, iterations=iterations, dtype=dtype)
    result = _run_bench(spec, ranks, device)
    _keep(result)
    sys.stdout.write(render_bench(result, format.value, peers))


def _keep(result: BenchResult) -> None:
    """For the curves behind the collectives of later runs on this machine."""
    from costlab.app.store import home
    from costlab.app.topology.curves import keep_bench
    from costlab.app.topology.discovery import fingerprint
    from costlab.probes.topology import machine_rows

    try:
        keep_bench(result, fingerprint(machine_rows()), home())
    except OSError as error:
        typer.echo(f"costlab: the benchmark could not be kept ({error.strerror})", err=True)


def _run_bench(spec: object, ranks: int, device: str) -> BenchResult:
    from costlab.app.topology.calibration import JobFailed, run_job
    from costlab.probes.collective_spec import RESULT_FILE, BenchResult, BenchSpec
    from costlab.probes.launch import LaunchError
    from costlab.probes.spec import SpecError

    assert isinstance(spec, BenchSpec)
    module = "costlab.probes.collective_bench"
    narrate = _OpNarrator()
    try:
        return run_job(
            module, spec, RESULT_FILE, BenchResult, narrate, ranks=ranks, device=device, started=cancel_on_signals
        )
    except JobFailed as error:
        stop(str(error), Exit.CANCELLED if error.cancelled else Exit.RUN_FAILED)
    except LaunchError as error:
        stop(str(error), Exit.RUN_FAILED)
    except SpecError as error:
        stop(str(error), Exit.USAGE)


def _size(text: str) -> int:
    """Bytes of "8", "64K", "1M", "2G" (powers of 1024, as nccl-tests); 0 for what cannot be read."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper())
    digits = text[:-1] if unit else text
    return int(digits) << (unit or 0) if digits.isdigit() else 0


__all__ = ["bench_collectives", "topo"]
