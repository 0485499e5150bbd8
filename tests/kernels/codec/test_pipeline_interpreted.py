"""The device path of staging without a device: kernels under Triton's interpreter, streams and events that do nothing.

It runs in its own process, because the interpreter must be chosen before the kernels are imported.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch


class FakeEvent:
    """An event of a device that has always finished."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, _stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _other: object) -> float:
        return 1.0


class FakeStream:
    """A stream that runs at once."""

    device = torch.device("cpu")

    def __init__(self, _device: object = None) -> None:
        pass

    def wait_stream(self, _other: object) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def main() -> None:
    """Save FP8, INT8 and log8 tensors through kernels, also non-finite and mostly zero ones, and read them back."""
    from costlab.kernels.codec import pipeline, plan, stage
    from costlab.kernels.codec.checkpoint import Checkpoint
    from costlab.kernels.codec.codecs import Codec, decode, encode
    from costlab.kernels.codec.manifest import latest
    from costlab.kernels.codec.policy import preset
    from costlab.kernels.codec.sparse import Layout

    torch.cuda.Event, torch.cuda.Stream = FakeEvent, FakeStream  # type: ignore[misc, assignment]
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()  # type: ignore[assignment, misc, return-value]
    torch.cuda.device = lambda _device: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda _device=None: FakeStream()  # type: ignore[assignment, return-value]
    # Room for what comes after the large one, so that one save goes both ways.
    stage.device_budget = lambda _device: 1 << 20
    stage.cuda_device = lambda _items: torch.device("cpu")
    plan._kernel_serves = lambda _tensor, choice: choice.codec in (Codec.FP8, Codec.INT8, Codec.LOG8)

    generator = torch.Generator().manual_seed(0)
    w = torch.randn(70, 90, generator=generator)
    w[3, 3], w[69, 89] = float("nan"), float("inf")
    thin = torch.randn(64, 64, generator=generator) * (torch.rand(64, 64, generator=generator) < 0.3)
    v = (torch.randn(50, 60, generator=generator) * 6 - 20).exp2()
    wrong = v.clone()
    wrong[1, 1] = -1.0
    tiled = torch.randn(32, 1024, generator=generator)
    tiled[17, 600] = float("nan")
    state = {
        "t.weight": tiled, "o.t.exp_avg": torch.randn(16, 1024, generator=generator).bfloat16(),
        "o.t.exp_avg_sq": (torch.randn(80, 64, generator=generator) * 6 - 20).exp2(), "odd": torch.arange(37).byte(),
        "transposed": torch.randn(40, 30, generator=generator).T, "lr": 1e-4,
        "w.weight": w, "thin.weight": thin, "norm.weight": torch.randn(90, generator=generator),
        "o.w.exp_avg": torch.randn(70, 90, generator=generator).bfloat16(), "o.w.exp_avg_sq": v,
        "o.x.exp_avg_sq": wrong, "step": 7, "big": torch.arange(700_000), "zero": torch.zeros(33, 40),
    }  # fmt: skip
    for name, snapshot in (("fp8", "device"), ("int8", "device"), ("fp8", "stream"), ("fp8", "auto")):
        root = Path(tempfile.mkdtemp())
        with pipeline.AsyncCheckpointer(
            root,
            name,
            slab_bytes=1 << 20,
            gate_every=0,
            snapshot=snapshot,  # type: ignore[arg-type]
        ) as checkpointer:
            for step in range(2):
                state |= {"lr": 1e-4 * 0.3**step, "step": 7 + 995 * step}
                report = checkpointer.save(step, state).result()
                assert report is not None and report.device_s == 0.001
                with Checkpoint.open(latest(root)) as checkpoint:  # type: ignore[arg-type]
                    checkpoint.verify()
                    for key, value in state.items():
                        if not isinstance(value, torch.Tensor):
                            assert checkpoint.value(key) == value
                            continue
                        choice = preset(name).choose(key, tuple(value.shape), value.dtype)
                        want = decode(encode(value, choice))
                        got = checkpoint.tensor(key)
                        assert got.dtype == value.dtype
                        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (name, step, key)
                    layouts = {n: places[0][1].layout for n, places in checkpoint.places.items()}
                    assert layouts["thin.weight"] is (Layout.BITMAP if step else Layout.DENSE)
                    assert layouts["zero"] is (Layout.CSR16 if step else Layout.DENSE)
                    assert checkpoint.places["t.weight"][0][1].patch_count == 1
                    assert checkpoint.places["w.weight"][0][1].patch_count == 2
                    assert checkpoint.places["o.x.exp_avg_sq"][0][1].patch_count == 1


def test_the_device_path_of_staging() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = f"import runpy; runpy.run_path({__file__!r})['main']()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
