"""The topology of a stored run: its ranks' facts, NCCL's dumps beside them, and the pane that shows it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from textual.app import App, ComposeResult

from costlab.app.analysis.build import build_report
from costlab.app.store import Run, open_run
from costlab.app.topology.calibration import store
from costlab.app.topology.discovery import fingerprint
from costlab.app.topology.of_run import check_in_facts, read_links, run_topology
from costlab.app.tui.messages import Loaded
from costlab.app.tui.panes.topology import TopologyPane
from costlab.app.tui.session import Session
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip
from costlab.app.tui.widgets.table import Table
from costlab.probes.links import Calibration, Point, sweep
from costlab.probes.records import LinkRow
from costlab.probes.tables import write_rows
from tests.app.make_run import write_example_run
from tests.app.topology.test_discovery import LinkedNvml, rows
from tests.probes.fake_sysfs import virtual_machine

DATA = Path(__file__).parent / "data"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stored run of a machine with two H200, with check-in and NCCL's dumps."""
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    path = write_example_run(tmp_path / "home" / "runs" / "20261129-1402-llama-example-a1b2")
    machine = rows(virtual_machine(tmp_path / "vm").root, LinkedNvml())
    for rank in (0, 1):
        result = LinkRow(
            rank=rank, device=f"rank{rank}", kind="check-in", fact="result", value="one NUMA node: nothing to gain",
            source="check-in",
        )  # fmt: skip
        write_rows(path / f"rank-{rank:05d}", LinkRow, [*(machine if rank == 0 else []), result])
    (path / "raw").mkdir(exist_ok=True)
    for name in ("topo", "graph"):
        shutil.copy(DATA / f"h200x2-nccl-{name}.xml", path / "raw" / f"nccl-{name}.xml")
    return path


def test_facts_dumps_and_calibration_come_together(run_dir: Path, tmp_path: Path) -> None:
    links = read_links(run_dir)
    machine = [r for r in links if r.kind != "check-in"]
    points = [Point(bytes=b, seconds=b / 55e9, best=b / 55e9, repeats=5) for b in (1 << 20, 1 << 28)]
    made = Calibration(
        date="2026-11-29", device="H200", ranks=2, fingerprint=fingerprint(machine), complete=True,
        sweeps=[sweep("pinned copy", "one", "host", "cuda0", points, "one copy")],
    )  # fmt: skip
    store(made, tmp_path / "home")
    topology = run_topology(links, run_dir, tmp_path / "home")
    assert topology is not None
    assert [len(s.channels) for s in topology.schedules if s.name == "ring"] == [12]
    down = next(x for x in topology.links if x.dst == "gpu0" and x.kind == "pcie")
    assert down.measured_gbps == pytest.approx(55)
    assert [g.numa for g in topology.gpus] == [None, None]
    assert check_in_facts(links) == [(r, {"result": "one NUMA node: nothing to gain"}) for r in (0, 1)]


def test_another_machines_calibration_is_not_used(run_dir: Path, tmp_path: Path) -> None:
    store(Calibration(date="2026", device="", ranks=1, fingerprint="another", complete=True), tmp_path / "home")
    topology = run_topology(read_links(run_dir), run_dir, tmp_path / "home")
    assert topology is not None
    assert not any("calibrated" in note for note in topology.notes)


def test_damaged_parts_cost_only_themselves(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "raw" / "nccl-topo.xml").write_text("<system>")
    (run_dir / "rank-00001" / "links.parquet").write_bytes(b"PAR1 not")
    topology = run_topology(read_links(run_dir), run_dir, tmp_path)
    assert topology is not None
    assert any("not well-formed" in note for note in topology.notes)
    assert [rank for rank, _ in check_in_facts(read_links(run_dir))] == [0]


def test_nothing_recorded_is_none(tmp_path: Path) -> None:
    assert run_topology([], tmp_path, tmp_path) is None


class Shell(App[None]):
    """Only the pane, with colours that its tones need."""

    CSS = ""

    def __init__(self, path: Path, loaded_run: Run) -> None:
        super().__init__()
        self.loaded = Loaded(path, build_report(loaded_run))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        names = ("muted", "faint", "accent-text", "status-complete", "status-partial", "status-broken", "cursor-line")
        return dict.fromkeys(names, "#888888")

    def compose(self) -> ComposeResult:
        yield TopologyPane(Session(loaded=self.loaded), id="topology")


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12)])
async def test_the_pane_draws_the_machine(run_dir: Path, size: tuple[int, int]) -> None:
    app = Shell(run_dir, open_run(str(run_dir)))
    async with app.run_test(size=size) as pilot:
        pane = app.query_one(TopologyPane)
        pane.show(app.loaded.report)
        await pilot.pause()
        drawn = pane.query_one("#drawing", Lines).plain
        assert "GPU0 " in drawn
        assert "NVSwitch (not visible)" in drawn
        assert "GPUs" in [n.name for n in pane.query_one("#headline", FigureStrip).items]
        table = pane.query_one("#link-classes", Table)
        assert [c.letter for c in table.rows][:2] == ["A", "B"]
        facts = pane.query_one("#facts", Lines)
        assert "not measured: costlab topo --calibrate" in facts.plain
        table.focus()
        await pilot.press("down")
        assert "PCIe 5 x16" in facts.plain
        assert "pcie_generation_now" in facts.plain, "facts of a link keep their source"
        assert "rank 1" in pane.query_one("#more", Lines).plain
        await pilot.press("p")
        assert pane.query_one("#matrix", Lines).display
        assert "NV18" in pane.query_one("#matrix", Lines).plain
        assert "PCIe 5 x16" in pane.markdown()
        named = pane.pointed()
        assert named is not None
        assert named.figure.value == 1.0


async def test_a_run_without_links_says_what_to_press(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    path = write_example_run(tmp_path / "home" / "runs" / "20261129-1402-llama-example-a1b2")
    for folder in path.glob("rank-*"):
        write_rows(folder, LinkRow, [])
    app = Shell(path, open_run(str(path)))
    async with app.run_test() as pilot:
        pane = app.query_one(TopologyPane)
        pane.show(app.loaded.report)
        await pilot.pause()
        assert pane.has_class("-empty")
        assert "costlab topo" in pane.query_one("#pane-empty", Lines).plain
