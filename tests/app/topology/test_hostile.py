"""Damaged and hostile files are refused with line and reason; nothing else ever comes out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costlab.app.report.topology import render_topology_markdown, render_topology_text
from costlab.app.topology import xmlread
from costlab.app.topology.load import load_bytes, load_file
from costlab.app.topology.model import Topology, TopologyProblem

DATA = Path(__file__).parent / "data"
REAL = sorted(p for p in DATA.iterdir() if p.suffix in (".xml", ".txt"))
LAUGHS = '<!DOCTYPE s [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>\n<system><cpu numaid="&b;"/></system>'
OUTSIDE = '<!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/passwd">]>\n<system><cpu numaid="&a;"/></system>'


def pci(inner: str = "", **attributes: str) -> str:
    text = " ".join(f'{k}="{v}"' for k, v in {"busid": "0000:01:00.0", "class": "0x030200", **attributes}.items())
    return f'<system version="1">\n<cpu numaid="0">\n<pci {text}>{inner}</pci></cpu></system>'


REFUSED: list[tuple[str, str, int | None, str]] = [
    ("entities", LAUGHS, 1, "entities forbidden"),
    ("external entity", OUTSIDE, 1, "forbidden"),
    ("nested too deep", "<system>\n" + "<pci>" * 300 + "</pci>" * 300 + "</system>", 2, "nested deeper"),
    ("cut off", '<system version="1">\n<cpu numaid="0">\n', 3, "not well-formed"),
    ("another root", "\n<html/>", 2, "not the root of a topology"),
    ("no cpu", '<system version="1"/>', 1, "no <cpu>"),
    ("numaid", '<system>\n<cpu numaid="many"/></system>', 2, "not a number"),
    ("fraction", '<system>\n<cpu numaid="0.5"/></system>', 2, "not a whole number"),
    ("infinite", '<system>\n<cpu numaid="inf"/></system>', 2, "not a number"),
    ("mask", '<system>\n\n<cpu numaid="0" affinity="zz"/></system>', 3, "not a mask"),
    ("no busid", pci(busid=""), 3, "without busid"),
    ("link width", pci(link_width="x16"), 3, "not a number"),
    ("graph without id", "<graphs>\n<graph/></graphs>", 2, "without id"),
    ("no graphs", "<graphs/>", 1, "no <graph>"),
    ("channels cut", '<graphs>\n<graph id="0" nchannels="2">\n<channel/></graph></graphs>', 2, "2 channels and has 1"),
    ("channel content", '<graphs>\n<graph id="0">\n<channel>\n<cpu/></channel></graph></graphs>', 4,
     "only gpu and net"),
    ("channel device", '<graphs><graph id="0"><channel>\n<gpu dev="-1"/></channel></graph></graphs>', 2,
     "device number"),
    ("hwloc without objects", "<topology/>", 1, "no <object>"),
    ("hwloc numa", '<topology>\n<object type="Machine"><object type="NUMANode"/></object></topology>', 2, "os_index"),
    ("hwloc matrix",
     '<topology><object type="Machine"/>\n<distances2hetero nbobjs="3" name="NVLinkBandwidth"><indexes>1 2</indexes>'
     "</distances2hetero></topology>", 2, "2 indexes and 0 values for 3 objects"),
    ("empty", "", None, "empty"),
    ("other text", "hello\nworld", 1, "not a topology"),
    ("matrix word", "\tGPU0\tGPU1\nGPU0\t X \tNV9\nGPU1\tFOO\t X ", 3, "'FOO' is not a path"),
    ("row twice", "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU0\t X \tSYS", 3, "second row"),
    ("row missing", "\tGPU0\tGPU1\nGPU0\t X \tSYS", 1, "GPU1"),
    ("too many cells", "\tGPU0\tGPU1\nGPU0\t X \tSYS\tSYS\nGPU1\tSYS\t X ", 2, "3 cells"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "reason"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_line_and_reason(text: str, line: int | None, reason: str) -> None:
    with pytest.raises(TopologyProblem) as caught:
        load_bytes(text.encode(), "file.xml")
    assert reason in caught.value.reason
    assert caught.value.line == line
    assert str(caught.value).startswith("file.xml:")


def test_size_and_number_of_elements_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(xmlread, "MAX_ELEMENTS", 100)
    with pytest.raises(TopologyProblem, match="more than 100 elements"):
        load_bytes(b"<system>" + b"<cpu/>" * 200 + b"</system>", "file.xml")
    with pytest.raises(TopologyProblem, match="too many or too long"):
        load_bytes(b'<system a="' + b"x" * (xmlread.MAX_TEXT + 1) + b'"/>', "file.xml")
    large = tmp_path / "large.xml"
    with large.open("wb") as sink:
        sink.truncate(xmlread.MAX_BYTES + 1)
    with pytest.raises(TopologyProblem, match="larger than 32 MiB"):
        load_file(large)


def test_missing_file_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(TopologyProblem, match="cannot be read"):
        load_file(tmp_path / "none.xml")


def test_a_declared_dtd_without_entities_is_fine() -> None:
    assert load_file(DATA / "hwloc-nvidiaDGX2.xml").gpus


BAD_VALUES: list[tuple[str, str, str, str]] = [
    ("nvlink to itself", pci('<gpu dev="0" sm="70"><nvlink target="0000:01:00.0" count="2"/></gpu>'), "nvlink target",
     "left out"),
    ("nvlink to nobody", pci('<gpu dev="0" sm="70"><nvlink target="0000:77:00.0" count="2"/></gpu>'), "nvlink target",
     "left out"),
    ("empty speed", pci(link_speed="", link_width="16"), "", ""),
    ("odd speed", pci(link_speed="fast", link_width="16"), "PCIe speed", "none"),
    ("idle GPU", pci('<gpu dev="0"/>', link_speed="2.5 GT/s PCIe", link_width="16"), "PCIe speed", "idle"),
    ("absurd NIC", pci('<nic><net name="a" speed="200000000"/></nic>', **{"class": "0x020700"}), "network speed",
     "no port"),
    ("peer link to nobody", pci('<pcilink target="0000:99:00.0"/>', **{"class": "0x060400"}), "pcilink target",
     "left out"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "what", "taken"), [b[1:] for b in BAD_VALUES], ids=[b[0] for b in BAD_VALUES])
def test_values_that_cannot_be_right_are_doubts_not_figures(text: str, what: str, taken: str) -> None:
    topology = load_bytes(text.encode(), "file.xml")
    if what:
        (doubt,) = topology.doubts
        assert doubt.what == what
        assert taken in doubt.taken
    suspicious = [x for x in topology.links if x.kind in ("nvlink", "network") or "unknown" in x.label]
    assert all(x.nominal_gbps is None for x in suspicious)


def test_unknown_elements_and_devices_seen_twice_are_said() -> None:
    topology = load_bytes(pci("<future/>").encode(), "file.xml")
    assert "future (line 3)" in topology.notes[0]
    twice = pci().replace("</cpu>", '<pci busid="0000:02:00.0" class="0x030200"><gpu dev="0"/></pci></cpu>')
    topology = load_bytes(twice.encode(), "file.xml")
    assert [g.id for g in topology.gpus] == ["gpu0", "gpu0#2"]
    assert topology.doubts[0].what == "the same device twice"


def test_names_from_a_file_do_not_reach_the_terminal_or_markdown_as_commands() -> None:
    name = "mlx\\&#27;[31m&lt;b>|`x`[a](http://b)"
    text = pci(f'<nic><net name="{name}" speed="1000"/></nic>', **{"class": "0x020700"}).replace("&#27;", "")
    topology = load_bytes(text.encode(), "file.xml")
    assert "\x1b" not in render_topology_text(topology)
    assert "<b>" not in render_topology_markdown(topology).replace("```text", "").split("```")[-1]


def outcome(data: bytes) -> Topology | None:
    """Either a topology or its refusal; anything else fails the test."""
    try:
        topology = load_bytes(data, "file")
    except TopologyProblem:
        return None
    render_topology_text(topology)
    return topology


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    outcome(data)
    outcome(b"<system>" + data + b"</system>")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_real_files_with_damage(data: st.DataObject) -> None:
    small = [p for p in REAL if p.stat().st_size < 5000]
    raw = bytearray(data.draw(st.sampled_from(small)).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.integers(0, 255))
        else:
            del raw[at : at + data.draw(st.integers(1, 40))]
        if not raw:
            break
    outcome(bytes(raw))
