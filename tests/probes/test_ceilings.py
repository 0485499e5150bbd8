"""Ceilings of this machine: plausible against an independent measurement, short, and said how."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from costlab.probes import ceilings
from costlab.probes.ceilings import copy_gbps, last_level_cache, matmul_tflops

CPU = torch.device("cpu")


def test_matmul_on_cpu_counts_two_n_cubed() -> None:
    tflops, method = matmul_tflops(CPU, torch.float32)
    assert "1024 x 1024 x 1024 float32" in method and "median of" in method
    assert 0.001 < tflops < 50
    with mock.patch.object(ceilings, "_times", return_value=[1.0, 2.0, 100.0]):
        assert matmul_tflops(CPU, torch.float32)[0] == pytest.approx(2 * 1024**3 / 2e-3 / 1e12)


def test_copy_counts_reads_and_writes() -> None:
    gbps, method = copy_gbps(CPU)
    assert 0.1 < gbps < 5000
    assert "read + write" in method
    with (
        mock.patch.object(ceilings, "_times", return_value=[10.0]),
        mock.patch.object(ceilings, "_copy_bytes", return_value=1 << 20),
    ):
        assert copy_gbps(CPU)[0] == pytest.approx(2 * (1 << 20) / 10e-3 / 1e9)


def test_the_copy_is_larger_than_the_caches(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1024K", "96M", "?")):
        file = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}/size"
        file.parent.mkdir(parents=True)
        file.write_text(f"{size}\n")
    assert last_level_cache(tmp_path) == 96 << 20
    assert last_level_cache(tmp_path / "absent") == 0
    assert ceilings._copy_bytes(CPU) >= min(256 << 20, 4 * last_level_cache())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_ceilings_leave_no_memory_behind() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_reserved(device)
    tflops, method = matmul_tflops(device, torch.bfloat16)
    gbps, copied = copy_gbps(device)
    assert tflops > 10 and gbps > 100
    assert "8192" in method and "device to device" in copied
    workspace = 64 << 20  # cuBLAS keeps its workspace for the training's own products
    assert torch.cuda.memory_reserved(device) <= before + workspace
