"""Energy counters: a RAPL tree and a driver of our own making, wraps, refusals and what gets no row."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from costlab.probes.energy import EnergyProbe, Package, rapl_packages
from costlab.probes.nvml import Nvml

from .fake_nvml import FakeNvml

RANGE = 262_143_328_850


def make_zone(root: Path, zone: str, name: str, energy: int, wraps: int = RANGE) -> Path:
    folder = root / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{wraps}\n")
    return folder


def session(fake: FakeNvml) -> Nvml:
    module: Any = fake
    return Nvml(module)


@given(st.integers(1, RANGE), st.data())
def test_spent_energy_survives_a_wrap(wraps: int, data: st.DataObject) -> None:
    before = data.draw(st.integers(0, wraps - 1))
    spent = data.draw(st.integers(0, wraps - 1))
    package = Package("package-0", Path("/none"), wraps)
    assert package.spent_uj(before, (before + spent) % wraps) == spent


def test_packages_are_summed_and_subdomains_left_out(tmp_path: Path) -> None:
    first = make_zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    second = make_zone(tmp_path, "intel-rapl:1", "package-1", RANGE - 500_000)
    make_zone(tmp_path, "intel-rapl:0:0", "core", 7)
    make_zone(tmp_path, "intel-rapl:2", "psys", 7)
    probe = EnergyProbe(None, powercap=tmp_path)
    with probe.phase("measure", steps=10):
        (first / "energy_uj").write_text("3000000\n")
        (second / "energy_uj").write_text("500000\n")  # wrapped
    (row,) = probe.rows(4)
    assert row.joules == pytest.approx(3.0)
    assert (row.rank, row.phase, row.steps) == (4, "measure", 10)
    assert row.seconds > 0
    assert "package-0, package-1" in row.source and "whole machine" in row.source
    assert probe.reasons() == []


def test_only_the_first_rank_of_a_machine_reports_the_cpu(tmp_path: Path) -> None:
    make_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    probe = EnergyProbe(None, powercap=tmp_path, local_rank=1)
    with probe.phase("measure", steps=1):
        pass
    assert probe.rows(1) == []
    assert "first rank" in probe.reasons()[0]


def test_no_powercap_and_no_permission_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rapl_packages(tmp_path) == ([], "this machine has no CPU energy counter (RAPL)")
    make_zone(tmp_path, "intel-rapl:0", "package-0", 0)

    def denied(_: Package) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Package, "read", denied)
    assert rapl_packages(tmp_path) == ([], "the CPU energy counter (RAPL) is readable by root only")


def test_a_damaged_counter_is_a_reason(tmp_path: Path) -> None:
    zone = make_zone(tmp_path, "intel-rapl:0", "package-0", 5)
    probe = EnergyProbe(None, powercap=tmp_path)
    with probe.phase("measure", steps=1):
        (zone / "energy_uj").write_text("\n")
    assert probe.rows(0) == []
    assert "RAPL" in probe.reasons()[0]


def test_a_phase_longer_than_the_counter_can_tell_has_no_row(tmp_path: Path) -> None:
    zone = make_zone(tmp_path, "intel-rapl:0", "package-0", 5, wraps=1000)  # 1 mJ: wraps within a microsecond
    probe = EnergyProbe(None, powercap=tmp_path)
    with probe.phase("measure", steps=1):
        (zone / "energy_uj").write_text("6\n")
    assert probe.rows(0) == []
    assert "wrap" in probe.reasons()[0]


def test_gpu_energy_is_the_counters_difference() -> None:
    fake = FakeNvml()
    probe = EnergyProbe(1, nvml=session(fake))
    with probe.phase("warm-up", steps=1):
        pass
    with probe.phase("measure", steps=5) as reading:
        fake.energy_mj[1] += 4_500
        reading.steps = 6
    (row,) = probe.rows(0)
    assert (row.phase, row.steps, row.source) == ("measure", 6, "NVML energy counter of GPU 1")
    assert row.joules == pytest.approx(4.5)
    assert "did not move" in probe.reasons()[0]


def test_the_gpu_is_found_by_uuid_before_its_index() -> None:
    fake = FakeNvml()
    probe = EnergyProbe(0, nvml=session(fake), uuid="11aa")
    with probe.phase("measure", steps=1):
        fake.energy_mj[1] += 2_000
    assert probe.rows(0)[0].joules == pytest.approx(2.0)


def test_visible_devices_map_cuda_to_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    fake = FakeNvml()
    probe = EnergyProbe(0, nvml=session(fake))
    with probe.phase("measure", steps=1):
        fake.energy_mj[1] += 1_000
    assert probe.rows(0)[0].joules == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fake", "index", "words"),
    [
        (FakeNvml(refuse=("nvmlInit",)), 0, "NVML: Not Supported"),
        (FakeNvml(refuse=("nvmlDeviceGetTotalEnergyConsumption",)), 0, "no energy counter: Not Supported"),
        (FakeNvml(count=1), 3, "does not show GPU 3"),
    ],
)
def test_refusals_are_reasons(fake: FakeNvml, index: int, words: str) -> None:
    probe = EnergyProbe(index, nvml=session(fake))
    with probe.phase("measure", steps=1):
        pass
    assert probe.rows(0) == []
    assert words in probe.reasons()[0]


def test_a_counter_lost_within_the_phase_is_a_reason() -> None:
    fake = FakeNvml()
    probe = EnergyProbe(0, nvml=session(fake))
    with probe.phase("measure", steps=1):
        fake.refuse = ("nvmlDeviceGetTotalEnergyConsumption",)
    assert probe.rows(0) == []
    assert "Not Supported" in probe.reasons()[0]


def test_the_phase_is_recorded_when_its_work_raises() -> None:
    fake = FakeNvml()
    probe = EnergyProbe(0, nvml=session(fake))
    with pytest.raises(ValueError, match="broken"), probe.phase("measure", steps=1):
        fake.energy_mj[0] += 1_000
        raise ValueError("broken")
    assert len(probe.rows(0)) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_busy_gpu_draws_a_plausible_power() -> None:
    probe = EnergyProbe(0)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + 2.0
    with probe.phase("busy", steps=1):
        while time.monotonic() < end:
            torch.mm(a, a)
            torch.cuda.synchronize()
    (row,) = probe.rows(0)
    assert 30 < row.joules / row.seconds < 1500
