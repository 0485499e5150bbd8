"""Checkpoints of real training: two gloo ranks with FSDP2, one process alone, failures on one rank, torn copies."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from costlab.probes import checkpoint, checkpoint_state
from costlab.probes.checkpoint import measure
from costlab.probes.checkpoint_modes import Background, Pending, Saver, Staged, Sync, stager_is_reusable
from costlab.probes.checkpoint_resume import horizon
from costlab.probes.checkpoint_savers import savers
from costlab.probes.checkpoint_state import (
    bits,
    blank,
    identical,
    in_parts,
    leaves,
    put_in,
    snapshot,
    subtree,
    training_state,
    units,
)
from costlab.probes.records import CheckpointRow
from costlab.probes.stall import stall

CPU = torch.device("cpu")
WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both ranks' results of all scenarios."""
    out = tmp_path_factory.mktemp("checkpoint")
    script = Path(__file__).with_name("checkpoint_ranks.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, str(script), str(r), str(WORLD), str(out / "store"), str(out)] for r in range(WORLD)]
    logs = [(out / f"log-{r}.txt").open("w+") for r in range(WORLD)]
    running = [subprocess.Popen(c, env=env, stdout=log, stderr=log) for c, log in zip(commands, logs, strict=True)]
    try:
        codes = [p.wait(timeout=300) for p in running]
    finally:
        for process in running:
            process.kill()
    for log in logs:
        log.seek(0)
    assert codes == [0, 0], "\n".join(log.read()[-3000:] for log in logs)
    results: list[dict[str, Any]] = [json.loads((out / f"rank-{r}.json").read_text()) for r in range(WORLD)]
    return results


def rows_of(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["mode"], r["op"]): r for r in result["rows"]}


