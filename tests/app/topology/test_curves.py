"""A run's collectives on its machine's graph: ideal times, and the curves of benchmarks and calibrated links."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from costlab.app import cli
from costlab.app.analysis.build import build_report
from costlab.app.analysis.views import CollectivesView
from costlab.app.report.markdown import render_markdown
from costlab.app.report.terminal import render_text
from costlab.app.store import Run
from costlab.app.topology import commands
from costlab.app.topology.calibration import store
from costlab.app.topology.curves import FOLDER, keep_bench
from costlab.app.topology.discovery import fingerprint
from costlab.app.topology.of_run import read_links
from costlab.app.tui.panes.registry import PANES, key_of
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.plot import BandwidthPlot
from costlab.app.tui.widgets.strip import FigureStrip
from costlab.app.tui.widgets.table import Table
from costlab.probes.clocks import ClockReading
from costlab.probes.collective_spec import BenchResult, BenchRow
from costlab.probes.links import Calibration, Point, sweep
from costlab.probes.records import LinkRow
from costlab.probes.tables import write_rows
from costlab.probes.topology import machine_rows
from tests.app.make_run import write_example_run
from tests.app.topology.test_discovery import LinkedNvml, rows
from tests.app.tui.driving import column, find, make_app, opened, settle, shown
from tests.probes.fake_sysfs import virtual_machine

NVLINK_GBPS, ALPHA_S = 400.0, 2e-6
LOOPBACK_GBPS = 2.0


def calibration(run_dir: Path, what: str, src: str, dst: str, gbps: float) -> Calibration:
    points = [
        Point(bytes=b, seconds=ALPHA_S + b / gbps / 1e9, best=1e-3, repeats=5) for b in (1 << 14, 1 << 20, 1 << 28)
    ]
    return Calibration(
        date="2026-11-29", device="", ranks=2, fingerprint=fingerprint(read_links(run_dir)), complete=True,
        sweeps=[sweep(what, "one", src, dst, points, "one copy")],
    )  # fmt: skip


@pytest.fixture
def gpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    path = write_example_run(tmp_path / "run")
    write_rows(path / "rank-00000", LinkRow, rows(virtual_machine(tmp_path / "vm").root, LinkedNvml()))
    write_rows(path / "rank-00001", LinkRow, [])
    return path


def collectives(path: Path) -> CollectivesView:
    view = build_report(Run(path)).collectives
    assert view is not None
    return view


def bench(op: str, ranks: int, backend: str) -> BenchResult:
    made = [
        BenchRow(op=op, size=size, count=size // 4, dtype="float32", redop="none", root=-1, in_place=False,
                 time_us=10 + size / 200e3, slowest_us=20.0, wrong=0, iterations=20)
        for size in (1 << 16, 1 << 22, 1 << 28)
    ]  # fmt: skip
    return BenchResult(date="2026-11-29", backend=backend, device="x", ranks=ranks, complete=True, rows=made)


def test_without_a_calibration_the_ideal_is_by_the_line_rate_and_says_so(gpu_run: Path) -> None:
    view = collectives(gpu_run)
    assert view.curves == []
    assert all("450 GB/s (line rate, not calibrated)" in r.ideal_how for r in view.rows)


def test_ideal_time_and_ratio_are_by_the_calibrated_link(gpu_run: Path, tmp_path: Path) -> None:
    store(calibration(gpu_run, "device copy", "cuda0", "cuda1", NVLINK_GBPS), tmp_path / "home")
    view = collectives(gpu_run)
    for row in view.rows:
        size = max(row.bytes_in or 0, row.bytes_out or 0)
        assert row.ideal_ms is not None
        assert row.ideal_ms == pytest.approx(ALPHA_S * 1e3 + size / 2 / NVLINK_GBPS / 1e6, rel=0.02)
        assert row.transfer_ms is not None
        assert row.ideal_ratio == pytest.approx(row.ideal_ms / (row.transfer_ms / row.calls))
        assert "399 GB/s (measured)" in row.ideal_how
    curve = next(c for c in view.curves if c.name.endswith(", ideal"))
    assert curve.bytes == sorted(curve.bytes)
    assert all(b < NVLINK_GBPS * 1.01 for b in curve.busbw_gbps)
    assert curve.busbw_gbps == sorted(curve.busbw_gbps), "latency weighs less on larger messages"


def test_kept_benchmarks_of_the_same_ranks_and_backend_are_curves(gpu_run: Path, tmp_path: Path) -> None:
    machine = fingerprint(read_links(gpu_run))
    for made in (bench("all_gather", 2, "nccl"), bench("all_gather", 8, "nccl"), bench("reduce_scatter", 2, "gloo")):
        keep_bench(made, machine, tmp_path / "home")
    view = collectives(gpu_run)
    assert [c.name for c in view.curves] == ["all_gather, benchmark"]
    assert view.curves[0].busbw_gbps[-1] == pytest.approx((1 << 28) / (10 + (1 << 28) / 200e3) / 1e3 / 2)
    assert "2 ranks, nccl" in view.curves[0].source
    report = build_report(Run(gpu_run))
    for text in (render_text(report), render_markdown(report)):
        assert "· all_gather, benchmark" in text
        assert "GB/s│" in text
        assert "costlab bench collectives" in text
    damaged = next((tmp_path / "home" / FOLDER / machine).glob("all_gather-2-*"))
    damaged.write_text("{")
    assert collectives(gpu_run).curves == []


def test_ranks_without_gpus_travel_over_the_calibrated_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    path = write_example_run(tmp_path / "run", device="cpu")
    write_rows(path / "rank-00000", LinkRow, rows(virtual_machine(tmp_path / "vm").root, LinkedNvml()))
    assert all(r.ideal_ms is None for r in collectives(path).rows), "its GPUs were not the ranks'"
    store(calibration(path, "TCP stream", "host", "host", LOOPBACK_GBPS), tmp_path / "home")
    view = collectives(path)
    size = max(view.rows[0].bytes_in or 0, view.rows[0].bytes_out or 0)
    assert view.rows[0].ideal_ms == pytest.approx(ALPHA_S * 1e3 + size / 2 / LOOPBACK_GBPS / 1e6, rel=0.02)
    assert "over loopback" in view.rows[0].ideal_how


def test_a_run_over_several_hosts_has_no_ideal_from_one_hosts_graph(gpu_run: Path) -> None:
    manifest = msgspec.json.decode((gpu_run / "manifest.json").read_bytes())
    manifest["spec"]["nnodes"] = 2
    (gpu_run / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert all(r.ideal_ms is None for r in collectives(gpu_run).rows)


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_the_panes_show_curves_clocks_and_the_share_of_each_link(
    gpu_run: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    store(calibration(gpu_run, "device copy", "cuda0", "cuda1", NVLINK_GBPS), tmp_path / "home")
    keep_bench(bench("all_gather", 2, "nccl"), fingerprint(read_links(gpu_run)), tmp_path / "home")
    manifest = msgspec.json.decode((gpu_run / "manifest.json").read_bytes())
    clocks = [ClockReading(rank=r, when="start", offset_us=0.0, uncertainty_us=40.0 * r) for r in (0, 1)]
    manifest["extra"]["clocks"] = msgspec.to_builtins(clocks)
    (gpu_run / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    app = make_app(gpu_run)
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        for pane in ("comms", "topology"):
            await pilot.press(key_of(next(i for i, spec in enumerate(PANES) if spec.id == pane)))
            await settle(pilot, lambda pane=pane: app.pane.id == pane)  # type: ignore[misc]
            if pane == "comms":
                names = [p.name for p in find(app, "#plot", BandwidthPlot).points if p.joined]
                assert names == ["all_gather, benchmark", "reduce_scatter, all_gather, ideal"]
                figures = {n.name: n for n in find(app, "#headline", FigureStrip).items}
                assert "±" in figures["wait"].text
                assert "uncertainty of 40.0 us" in figures["wait"].figure.how
                assert "measured by round trips at the start only" in find(app, "#convention", Lines).plain
                assert "busbw" in shown(app)
            else:
                texts = column(find(app, "#link-classes", Table), "used")
                assert texts[0].endswith("%")
                assert set(texts[1:]) == {"–"}, "only the fabric carried the collectives"


def test_the_benchmark_command_keeps_its_result_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(commands, "_run_bench", lambda *_: bench("broadcast", 2, "gloo"))
    done = CliRunner().invoke(cli.app, ["bench", "collectives", "--op", "broadcast", "-f", "json"])
    assert done.exit_code == 0
    kept = tmp_path / "home" / FOLDER / fingerprint(machine_rows()) / "broadcast-2-gloo.json"
    assert msgspec.json.decode(kept.read_bytes(), type=BenchResult) == bench("broadcast", 2, "gloo")
    (tmp_path / "blocked").write_text("a file")
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "blocked"))
    done = CliRunner().invoke(cli.app, ["bench", "collectives", "--op", "broadcast", "-f", "json"])
    assert done.exit_code == 0
    assert "could not be kept" in done.stderr
