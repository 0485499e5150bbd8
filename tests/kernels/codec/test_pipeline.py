"""The asynchronous pipeline on the CPU: what is saved, when it fails, how much memory it takes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from costlab.kernels.codec import files, pipeline
from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.codecs import Choice, Codec
from costlab.kernels.codec.errors import CheckpointError, CheckpointRefused
from costlab.kernels.codec.manifest import committed, latest
from costlab.kernels.codec.pipeline import AsyncCheckpointer
from costlab.kernels.codec.policy import Policy, preset
from costlab.kernels.codec.slabs import Region, SlabPool

MIB = 1 << 20


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.LayerNorm(200), torch.nn.Linear(200, 96))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 96)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["exact", "lossless", "fp8", "int8", "delta"])
def test_saves_of_a_training_loop_come_back(tmp_path: Path, name: str) -> None:
    model, optimizer = _trained()
    saved = {}
    with AsyncCheckpointer(tmp_path, name, slab_bytes=MIB) as checkpointer:
        checkpointer.attach(optimizer)
        for step in range(3):
            _step(model, optimizer)
            checkpointer.save(step, {"model": model, "optim": optimizer, "step": step})
            saved[step] = {k: v.clone() for k, v in model.state_dict().items()}
        report = checkpointer.wait()
    assert report is not None and report.step == 2 and report.preset == name
    assert report.state_bytes > 3 * 4 * 2 * 96 * 200 and report.file_bytes > 0
    assert {stage for stage, _, _ in report.timeline} >= {"launch", "write", "checksum", "stage", "sync", "commit"}
    for directory, manifest in committed(tmp_path):
        with Checkpoint.open(directory) as checkpoint:
            checkpoint.verify()
            assert checkpoint.value("step") == manifest.step
            for key, value in saved[manifest.step].items():
                got = checkpoint.tensor(f"model.{key}")
                exact = name in ("exact", "lossless") or value.ndim < 2
                assert torch.equal(got, value) if exact else (got - value).abs().max() < 0.05 * value.abs().max()
    assert len(list(committed(tmp_path))) == 3


def test_deltas_build_on_the_last_save_and_keyframes_start_anew(tmp_path: Path) -> None:
    model, optimizer = _trained()
    policy = Policy("delta", preset("delta").choices, keyframe_every=3)
    with AsyncCheckpointer(tmp_path, policy) as checkpointer:
        for step in range(5):
            _step(model, optimizer)
            checkpointer.save(step, {"model": model, "optim": optimizer})
            checkpointer.wait()
    chains = []
    for directory, manifest in sorted(committed(tmp_path), key=lambda pair: pair[1].step):
        with Checkpoint.open(directory) as checkpoint:
            entry = checkpoint.places["model.0.weight"][0][1]
            chains.append((entry.chain, manifest.base is not None, entry.choice.codec is Codec.DELTA4))
            # Closed loop: the error stays that of one delta.
            if manifest.step == 4:
                difference = checkpoint.tensor("model.0.weight") - model.state_dict()["0.weight"]
                assert difference.abs().max() < 2e-4
    assert chains == [(0, False, False), (1, True, True), (2, True, True), (0, False, False), (1, True, True)]
    shutil.rmtree(next(d for d, m in committed(tmp_path) if m.step == 1))
    with Checkpoint.open(next(d for d, m in committed(tmp_path) if m.step == 2)) as checkpoint:
        with pytest.raises(CheckpointError):
            checkpoint.tensor("model.0.weight")


def test_a_plan_serves_until_the_state_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may change their length, tensors their values; a tensor that moved or changed shape is planned anew."""
    plans: list[int] = []
    real = pipeline.lay_out
    monkeypatch.setattr(pipeline, "lay_out", lambda items: plans.append(1) or real(items))
    big, small = torch.zeros(300, 400), torch.zeros(7)
    states: list[dict[str, Any]] = []
    for step in range(6):
        states.append({"big": big, "small": small, "lr": 0.1 / 3**step, "step": 10**step, "text": "x" * (5 * step)})
    states[3]["small"] = torch.zeros(8)
    states[4]["text"] = "x" * 1000
    with AsyncCheckpointer(tmp_path, slab_bytes=MIB) as checkpointer:
        for step, state in enumerate(states):
            big.fill_(step)
            checkpointer.save(step, state)
            checkpointer.wait()
    assert len(plans) == 4
    for directory, manifest in committed(tmp_path):
        with Checkpoint.open(directory) as checkpoint:
            checkpoint.verify()
            want = states[manifest.step]
            assert (checkpoint.tensor("big") == manifest.step).all()
            assert checkpoint.tensor("small").shape == want["small"].shape
            assert all(checkpoint.value(name) == want[name] for name in ("lr", "step", "text"))


def test_changes_after_save_returns_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    parameters = {f"p{i}": torch.zeros(300, 400) for i in range(8)}
    with AsyncCheckpointer(tmp_path, slab_bytes=MIB) as checkpointer:
        for step in range(6):
            for value in parameters.values():
                value.fill_(step)
            checkpointer.save(step, parameters)
            for value in parameters.values():
                value.fill_(-1)
    for directory, manifest in committed(tmp_path):
        with Checkpoint.open(directory) as checkpoint:
            assert all((checkpoint.tensor(name) == manifest.step).all() for name in parameters)


