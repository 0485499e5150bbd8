"""`costlab bench kernels`: the process it starts, and what it prints of a result."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from costlab.app.kernel_bench.process import BenchFailed, run
from costlab.app.kernel_bench.render import faster, of_ceiling, render
from costlab.probes.kernel_spec import KERNELS, KernelBench, KernelRow, KernelSpec, KernelTime

torch = pytest.importorskip("torch")
HERE = "no GPU" if not torch.cuda.is_available() else ""


def row(**change: object) -> KernelRow:
    times = {
        "fused": KernelTime(called_ms=0.4, device_ms=0.25),
        "eager": KernelTime(called_ms=1.0, device_ms=1.0),
        "inductor": KernelTime(called_ms=0.6, device_ms=0.3),
    }
    plain = KernelRow(
        kernel="gated", shape="8 x 8", way="forward", times=times, ceiling_ms=0.2, bytes_moved=1, error=1e-3
    )
    return msgspec.structs.replace(plain, **change)


def bench(*rows: KernelRow) -> KernelBench:
    return KernelBench(device="GPU", torch="2", triton="3", copy_gbs=4200, matmul_tflops=790, samples=50, rows=rows)


def costlab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "costlab.app", *words], capture_output=True, text=True, check=False)


def test_ratios_are_to_the_quickest_peer_and_to_the_ceiling() -> None:
    assert faster(row(), called=False) == pytest.approx(1.2)
    assert faster(row(), called=True) == pytest.approx(1.5)
    assert of_ceiling(row(), "fused") == pytest.approx(0.8)


def test_what_was_not_measured_has_no_ratio() -> None:
    alone = row(times={"fused": KernelTime(called_ms=1, device_ms=1)})
    assert faster(alone, called=True) is None and of_ceiling(alone, "eager") is None
    assert faster(row(times={}), called=False) is None
    assert of_ceiling(row(ceiling_ms=0.0), "fused") is None


@pytest.mark.parametrize("form", ["text", "md"])
def test_table_bars_and_failures(form: str) -> None:
    failed = row(kernel="rope", times={}, failed={"inductor": "Out|of\x1b[31m memory"}, error=None)
    text = render(bench(row(), failed), form)
    assert "gated" in text and "80% of copy" in text and "1.2" in text
    assert "memory" in text and "\x1b" not in text


def test_text_fits_eighty_columns() -> None:
    rows = [row(kernel=name, way=way) for name in KERNELS for way in ("forward", "forward + backward")]
    assert max(map(len, render(bench(*rows), "text", 80).splitlines())) <= 80


def test_json_holds_the_measured_and_the_ratios() -> None:
    data = json.loads(render(bench(row()), "json"))
    (found,) = data["rows"]
    assert found["times"]["eager"]["device_ms"] == 1.0
    assert found["of_ceiling"]["fused"] == pytest.approx(0.8)
    assert found["faster_than_best"] == pytest.approx({"called": 1.5, "device": 1.2})


@pytest.mark.skipif(not HERE, reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    done = costlab("bench", "kernels", "--kernel", "gated")
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.startswith("costlab: nothing measured: ") and "CUDA" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"), [(("--kernel", "nothing"), "no kernel 'nothing'"), (("--samples", "0"), "--samples must be")]
)
def test_wrong_options_are_refused(words: tuple[str, ...], said: str) -> None:
    done = costlab("bench", "kernels", *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costlab.app.kernel_bench.process.MODULE", "costlab.probes.no_such_module")
    with pytest.raises(BenchFailed, match="no_such_module"):
        run(KernelSpec(), lambda _: None)


def test_every_kernel_has_a_case() -> None:
    from costlab.probes.kernel_bench import CASES

    assert tuple(CASES) == KERNELS
