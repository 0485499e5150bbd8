"""`costlab plan`: the answer, its three formats, and one line for what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from costlab.app.cli import app
from costlab.app.plan.cli import parse_size

XML = """<system version="1">
<cpu numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
<pci busid="0000:01:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
<gpu dev="0" sm="90" rank="0"><nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/></gpu></pci>
<pci busid="0000:02:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
<gpu dev="1" sm="90" rank="1"><nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/></gpu></pci>
<nic><net name="eth0" dev="0" speed="25000"/></nic></cpu></system>"""


@pytest.fixture
def host(tmp_path: Path) -> str:
    file = tmp_path / "host.xml"
    file.write_text(XML)
    return str(file)


def plan(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    return done.exit_code, done.stdout, done.stderr


def report(*arguments: str) -> dict[str, object]:
    code, out, err = plan(*arguments, "-f", "json")
    assert code == 0, err
    found: dict[str, object] = json.loads(out)
    return found


def test_the_hybrid_is_chosen_on_a_daisy_chain_and_beats_the_ring(host: str) -> None:
    found = report("-t", host, "-s", "1GiB", "-n", "64", "--per-host", "8", "--wiring", "line")
    chosen = found["chosen"]["schedules"]  # type: ignore[index]
    assert chosen[0]["schedule"] == "hybrid"
    times = {row["schedule"]: row["seconds"] for row in chosen}
    assert times["ring"] / times["hybrid"] > 1.5
    assert f"hybrid in {chosen[0]['chunks']} chunks" in found["sentence"]  # type: ignore[operator]


def test_no_schedule_beats_the_bound_and_the_simulator_agrees(host: str) -> None:
    found = report("-t", host, "-s", "256MiB", "-n", "16", "--per-host", "4")
    for point in found["curve"]:  # type: ignore[attr-defined]
        assert all(row["seconds"] >= point["bound"] * 0.999 for row in point["schedules"])
        assert point["schedules"][0]["seconds"] == min(row["seconds"] for row in point["schedules"])
    checks = found["checks"]
    assert {row["schedule"] for row in checks} == {"ring", "chain", "two-level", "hybrid"}  # type: ignore[attr-defined]
    for row in checks:  # type: ignore[attr-defined]
        assert row["simulated"] == pytest.approx(row["modelled"], rel=0.15), row


def test_a_slow_host_goes_to_an_end_of_the_chain(host: str) -> None:
    found = report("-t", host, "-s", "1GiB", "-n", "8", "--slow", "1:0.25")
    hybrid = next(r for r in found["chosen"]["schedules"] if r["schedule"] == "hybrid")  # type: ignore[index]
    assert 1 in (hybrid["order"][0], hybrid["order"][-1])


def test_text_fits_eighty_columns_and_says_what_matters(host: str) -> None:
    code, out, _ = plan("-t", host, "-n", "1024", "--per-host", "8")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for words in ("ALL SCHEDULES", "SIMULATOR", "lower bound", "at least 498 ms", "(capital: chosen)", "128 switched"):
        assert words in out


def test_markdown_escapes_the_files_name(tmp_path: Path) -> None:
    file = tmp_path / "a|b_*c*.xml"
    file.write_text(XML)
    code, out, _ = plan("-t", str(file), "-f", "md")
    assert code == 0
    assert "a|b_*c*" not in out
    assert "| size | nccl | ring |" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-s", "banana"], 2, "is not a size"),
        (["-s", "0"], 2, "--size must be"),
        (["-n", "70000000"], 2, "--ranks must be"),
        (["--per-host", "900000000"], 2, "at most 65,536 ranks"),
        (["--network", "1e12"], 2, "below 1e9"),
        (["--slow", "9:0.5"], 2, "hosts are 0 to"),
        (["--slow", "half"], 2, "HOST:FRACTION"),
        (["--network", "0"], 2, "--network must be above zero"),
        (["--leaf", "-1"], 2, "cannot be negative"),
    ],
)
def test_bad_requests_get_one_line(host: str, arguments: list[str], code: int, words: str) -> None:
    got, out, err = plan("-t", host, *arguments)
    assert (got, out) == (code, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_bad_files_get_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.xml"
    broken.write_text("<system><cpu>")
    for name in (str(broken), str(tmp_path / "absent.xml")):
        code, _, err = plan("-t", name)
        assert code == 5
        assert len(err.strip().splitlines()) == 1


def test_sizes() -> None:
    sizes = {"4096": 4096, "64MB": 64_000_000, "1GiB": 1 << 30, "1.5k": 1500, "2 MiB": 2 << 20, "7b": 7}
    assert {text: parse_size(text) for text in sizes} == sizes


def test_planning_needs_no_torch(host: str) -> None:
    code = f"""
import sys
from costlab.app.cli import app
try:
    app(["plan", "-t", {host!r}, "-n", "16"])
except SystemExit as stop:
    assert not stop.code
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
