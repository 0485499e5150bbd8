"""The look at a workload for fused kernels: places, sizes, numerics, and workloads that do not run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from costlab.kernels.fused.launch import INTERPRETED
from costlab.probes import tune
from costlab.probes.spec import RunSpec, SpecError, validate
from costlab.probes.tune_records import Scan, SiteRow

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes no fake tensors")
FILE = Path(__file__).with_name("tune_workload.py")


def spec(**options: object) -> RunSpec:
    return msgspec.convert({"workload": f"{FILE}:make", "device": "cpu", "dtype": "fp32"} | options, RunSpec)


def found(scan: Scan) -> dict[str, SiteRow]:
    return {s.kernel: s for s in scan.sites if s.path != "eager"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_functional_code_is_found_by_block_and_by_model(dtype: str) -> None:
    for compile in ("block", "model"):
        scan = tune.scan(spec(compile=compile, dtype=dtype))
        sites = found(scan)
        assert set(sites) == {"add_rms_norm", "gated"}, scan.sites
        for site, passes, columns in ((sites["add_rms_norm"], 8, 16), (sites["gated"], 8, 32)):
            assert (site.how, site.where, site.places) == ("pattern", "blocks.*", 3)
            assert (site.rows, site.columns) == (32, columns)
            assert site.bytes == 3 * passes * 32 * columns * (4 if dtype == "fp32" else 2)
        assert [c.ok for c in scan.checks] == [True], scan.checks
        assert scan.checks[0].worst is not None and 0 < scan.checks[0].worst <= scan.checks[0].bound
        assert ("not available on cpu" in scan.unavailable) == (not torch.cuda.is_available())


def test_nothing_is_captured_without_compile() -> None:
    assert tune.scan(spec(compile="none")).sites == []


def test_a_step_that_fails_is_a_finding() -> None:
    scan = tune.scan(spec(workload=f"{FILE}:broken"))
    assert scan.sites == [] and any("RuntimeError: no step" in f for f in scan.findings)


def test_a_rewrite_with_other_gradients_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from costlab.kernels.fused.patterns import gates

    right = gates.gated
    monkeypatch.setattr(gates, "gated", lambda gate, up, act: right(gate, up, act) * 1.01)
    scan = tune.scan(spec())
    assert [(c.names, c.ok) for c in scan.checks] == [
        (["add_rms_norm@blocks.*", "gated@blocks.*"], False),
        (["add_rms_norm@blocks.*"], True),
        (["gated@blocks.*"], False),
    ]
    assert scan.checks[0].why


def test_a_workload_that_cannot_be_built_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "spec.json"
    asked.write_bytes(msgspec.json.encode(spec(workload=f"{FILE}:nothing")))
    assert tune.main(["tune", str(asked), str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_plan_and_all_kernels_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="give one of them"):
        validate(RunSpec(fused=True, plan="x"))
    with pytest.raises(SpecError, match="--plan: cannot read"):
        validate(RunSpec(plan=str(tmp_path / "absent.json")))
