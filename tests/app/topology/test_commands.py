"""`costlab topo` and `costlab bench collectives` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from costlab.app.topology.commands import bench_collectives, topo
from costlab.probes.records import LinkRow
from costlab.probes.tables import write_rows
from tests.app.make_run import write_example_run

DATA = Path(__file__).parent / "data"
app = typer.Typer()
app.command(name="topo")(topo)
app.command(name="collectives")(bench_collectives)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("name", [p.name for p in sorted(DATA.iterdir()) if p.suffix in (".xml", ".txt")])
def test_every_file_is_shown_in_every_format(name: str) -> None:
    for form in ("text", "md", "json"):
        code, out, _ = run("topo", "--import", str(DATA / name), "--format", form)
        assert code == 0
        assert out
    assert {"nodes", "links", "doubts", "schedules"} <= set(json.loads(out))


def test_this_machine_is_shown_without_calibration() -> None:
    code, out, _ = run("topo", "--format", "json")
    assert code == 0
    data = json.loads(out)
    assert data["source"] == "this machine"
    assert [n for n in data["nodes"] if n["kind"] == "cpu"]


def test_bad_input_is_one_line_with_the_place(tmp_path: Path) -> None:
    bad = tmp_path / "bad.xml"
    bad.write_text('<system>\n<cpu numaid="zero"/></system>')
    code, out, err = run("topo", "--import", str(bad))
    assert (code, out) == (5, "")
    assert err == 'costlab: bad.xml:2: <cpu numaid="zero">: not a number\n'


def test_options_that_exclude_each_other() -> None:
    file = str(DATA / "h200x2-nccl-topo.xml")
    assert run("topo", "--calibrate", "--import", file)[0] == 2
    assert run("topo", "--run", "last", "--import", file)[0] == 2
    assert run("topo", "--calibrate", "--seconds", "0")[0] == 2
    code, _, err = run("collectives", "--op", "gather_all")
    assert code == 2
    assert "there are: all_reduce" in err
    assert run("collectives", "--min", "1M", "--max", "1K")[0] == 2
    assert run("collectives", "--min", "much")[0] == 2
    assert run("collectives", "--dtype", "fp8")[0] == 2
    assert run("collectives", "--beside", "no-such-file")[0] == 5


def test_a_runs_machine(tmp_path: Path) -> None:
    path = write_example_run(tmp_path / "home" / "runs" / "20261129-1402-llama-example-a1b2")
    row = LinkRow(rank=0, device="gpu0", kind="gpu", fact="busid", value="0000:01:00.0", source="NVML")
    write_rows(path / "rank-00000", LinkRow, [row])
    code, out, _ = run("topo", "--run", str(path), "--format", "json")
    assert code == 0
    assert [n["id"] for n in json.loads(out)["nodes"] if n["kind"] == "gpu"] == ["gpu0"]
    for folder in path.glob("rank-*"):
        write_rows(folder, LinkRow, [])
    code, _, err = run("topo", "--run", str(path))
    assert code == 5
    assert "recorded nothing of its machine's links" in err
    assert run("topo", "--run", "no-such-run")[0] == 5