def test_staging_memory_is_bounded_by_the_pool(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(600, 700) for i in range(6)} | {"s": torch.randn(5)}
    with AsyncCheckpointer(tmp_path, pool_bytes=2 * MIB, slab_bytes=MIB) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state)
        checkpointer.wait()
        assert checkpointer.pool.peak <= 2 and checkpointer.pool.allocated_bytes == 2 * MIB
    with Checkpoint.open(latest(tmp_path)) as checkpoint:  # type: ignore[arg-type]
        assert all(torch.equal(checkpoint.tensor(n), t) for n, t in state.items())


def test_compression_that_does_not_fit_a_bounded_pool_is_refused(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path, "lossless", pool_bytes=4 * MIB, slab_bytes=MIB) as checkpointer:
        with pytest.raises(CheckpointError, match="raise pool_bytes"):
            checkpointer.save(0, {"w": torch.randn(1000, 1000)})
        checkpointer.save(1, {"w": torch.randn(500, 500)})
        checkpointer.wait()
    assert [m.step for _, m in committed(tmp_path)] == [1]


def test_regions_hand_over_slabs_in_order_with_zeroed_gaps() -> None:
    pool, got = SlabPool(MIB), {}
    region = Region(pool, 4096, lambda index, slab: got.update({index: slab.array.copy()}))
    region.copy_in(5000, torch.full((10,), 7, dtype=torch.uint8))
    region.copy_in(MIB - 3, torch.full((MIB + 6,), 9, dtype=torch.uint8))
    region.finish()
    assert sorted(got) == [0, 1, 2]
    assert got[0][4096:5000].sum() == 0 and (got[0][5000:5010] == 7).all() and got[0][5010 : MIB - 3].sum() == 0
    assert (got[0][-3:] == 9).all() and (got[1] == 9).all() and (got[2][:3] == 9).all()


@pytest.mark.parametrize(("slab", "limit"), [(1000, None), (0, None), (MIB, MIB)])
def test_impossible_pools_are_refused(slab: int, limit: int | None) -> None:
    with pytest.raises(CheckpointError):
        SlabPool(slab, limit)


