"""Runs a calibration, keeps it for this machine, and lays it on the links of a topology."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from costlab.app.topology.builder import Builder, weighed
from costlab.app.topology.graph import path
from costlab.app.topology.model import Fact, Link, LinkKind, Measure, Topology
from costlab.app.topology.rates import Rate
from costlab.probes.links import CALIBRATION_FILE, Calibration, CalibrationSpec, Sweep
from costlab.probes.records import AnyEvent, Manifest

MODULE = "costlab.probes.calibrate"
PREFERENCE = ("device copy", "pinned copy", "device copy, read + write", "TCP stream", "NCCL send/recv")


T = TypeVar("T")


class JobFailed(Exception):
    """A job ended early; the message says why. `partial` is the calibration that rank 0 had written by then."""

    def __init__(self, message: str, partial: Calibration | None, cancelled: bool) -> None:
        self.partial, self.cancelled = partial, cancelled
        super().__init__(message)


def run_calibration(
    spec: CalibrationSpec,
    on_event: Callable[[AnyEvent], None],
    *,
    ranks: int = 0,
    device: str = "auto",
    started: Callable[[Callable[[], None]], None] | None = None,
) -> Calibration:
    """Calibrate this host; `started` gets the function that cancels. Raises JobFailed, LaunchError, SpecError."""
    return run_job(MODULE, spec, CALIBRATION_FILE, Calibration, on_event, ranks=ranks, device=device, started=started)


def run_job(
    module: str,
    options: msgspec.Struct,
    file: str,
    kind: type[T],
    on_event: Callable[[AnyEvent], None],
    *,
    ranks: int,
    device: str,
    started: Callable[[Callable[[], None]], None] | None = None,
) -> T:
    """Run a job of `probes.job` under torchrun in a folder of its own and return what it wrote to `file`."""
    from costlab.probes.job import JobLauncher
    from costlab.probes.spec import RunSpec, SpecError

    if device not in ("auto", "cuda", "cpu"):
        raise SpecError(f"--device: no '{device}'; choose from auto, cuda, cpu")
    folder = Path(tempfile.mkdtemp(prefix="costlab-job-"))
    try:
        launcher = JobLauncher(module, options, RunSpec(ranks=ranks, device=device), folder)  # type: ignore[arg-type]
        if started is not None:
            started(launcher.cancel)
        manifest = launcher.run(on_event)
        result = _read(folder / file, kind)
        if manifest.status != "complete" or result is None:
            partial = result if isinstance(result, Calibration) else None
            raise JobFailed(_why(manifest), partial, manifest.status == "cancelled")
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _why(manifest: Manifest) -> str:
    if manifest.failure is None:
        return f"it was {manifest.status}"
    return (
        f"{manifest.failure.message}; {manifest.failure.advice}"
        if manifest.failure.advice
        else manifest.failure.message
    )


def _read(path: Path, kind: type[T]) -> T | None:
    """The record in a file, None for none or a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def stored(fingerprint: str, home: Path) -> Calibration | None:
    """The last calibration made on the machine with this fingerprint."""
    return _read(home / "calibration" / f"{fingerprint}.json", Calibration)


def store(calibration: Calibration, home: Path) -> Path:
    """Keep a calibration under its machine's fingerprint; raises OSError."""
    from costlab.probes.tables import write_bytes

    folder = home / "calibration"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{calibration.fingerprint}.json"
    write_bytes(target, msgspec.json.format(msgspec.json.encode(calibration), indent=1))
    return target


def calibrated(topology: Topology, calibration: Calibration) -> Topology:
    """The topology with measured bandwidths, latencies and every sweep on the links that it went over."""
    layer = _Layer(topology, calibration)
    for found in calibration.sweeps:
        layer.put(found)
    return layer.result()


