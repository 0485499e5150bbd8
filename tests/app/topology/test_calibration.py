"""A calibration laid on a topology, and how it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from costlab.app.report.topology import render_topology_json, render_topology_markdown, render_topology_text
from costlab.app.topology.calibration import calibrated, store, stored
from costlab.app.topology.draw import classes, drawing
from costlab.app.topology.load import load_file
from costlab.app.topology.model import Topology
from costlab.probes.links import Calibration, Direction, Point, Sweep, sweep

DATA = Path(__file__).parent / "data"


def made(what: str, direction: Direction, src: str, dst: str, gbps: float, alpha: float = 2e-6) -> Sweep:
    sizes = [1 << n for n in range(14, 30, 3)]
    points = [Point(bytes=b, seconds=alpha + b / gbps / 1e9, best=alpha + b / gbps / 1e9, repeats=7) for b in sizes]
    return sweep(what, direction, src, dst, points, "one copy")


def calibration() -> Calibration:
    return Calibration(
        date="2026-11-29T12:00:00+00:00", device="test", ranks=2, fingerprint="abc", complete=True,
        skipped=["disk: no O_DIRECT"],
        sweeps=[
            made("pinned copy", "one", "host", "cuda0", 55.3), made("pinned copy", "one", "cuda0", "host", 55.1),
            made("pinned copy", "both", "host", "cuda0", 48.0), made("device copy", "one", "cuda0", "cuda1", 396.0),
            made("NCCL send/recv", "one", "cuda0", "cuda1", 300.0),
            made("device copy, read + write", "one", "cuda0", "cuda0", 4272.0),
            made("device copy", "one", "cuda0", "cuda9", 1.0),
        ],
    )  # fmt: skip


@pytest.fixture
def topology() -> Topology:
    return calibrated(load_file(DATA / "h200x2-nccl-topo.xml"), calibration())


def link(topology: Topology, src: str, dst: str) -> object:
    return next(x for x in topology.links if (x.src, x.dst) == (src, dst))


def test_measured_bandwidth_efficiency_weight_and_latency(topology: Topology) -> None:
    down = next(x for x in topology.links if (x.src, x.dst) == ("cpu", "gpu0"))
    assert down.measured_gbps == pytest.approx(55.3, rel=1e-3)
    assert down.efficiency == pytest.approx(55.3 / 64, rel=1e-3)
    assert (down.weight_from, down.weight) == ("measured", pytest.approx(55.3 / 64, rel=1e-3))
    assert down.latency_ns == pytest.approx(2000, rel=1e-3)
    assert down.latency_is == "one copy"
    assert [(m.what, m.direction) for m in down.measures] == [("pinned copy", "one"), ("pinned copy", "both")]
    up = next(x for x in topology.links if (x.src, x.dst) == ("gpu0", "cpu"))
    assert up.measured_gbps == pytest.approx(55.1, rel=1e-3)


def test_copy_goes_before_nccl_and_the_switch_is_passed_through(topology: Topology) -> None:
    out = next(x for x in topology.links if (x.src, x.dst) == ("gpu0", "nvswitch"))
    into = next(x for x in topology.links if (x.src, x.dst) == ("nvswitch", "gpu1"))
    back = next(x for x in topology.links if (x.src, x.dst) == ("gpu1", "nvswitch"))
    assert out.measured_gbps == into.measured_gbps == pytest.approx(396, rel=0.02)
    assert {m.what for m in out.measures} == {"device copy", "NCCL send/recv"}
    assert back.measured_gbps is None, "only one direction was measured"
    assert back.weight_from == "nominal"


def test_memory_is_a_link_of_the_gpu_to_itself_and_unknown_devices_are_said(topology: Topology) -> None:
    memory = next(x for x in topology.links if x.kind == "memory")
    assert (memory.src, memory.dst) == ("gpu0", "gpu0")
    assert memory.measured_gbps == pytest.approx(4272, rel=0.02)
    assert memory.efficiency is None
    assert any("cuda9" in note for note in topology.notes)
    assert "not measured: disk: no O_DIRECT" in topology.notes


def test_letters_table_and_drawing(topology: Topology) -> None:
    lines = drawing(topology, 80)
    assert any("GPU0" in t and "╗" in t for t in lines)
    assert any("NVSwitch (not visible)" in t and "╝" in t for t in lines)
    assert [c.letter for c in classes(topology)] == ["A", "B", "C", "D", "E"]
    marked = drawing(topology, 80, {("gpu0", "nvswitch"): 0.71})
    assert any("A!71%" in t for t in marked), "hot links are marked by signs, not only by colour"


@pytest.mark.parametrize("name", [p.name for p in sorted(DATA.iterdir()) if p.suffix in (".xml", ".txt")])
def test_every_file_draws_in_80_columns(name: str) -> None:
    topology = load_file(DATA / name)
    lines = drawing(topology, 78)
    assert max(map(len, lines)) <= 78
    for gpu in topology.gpus:
        assert any(gpu.label in line for line in lines), gpu
    assert all(len(line) <= 80 for line in render_topology_text(topology, 80).splitlines())


def test_reports_name_the_seeds_errors_and_json_has_the_interface(topology: Topology) -> None:
    import json

    text = render_topology_text(topology)
    assert "for reference only" in " ".join(text.split())
    assert "| A | NVLink 4 x18 |" in render_topology_markdown(topology)
    data = json.loads(render_topology_json(topology))
    assert {"id", "kind"} <= set(data["nodes"][0])
    keys = {"src", "dst", "kind", "nominal_gbps", "measured_gbps", "latency_ns", "efficiency", "weight"}
    assert all(keys <= set(x) for x in data["links"])
    assert data["nodes"][0]["numa"] is None


def test_a_calibration_is_kept_for_its_machine(tmp_path: Path) -> None:
    path = store(calibration(), tmp_path)
    assert stored("abc", tmp_path) == calibration()
    assert stored("other", tmp_path) is None
    path.write_text("{")
    assert stored("abc", tmp_path) is None