class _SlowDisk:
    """Makes every write wait until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        real = files.AtomicFile.write

        def write(file: files.AtomicFile, data: Any, offset: int) -> None:
            self.open.wait(20)
            real(file, data, offset)

        monkeypatch.setattr(files.AtomicFile, "write", write)


def test_back_pressure_skip_leaves_out_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _SlowDisk(monkeypatch)
    state = {"w": torch.randn(100, 100)}
    with AsyncCheckpointer(tmp_path, back_pressure="skip") as checkpointer:
        first, second = checkpointer.save(0, state), checkpointer.save(1, state)
        assert second.skipped and second.result() is None and not first.done()
        disk.open.set()
        checkpointer.wait()
        assert not checkpointer.save(2, state).skipped
    assert sorted(m.step for _, m in committed(tmp_path)) == [0, 2]


def test_back_pressure_wait_holds_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _SlowDisk(monkeypatch)
    state = {"w": torch.randn(100, 100)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        first = checkpointer.save(0, state)
        threading.Timer(0.2, disk.open.set).start()
        checkpointer.save(1, state)
        assert first.done()
    assert sorted(m.step for _, m in committed(tmp_path)) == [0, 1]


def test_a_vanished_directory_is_reported_at_the_next_step_and_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = _trained()
    root = tmp_path / "runs"
    checkpointer = AsyncCheckpointer(root)
    checkpointer.attach(optimizer)
    _step(model, optimizer)
    shutil.rmtree(root)
    handle = checkpointer.save(0, {"model": model})
    with pytest.raises(CheckpointError, match="No such file"):
        handle.result(10)
    with pytest.raises(CheckpointError, match="No such file"):
        _step(model, optimizer)
    _step(model, optimizer)
    assert not root.exists()
    root.mkdir()
    checkpointer.save(1, {"model": model})
    checkpointer.close()
    assert [m.step for _, m in committed(root)] == [1]
    assert len(checkpointer.failures) == 1


def test_failures_can_be_warnings(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    checkpointer = AsyncCheckpointer(root, on_failure="warn")
    shutil.rmtree(root)
    checkpointer.save(0, {"w": torch.zeros(3)})
    with pytest.warns(RuntimeWarning, match="not saved"):
        checkpointer.wait()
    checkpointer.close()


def test_a_write_error_leaves_no_file_and_gives_the_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    state = {"w": torch.randn(1000, 1000)}
    with AsyncCheckpointer(tmp_path, pool_bytes=4 * MIB, slab_bytes=MIB) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(files.AtomicFile, "write", broken)
            checkpointer.save(0, state)
            with pytest.raises(CheckpointError, match="Input/output error"):
                checkpointer.wait()
        assert latest(tmp_path) is None
        assert not list(tmp_path.rglob("*.clck*"))
        checkpointer.save(1, state)
        checkpointer.wait()
        assert len(checkpointer.pool._free) == checkpointer.pool._made


def test_a_state_that_cannot_be_stored_is_an_error_of_the_call(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="set"):
            checkpointer.save(0, {"x": {1, 2}})
        checkpointer.save(1, {"x": 1})
        with pytest.raises(CheckpointError, match="never written twice"):
            checkpointer.save(1, {"x": 1})


def _hazard() -> tuple[dict[str, torch.Tensor], Policy]:
    """Second moments of many binades and a policy that codes them linearly."""
    v = (torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 6 - 30).exp2()
    state = {"o.w.exp_avg": v.sqrt(), "o.w.exp_avg_sq": v, "o.w.step": torch.tensor(900.0)}
    return state, preset("fp8").with_overrides(("*.exp_avg_sq", Choice(Codec.FP8, (16, 16))))


def test_the_gate_refuses_a_lossy_save_that_would_break_the_first_update(tmp_path: Path) -> None:
    state, policy = _hazard()
    with AsyncCheckpointer(tmp_path, policy) as checkpointer:
        with pytest.raises(CheckpointRefused, match=r"o\.w"):
            checkpointer.save(0, state)
    assert latest(tmp_path) is None
    with AsyncCheckpointer(tmp_path, "fp8") as checkpointer:
        checkpointer.save(0, state)
        report = checkpointer.wait()
    assert report is not None and report.update_error is not None and report.update_error < 0.1


def test_a_refused_save_can_be_exact_instead(tmp_path: Path) -> None:
    state, policy = _hazard()
    with AsyncCheckpointer(tmp_path, policy, on_refusal="exact") as checkpointer:
        checkpointer.save(0, state)
    with Checkpoint.open(latest(tmp_path)) as checkpoint:  # type: ignore[arg-type]
        assert checkpoint.manifest.preset == "exact" and (checkpoint.manifest.update_error or 0) > 0.1
        assert torch.equal(checkpoint.tensor("o.w.exp_avg_sq"), state["o.w.exp_avg_sq"])


def test_non_finite_weights_are_kept_by_every_preset(tmp_path: Path) -> None:
    w = torch.randn(64, 64)
    w[3, 3], w[60, 1] = float("nan"), float("inf")
    for name in ("fp8", "int8", "delta", "lossless"):
        with AsyncCheckpointer(tmp_path / name, name) as checkpointer:
            for step in (0, 1):
                checkpointer.save(step, {"w": w})
        with Checkpoint.open(latest(tmp_path / name)) as checkpoint:  # type: ignore[arg-type]
            got = checkpoint.tensor("w")
            assert torch.isnan(got[3, 3]) and got[60, 1] == float("inf") and torch.isfinite(got).sum() == 64 * 64 - 2


def _run(code: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **more)


_ONE_SAVE = """
    import sys, torch
    from costlab.kernels.codec.errors import CheckpointError
    from costlab.kernels.codec.pipeline import AsyncCheckpointer
    checkpointer = AsyncCheckpointer(sys.argv[1])
    PREPARE
    checkpointer.save(0, {"w": torch.randn(2000, 1000)})
    try:
        checkpointer.wait()
    except CheckpointError as error:
        print("ERROR", error)
    RESTORE
    checkpointer.save(1, {"w": torch.randn(20, 10)})
    print("SAVED", checkpointer.wait().step)
"""


def test_a_full_disk_is_a_clear_error_and_training_goes_on(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))"
    done = _run(_ONE_SAVE.replace("PREPARE", limit).replace("RESTORE", ""), str(tmp_path))
    assert "ERROR saving" in done.stdout and "File too large" in done.stdout, done.stderr
    assert "SAVED 1" in done.stdout
    assert [m.step for _, m in committed(tmp_path)] == [1]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_read_only_directory_is_a_clear_error_and_training_goes_on(tmp_path: Path) -> None:
    """Root ignores permissions, so the save is made as nobody where the tests run as root."""
    prepare = "import os; os.chmod(sys.argv[1], 0o555); os.getuid() == 0 and os.setuid(65534)"
    restore = "print('AS', os.getuid()); sys.exit() if os.getuid() == 65534 else os.chmod(sys.argv[1], 0o755)"
    done = _run(_ONE_SAVE.replace("PREPARE", prepare).replace("RESTORE", restore), str(tmp_path / "root"))
    assert "ERROR saving" in done.stdout and "Permission denied" in done.stdout, done.stderr
    (tmp_path / "root").chmod(0o755)
    assert latest(tmp_path / "root") is None


def test_kill_9_at_random_moments_always_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("killing.py")), str(tmp_path / "runs"), "20", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["moments"] == 20


def test_death_at_every_stage_of_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    """A forked child dies at its n-th system call that changes the disk, for every n."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("dying.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5  # at least: the folder, the file, its size, a write, a flush


def test_reports_say_when_nothing_was_saved(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.wait() is None
        checkpointer.wait_staged()
        checkpointer.warm_up({"w": torch.randn(100, 100)})
    assert pipeline.COUNT_ZEROS_EVERY > 0 and list(tmp_path.iterdir()) == []