class _Layer:
    def __init__(self, topology: Topology, calibration: Calibration) -> None:
        self.topology, self.calibration = topology, calibration
        self.measures: dict[int, list[Measure]] = {}
        self.builder = Builder(topology.source)
        self.builder.nodes = {n.id: n for n in topology.nodes}
        self.builder.links = list(topology.links)
        self.names = {f"cuda{_fact(n.facts, 'cuda_index', n.id[3:])}": n.id for n in topology.gpus}

    def put(self, found: Sweep) -> None:
        src, dst = self._end(found.src, found.dst), self._end(found.dst, found.src)
        if src is None or dst is None:
            self.builder.notes.append(f"{found.what} {found.src} → {found.dst}: no such device in this topology")
            return
        for at in self._links(src, dst, found):
            self.measures.setdefault(at, []).append(self._measure(found))
        if (
            found.direction == "both" and src != dst
        ):  # measured at once, told for one way: it holds for the other way too
            for at in self._links(dst, src, found):
                self.measures.setdefault(at, []).append(self._measure(found))

    def _end(self, name: str, other: str) -> str | None:
        """The node of a device's name; "host" is the CPU node that the other end hangs on."""
        if name.startswith("cuda"):
            return self.names.get(name)
        if name == "disk":
            if "disk" not in self.builder.nodes:
                self.builder.node("disk", "disk", "disk of the measured folder", parent=self._host(""))
            return "disk"
        return name if name in self.builder.nodes else self._host(self.names.get(other, ""))

    def _host(self, device: str) -> str:
        """The CPU node above a device, else the first one."""
        node = self.builder.nodes.get(device)
        while node is not None and node.kind != "cpu":
            node = self.builder.nodes.get(node.parent)
        if node is not None:
            return node.id
        first = next((n.id for n in self.builder.nodes.values() if n.kind == "cpu"), None)
        return first or self.builder.node("cpu", "cpu", "CPU")

    def _links(self, src: str, dst: str, found: Sweep) -> list[int]:
        """Indices of the links that a sweep speaks for: those of the device itself, not the bridges that it shares."""
        if src == dst:
            kind: LinkKind = "memory" if found.what.startswith("device copy") else "loopback"
            return [self._own(src, dst, kind, "device memory" if kind == "memory" else "loopback")]
        if "disk" in (src, dst):
            return [self._own(src, dst, "disk", "disk")]
        way = path(self.topology, src, dst)
        if way is None:
            return []
        ends = {src, dst} & {n.id for n in self.topology.gpus}
        indices = {id(link): i for i, link in enumerate(self.topology.links)}
        return [indices[id(x)] for x in way.links if {x.src, x.dst} & ends]

    def _own(self, src: str, dst: str, kind: LinkKind, label: str) -> int:
        """Index of a link that may not be in the topology yet."""
        for i, link in enumerate(self.builder.links):
            if (link.src, link.dst, link.kind) == (src, dst, kind):
                return i
        self.builder.link(src, dst, kind, Rate(label, None, None, None))
        return len(self.builder.links) - 1

    def _measure(self, found: Sweep) -> Measure:
        largest = max(found.points, key=lambda p: p.bytes)
        return Measure(
            what=found.what, direction=found.direction, gbps=found.fit.gbps, largest_gbps=largest.gbps,
            largest_bytes=largest.bytes, alpha_is=found.latency_is, residual=found.fit.residual,
            alpha_ns=None if found.fit.alpha_s is None else found.fit.alpha_s * 1e9,
            sizes=len(found.points), repeats=min(p.repeats for p in found.points),
            where=found.where, date=self.calibration.date,
        )  # fmt: skip

    def result(self) -> Topology:
        links = [_measured(x, self.measures.get(i, [])) for i, x in enumerate(self.builder.links)]
        made = f"calibrated {self.calibration.date}{'' if self.calibration.complete else ', not to the end'}"
        skipped = [f"not measured: {text}" for text in self.calibration.skipped]
        return msgspec.structs.replace(
            self.topology,
            nodes=list(self.builder.nodes.values()),
            links=links,
            notes=[*self.topology.notes, made, *skipped, *self.builder.notes],
        )


def _fact(facts: list[Fact], name: str, default: str) -> str:
    return next((f.value for f in facts if f.name == name), default)


def _measured(link: Link, measures: list[Measure]) -> Link:
    """The link's figures from the best of its one-way copies; all measures stay beside them.

    One link can be measured by several pairs (a port of an NVSwitch); each is limited by the port.
    """
    one_way = [m for m in measures if m.direction == "one"]
    ranked = sorted(one_way, key=lambda m: (_preference(m.what), -m.largest_gbps))
    if not ranked:
        return msgspec.structs.replace(link, measures=[*link.measures, *measures])
    best = ranked[0]
    return weighed(
        msgspec.structs.replace(
            link,
            measures=[*link.measures, *measures],
            measured_gbps=best.largest_gbps,
            measured_by=f"{best.what}, {best.largest_bytes} bytes, median of {best.repeats}",
            latency_ns=best.alpha_ns,
            latency_is=best.alpha_is,
        )
    )


def _preference(what: str) -> int:
    return PREFERENCE.index(what) if what in PREFERENCE else len(PREFERENCE)
