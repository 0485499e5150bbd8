"""When symmetric memory is refused, and with which reason; its results on two GPUs are tests/benchmarks' matter."""

from __future__ import annotations

import pytest
import torch

from costlab.kernels.schedule.symmetric import NO_MULTICAST, refusal

CUDA = torch.device("cuda", 0)


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NO_MULTICAST, raising=False)
    assert refusal(CUDA, torch.float32, 2) == ""
    assert refusal(CUDA, torch.bfloat16, 8) == ""
    assert "needs CUDA" in refusal(torch.device("cpu"), torch.float32, 2)
    assert "fp32 and bf16" in refusal(CUDA, torch.float16, 2)
    assert refusal(CUDA, torch.float32, 3) == ""
    assert "nothing to reduce" in refusal(CUDA, torch.float32, 1)


def test_multicast_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_MULTICAST, "0")
    assert "with multicast off only" in refusal(CUDA, torch.float32, 2)
    monkeypatch.setenv(NO_MULTICAST, "1")
    assert refusal(CUDA, torch.float32, 2) == ""


def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("costlab.kernels.schedule.symmetric._present", lambda _: False)
    assert torch.__version__ in refusal(CUDA, torch.float32, 2)