def test_every_configuration_saves_and_restores_exactly(ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        rows = rows_of(results["all"])
        assert {m for m, _ in rows} == {
            "sync", "async:default", "async:background", "async:process",
            "costlab:exact", "costlab:fp8", "costlab:exact+replica",
        }  # fmt: skip
        for (mode, op), row in rows.items():
            assert row["ok"], (mode, op, row["note"])
            assert row["rank"] == rank and row["total_ms"] > 0
            exact = mode != "costlab:fp8"
            assert row["lossy"] is not exact
            assert row["identical"] is (True if op == "load" and exact else None)
            assert row["within_bound"] is (True if op == "load" and not exact else None)


def test_the_engine_stores_less_by_fp8_and_says_how_many_bits(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        rows = rows_of(results["all"])
        exact, fp8 = rows["costlab:exact", "save"], rows["costlab:fp8", "save"]
        assert fp8["bytes"] < exact["bytes"] and exact["bits"] >= 32
        assert exact["state_bytes"] == fp8["state_bytes"] <= exact["bytes"]
        assert exact["update_error"] is None and 0 < fp8["update_error"] < 0.1
        assert "first resumed update off by at most" in fp8["note"]


def test_the_timeline_is_in_order_and_beside_measured_ceilings(ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        for mode in ("costlab:exact", "costlab:fp8", "costlab:exact+replica"):
            found = {s["stage"]: s for s in results["all"]["stages"] if s["mode"] == mode}
            assert {"launch", "write", "sync", "commit", "to disk"} <= set(found)
            assert ("replica" in found) is (mode == "costlab:exact+replica")
            assert ("encode" in found) is (mode == "costlab:fp8")
            for stage in found.values():
                assert stage["rank"] == rank and stage["busy_ms"] >= 0
                if stage["start_ms"] is not None:
                    assert 0 <= stage["start_ms"] <= stage["end_ms"]
                    assert stage["busy_ms"] <= stage["end_ms"] - stage["start_ms"] + 1e-6
            total = rows_of(results["all"])[mode, "save"]["total_ms"]
            assert max(s["end_ms"] for s in found.values() if s["end_ms"] is not None) <= total + 5
            assert found["launch"]["ceiling_gbps"] > 0 and found["to disk"]["ceiling_gbps"] > 0
            assert "writers" in found["to disk"]["ceiling"]


def test_the_error_table_is_of_the_classes_that_are_coded(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        table = {r["tensor_class"]: r for r in results["all"]["codecs"]}
        assert {k: r["codec"] for k, r in table.items()} == {
            "weight": "fp8 16x16", "first moment": "fp8 16x16", "second moment": "log8",
        }  # fmt: skip
        assert all(0 < r["rel_l2"] < 0.05 and 7 < r["bits"] < 9 for r in table.values())
        assert table["second moment"]["flushed"] == 0


def test_training_resumes_from_what_the_engine_restored(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        losses = {(r["mode"], r["after"]): r for r in results["all"]["resumed"]}
        for mode in ("costlab:exact", "costlab:fp8", "costlab:exact+replica"):
            assert [n for m, n in losses if m == mode] == [0, 1, 5, 40]
        for (mode, _), row in losses.items():
            if mode != "costlab:fp8":  # the same state, data and order: the same bits
                assert row["loss"] == row["exact_loss"]
        assert losses["costlab:fp8", 0]["loss"] != losses["costlab:fp8", 0]["exact_loss"]
        assert losses["costlab:fp8", 40]["loss"] == pytest.approx(losses["costlab:fp8", 40]["exact_loss"], abs=1e-4)
        assert results["all"]["repeated"] == 3 * 41


def test_sizes_are_the_state_and_little_more(ranks: list[dict[str, Any]]) -> None:
    parameters = 3 * (32 * 32 + 32)
    state = 3 * 4 * parameters + 6 * 4 * WORLD  # weights and two moments in fp32; `step` is held by every rank
    for op, overhead in (("load", 1.0), ("save", 5.0)):  # tiny tensors: the files are mostly headers
        total = sum(rows_of(r["all"])["sync", op]["bytes"] for r in ranks)
        assert state <= total <= state * overhead


def test_the_stall_belongs_to_the_steps_around_the_save(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        steps = results["all"]["steps"]
        control = [s["ms"] for s in steps if s["role"] == "control"]
        window = [s["ms"] for s in steps if s["role"] == "save_sync"]
        row = rows_of(results["all"])["sync", "save"]
        expected = row["blocked_ms"] + sum(window) - len(window) * median(control)
        assert len(window) >= 4 and len(control) >= 4 * 5
        assert row["stall_ms"] == pytest.approx(expected)
        assert row["stall_low_ms"] <= row["stall_ms"] <= row["stall_high_ms"]
        assert [s["step"] for s in steps] == list(range(len(steps)))


def test_the_sync_save_blocks_for_all_its_time(ranks: list[dict[str, Any]]) -> None:
    row = rows_of(ranks[0]["all"])["sync", "save"]
    assert row["blocked_ms"] == row["total_ms"]
    background = rows_of(ranks[0]["all"])["async:background", "save"]
    assert background["blocked_ms"] < background["total_ms"]


def test_training_goes_on_as_if_nothing_had_been_saved(ranks: list[dict[str, Any]]) -> None:
    assert all(results[name]["unharmed"] for results in ranks for name in ("all", "trouble", "poor"))


def test_nothing_is_left_on_disk(ranks: list[dict[str, Any]]) -> None:
    assert not any(results[name]["left"] for results in ranks for name in ("all", "trouble", "poor"))


def test_one_asynchronous_configuration_is_the_best_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    best = [[r["mode"] for r in results["all"]["rows"] if r["note"].startswith("best of 5")] for results in ranks]
    assert best[0] == best[1] and len(best[0]) == 1 and best[0][0].startswith(("async:", "costlab:exact"))


def test_a_failure_on_one_rank_is_a_row_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        rows = rows_of(results["trouble"])
        for mode in ("async:trouble-prepare", "async:trouble-save", "sync:write"):
            assert not rows[mode, "save"]["ok"]
            assert (mode, "load") not in rows
            assert rows[mode, "save"]["stall_ms"] is None
        assert rows["async:trouble-prepare", "save"]["note"].startswith(
            "failed on rank 1" if rank == 0 else "MemoryError: no memory on this rank"
        )
        assert "/secret" not in rows["async:trouble-save", "save"]["note"]
        assert "no space left on device" in rows["sync:write", "save"]["note"]
        assert rows["async:default", "save"]["ok"] and rows["async:default", "load"]["identical"] is True


def test_a_torn_copy_is_found(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        row = rows_of(results["trouble"])["sync:torn", "load"]
        assert row["ok"] and row["identical"] is False
        assert "1 values differ, first model.0.weight" in row["note"]


def test_values_each_rank_holds_for_itself_are_told_from_torn_ones(ranks: list[dict[str, Any]]) -> None:
    notes = []
    for results in ranks:
        rows = rows_of(results["norm"])
        assert rows["sync", "load"]["identical"] is True, rows["sync", "load"]["note"]
        assert rows["sync:torn", "load"]["identical"] is False
        assert "1 values differ, first model.0.weight" in rows["sync:torn", "load"]["note"]
        notes.append(rows["sync", "load"]["note"])
    assert sum("2 values that each rank holds for itself come back as one rank's" in n for n in notes) == 1
    assert all(results["norm"]["unharmed"] for results in ranks)


def test_without_a_budget_nothing_runs_and_it_is_said(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["poor"]["steps"] == []
        assert [r["ok"] for r in results["poor"]["rows"]] == [False] * 7
        assert all("not run: 0 s left" in r["note"] for r in results["poor"]["rows"])


class Training:
    """One process without torch.distributed: convolution, batch norm, momentum."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.count = 0

    def step(self) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(self.count))).sum().backward()
        self.optimizer.step()
        self.count += 1
        return (time.perf_counter() - started) * 1e3


def alone(directory: Path, configurations: list[Saver], **options: Any) -> tuple[list[CheckpointRow], Training]:
    training = Training()
    found = measure(
        training.model,
        training.optimizer,
        training.step,
        directory=directory,
        rank=0,
        world=1,
        device=CPU,
        steps=3,
        emit=lambda *_: None,
        configurations=configurations,
        **options,
    )
    return found.rows, training


def test_one_process_without_distributed(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("not ours")
    rows, training = alone(tmp_path, [Sync(), Staged("async:default"), Background(False, threads=2)])
    assert [(r.mode, r.op, r.ok) for r in rows] == [
        (mode, op, True) for mode in ("sync", "async:default", "async:background") for op in ("save", "load")
    ], [r.note for r in rows]
    assert all(r.identical for r in rows if r.op == "load")
    assert "forward pass may write buffers" in rows[4].note  # batch norm's running means
    assert "2 writer threads" in rows[4].note
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]
    twin = Training()
    for _ in range(training.count):
        twin.step()
    assert all(
        torch.equal(a, b)
        for a, b in zip(training.model.state_dict().values(), twin.model.state_dict().values(), strict=True)
    )


def test_a_load_that_does_not_fit_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LOAD_OVERRUN_S", -60.0)
    rows, _ = alone(tmp_path / "x", [Sync(), Staged("async:default")])
    assert [(r.mode, r.op) for r in rows] == [("sync", "save"), ("async:default", "save")]
    assert all(r.ok and "not loaded again: 0 s left" in r.note for r in rows)
    assert rows[1].note.startswith("best of 1 async")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_free_disk", lambda _: 5e5)
    rows, _ = alone(tmp_path / "x", [Sync()])
    assert not rows[0].ok and "free on disk" in rows[0].note
    assert not (tmp_path / "x").exists()


def test_little_memory_loads_in_parts_and_compares_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_device_room", lambda _: 700.0)  # the state has about 1 kB
    rows, _ = alone(tmp_path / "x", [Sync()])
    assert rows[1].identical is True
    assert "parts" in rows[1].note and "host memory" in rows[0].note


def test_a_step_that_fails_ends_the_measurement_and_cleans_up(tmp_path: Path) -> None:
    training = Training()
    calls = iter(range(100))

    def step() -> float:
        if next(calls) > 4:
            raise RuntimeError("CUDA error")
        return training.step()

    with pytest.raises(RuntimeError, match="CUDA error"):
        measure(
            training.model, training.optimizer, step, directory=tmp_path / "x", rank=0, world=1, device=CPU, steps=3,
            emit=lambda *_: None, configurations=[Sync()],
        )  # fmt: skip
    assert not (tmp_path / "x").exists()


def test_a_save_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    class Endless(Saver):
        name = "async:endless"

        def save(self, *_: object) -> Pending:
            return Pending(done=Future())

    monkeypatch.setattr(checkpoint, "GRACE_S", 0.2)
    rows, _ = alone(tmp_path / "x", [Endless()], budget_s=1.0)
    assert not rows[0].ok and "not finished" in rows[0].note and rows[0].total_ms is None


def test_training_never_updates_what_is_still_being_copied(tmp_path: Path) -> None:
    """A stager that copies slowly in the background: the optimizer's update waits, so the copy is not torn."""
    from concurrent.futures import Future
    from threading import Thread

    seen: list[bool] = []
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Slow(Saver):
        name = "async:slow"

        def save(self, *_: object) -> Pending:
            staged: Future[None] = Future()
            done: Future[None] = Future()
            before = model.weight.detach().clone()

            def copy() -> None:
                time.sleep(0.2)
                seen.append(torch.equal(before, model.weight))
                staged.set_result(None)
                done.set_result(None)

            Thread(target=copy).start()
            return Pending(done, staged)

    def step() -> float:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return 1.0

    measure(
        model, optimizer, step, directory=tmp_path / "x", rank=0, world=1, device=CPU, steps=3,
        emit=lambda *_: None, configurations=[Slow()],
    )  # fmt: skip
    assert seen == [True]
    assert not optimizer._optimizer_step_pre_hooks


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_copies_are_identical_and_blanks_are_not(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, shape, dtype=torch.int32)
    tensor = raw.to(dtype)
    assert identical(tensor, tensor.clone())
    assert identical(tensor, blank({"x": tensor})["x"]) == (tensor.numel() == 0)
    assert not identical(tensor, tensor.to(torch.int16))


def test_bits_tell_what_equality_does_not() -> None:
    nan = torch.tensor([float("nan")])
    assert identical(nan, nan.clone()) and not torch.equal(nan, nan.clone())
    assert not identical(torch.tensor([0.0]), torch.tensor([-0.0])) and torch.equal(torch.zeros(1), -torch.zeros(1))
    strided = torch.arange(6.0).view(2, 3).t()
    assert identical(strided, strided.contiguous())
    assert bits(torch.zeros(3, dtype=torch.float64)).dtype == torch.int64


@given(st.integers(0, 7), st.integers(0, 31))
@settings(max_examples=30, deadline=None)
def test_any_flipped_bit_is_found(index: int, bit: int) -> None:
    tensor = torch.arange(8, dtype=torch.float32)
    flipped = tensor.clone()
    flipped.view(torch.int32)[index] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert not identical(tensor, flipped)


def test_differences_name_changed_missing_and_extra_values() -> None:
    tree = {"model": {"a": torch.ones(2)}, "optim": {"state": {"a": {"step": 1}}, "param_groups": [{"lr": 0.1}]}}
    saved = snapshot(tree)
    assert saved.differences(tree) == []

    def changed() -> list[str]:
        return sorted(map(checkpoint_state.dotted, saved.differences(tree)))

    tree["model"]["a"][0] = 2  # type: ignore[index]
    tree["optim"]["param_groups"][0]["lr"] = 0.2  # type: ignore[index]
    tree["optim"]["state"]["a"]["new"] = 1  # type: ignore[index]
    del tree["optim"]["state"]["a"]["step"]  # type: ignore[union-attr]
    assert changed() == [
        "model.a",
        "optim.param_groups.0.lr",
        "optim.state.a.new",
        "optim.state.a.step",
    ]
    assert snapshot({"x": 1}).differences({"x": 1.0}) == [("x",)]
    assert snapshot({"x": float("nan")}).differences({"x": float("nan")}) == []


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_parts_cover_the_tree_once(sizes: list[int], count: int) -> None:
    tree: dict[str, Any] = {
        "model": {f"p{i}": torch.zeros(n) for i, n in enumerate(sizes)},
        "optim": {"state": {f"p{i}": {"m": torch.zeros(n)} for i, n in enumerate(sizes)}, "param_groups": [{"lr": 1}]},
    }
    parts = in_parts(tree, count)
    assert sorted(u for part in parts for u in part) == sorted(units(tree))
    assert 1 <= len(parts) <= count
    found = [path for part in parts for path, _ in leaves(subtree(tree, part))]
    assert sorted(map(str, found)) == sorted(str(p) for p, _ in leaves(tree))


@given(st.floats(1, 100), st.floats(0, 1000), st.integers(1, 50))
def test_stall_of_steps_that_did_not_slow_is_what_blocked(ms: float, blocked: float, n: int) -> None:
    result = stall([ms] * 9, [ms] * n, blocked)
    assert result.ms == pytest.approx(blocked, abs=1e-6)
    assert result.low == pytest.approx(result.high, abs=1e-6)


def test_stall_counts_slower_steps_and_its_interval_covers_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(100):
        noise = (torch.randn(40, generator=generator) + 50).tolist()
        result = stall(noise[:24], [*noise[24:32], 80.0], 10.0, seed)
        covered += result.low <= 40.0 <= result.high  # 10 blocked, one step 30 ms slower
    assert covered >= 85
    with pytest.raises(ValueError, match="control"):
        stall([], [1.0], 0.0)


@pytest.mark.parametrize("unused", [False, True])
def test_a_state_is_put_back_also_where_a_parameter_has_never_been_updated(unused: bool) -> None:
    """FSDP2 allows parameters that take no part in the loss; AdamW then has no moments of them."""
    training = Training()
    if unused:
        training.model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    training.step()
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    kept = copy.deepcopy(training_state(training.model, training.optimizer))
    training.step()
    put_in(training.model, training.optimizer, kept)
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())
    steps = {float(s["step"]) for s in training.optimizer.state.values() if "step" in s}
    assert steps == {1.0}


def test_the_resumed_training_is_as_long_as_the_budget_lets_it_be() -> None:
    assert [horizon(s, 60.0) for s in (0.1, 0.3, 1.0, 5.0, 100.0)] == [40, 5, 5, 0, -1]


def test_a_lossy_save_that_would_harm_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from costlab.kernels.codec import gate
    from costlab.probes.checkpoint_engine import Engine

    monkeypatch.setattr(gate, "DEFAULT_THRESHOLD", 1e-6)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        return 1.0

    step()
    found = measure(
        model, optimizer, step, directory=tmp_path / "x", rank=0, world=1, device=CPU, steps=3,
        emit=lambda *_: None, configurations=[Engine("fp8"), Engine("exact")],
    )  # fmt: skip
    refused, exact, loaded = found.rows
    assert not refused.ok and "a lossy save is refused, save exactly" in refused.note
    assert exact.ok and loaded.identical is True
    assert not (tmp_path / "x").exists()


def test_the_stager_answers_for_this_torch() -> None:
    assert stager_is_reusable() == (not torch.__version__.startswith("2.11."))


def test_replicated_tensors_are_stored_once() -> None:
    tree = {"model": {"w": torch.zeros(10)}}
    assert checkpoint_state.local_bytes(tree) == 40
    assert checkpoint_state.stored_bytes(tree, world=4) == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_every_configuration_on_a_gpu(tmp_path: Path) -> None:
    """Whatever works must restore exactly; the plain ones must work."""
    device = torch.device("cuda", 0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(64, 1024, device=device)

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - started) * 1e3

    rows = measure(
        model, optimizer, step, directory=tmp_path / "x", rank=0, world=1, device=device, steps=8,
        emit=lambda *_: None, budget_s=120.0,
    ).rows  # fmt: skip
    saves = {r.mode: r for r in rows if r.op == "save"}
    assert saves["sync"].ok and saves["async:default"].ok and saves["async:pinned"].ok, saves
    assert all(r.within_bound if r.lossy else r.identical for r in rows if r.op == "load"), [
        (r.mode, r.note) for r in rows
    ]
    assert saves["costlab:exact"].ok and saves["costlab:fp8"].ok, saves
    assert any(r.note.startswith("best of") for r in saves.values())


def test_the_way_that_training_saves_comes_first_and_alone_where_no_other_is_asked_for() -> None:
    cpu = torch.device("cpu")
    assert [s.name for s in savers(cpu)][:3] == ["sync", "costlab:exact", "costlab:fp8"]
    assert [s.name for s in savers(cpu, chosen="fp8")][:3] == ["costlab:fp8", "sync", "costlab:exact"]
    assert [[s.name for s in savers(cpu, 2, chosen, only=True)] for chosen in ("dcp", "exact", "fp8")] == [
        ["sync"], ["costlab:exact"], ["costlab:fp8"],
    ]  # fmt: skip


@pytest.mark.parametrize(("left_s", "says"), [(23.0, "23 s of the budget are left for other ways of saving"), (40, "")])
def test_dcps_own_load_leaves_the_budget_to_better_ways(
    monkeypatch: pytest.MonkeyPatch, left_s: float, says: str
) -> None:
    """A load that takes as long as its save, 17 s, may take half of what is left; costlab's own is always loaded."""
    session = object.__new__(checkpoint._Session)
    monkeypatch.setattr(session, "peers", SimpleNamespace(max=float), raising=False)
    monkeypatch.setattr(session, "found", checkpoint.Measured(), raising=False)
    monkeypatch.setattr(session, "budget_s", 40.0, raising=False)
    monkeypatch.setattr(checkpoint._Session, "_left", lambda _self, overrun_s=0.0: left_s + overrun_s)
    row = CheckpointRow(rank=0, mode="sync", op="save", ok=True, total_ms=17e3)
    assert session._no_load(Sync(), row, last=False) == says
    assert session._no_load(Saver(), row, last=False) == ""
