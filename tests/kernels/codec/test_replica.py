"""Replicas between real processes: both directions at once, and every way in which a peer or its disk fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from costlab.kernels.codec import CheckpointError, Replica
from costlab.kernels.codec.files import AtomicFile
from costlab.kernels.codec.manifest import rank_name
from costlab.kernels.codec.replica import PIECE, _Lane

SCRIPT = Path(__file__).with_name("replica_ranks.py")


def run_ranks(scenario: str, world: int, root: Path, **more: str) -> list[dict[str, Any]]:
    """What each rank saw; empty for one that left nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"} | more
    command = [sys.executable, str(SCRIPT), scenario, str(root)]
    ranks = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "WORLD_SIZE": str(world)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode == 0 for process in ranks), "\n".join(errors)
    found = [root / f"seen-{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in found]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four ranks through every exchange, the last of them with the trouble; rank 1 is its peer."""
    return run_ranks("everything", 4, tmp_path_factory.mktemp("four"), CUDA_VISIBLE_DEVICES="")


def test_both_directions_at_once(four: list[dict[str, Any]]) -> None:
    assert [seen["whole"] for seen in four] == ["same"] * 4
    assert all(seen["label"] == "gloo over TCP" for seen in four)


def test_a_save_that_a_rank_gives_up_leaves_its_peer_no_file_and_still_takes_the_peers(four: list[Any]) -> None:
    assert [seen["given up"] for seen in four] == ["same", "none", "same", "same"]
    assert [seen.get("declined") for seen in four] == ["same", "none", "same", None]


def test_a_rank_that_cannot_write_takes_everything_and_its_peer_sees_no_failure(four: list[dict[str, Any]]) -> None:
    assert [seen["no root"] for seen in four] == ["same", "same", "same", "NotADirectoryError"]
    assert [seen["full disk"] for seen in four] == ["same", "same", "same", "OSError"]
    assert [seen["again"] for seen in four] == ["same"] * 4
    assert [seen["failed"] for seen in four] == [None] * 4
    steps = {0: [1, 2, 3, 4, 5, 6], 1: [1, 4, 5, 6], 2: [1, 2, 3, 4, 5, 6], 3: [1, 2, 3, 6]}
    for rank, seen in enumerate(four):
        assert seen["left"] == [f"step-{step}/{rank_name((rank + 2) % 4)}" for step in steps[rank]]


def test_pages_that_arrive_are_written_past_the_page_cache_and_only_the_rest_through_it(
    four: list[Any], tmp_path: Path
) -> None:
    probe = AtomicFile(tmp_path / "probe", direct=True)
    probe.abort()
    # Two chunks of a piece and a page, which are two requests each; the third ends within a page.
    requests = {"writes": 5, "direct": 4 if probe.direct else 0}
    assert [{key: seen[key] for key in requests} for seen in four] == [requests] * 4


def test_groups_that_create_made_end_with_the_replica(four: list[dict[str, Any]]) -> None:
    assert not any(seen["group"] for seen in four)


def test_what_cannot_be_created_is_refused(four: list[dict[str, Any]]) -> None:
    assert four[0]["errors"] == [
        "a replica over nccl needs a CUDA device and a torch with NCCL",
        "replicas are sent over nccl or gloo, not mpi",
    ]


def test_a_group_for_each_direction(tmp_path: Path) -> None:
    found = run_ranks("lanes", 2, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert found == [{"whole": "same", "group": True}] * 2


def test_a_peer_that_is_gone_ends_the_replica_for_good_and_nothing_waits(tmp_path: Path) -> None:
    survivor, _ = run_ranks("gone", 2, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert survivor == {
        "failed": True, "taken": "RuntimeError", "next": "RuntimeError", "left": [], "group": True,
    }  # fmt: skip


def test_a_single_nccl_group_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    with pytest.raises(CheckpointError, match=r"use Replica\.create\(root\)"):
        Replica(object(), tmp_path)  # type: ignore[arg-type]


def test_create_needs_a_default_group(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="init_process_group first"):
        Replica.create(tmp_path)


def test_a_gpus_bytes_move_on_the_lanes_stream_and_are_there_before_anyone_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stream that only notes what happens; the heads and the readiness go over the other group, outside it."""
    seen: list[str] = []

    @contextmanager
    def within(what: object) -> Iterator[None]:
        seen.append(f"on {what}")
        yield
        seen.append("off")

    def moves(name: str) -> Callable[..., None]:
        return lambda tensor, group, **_: seen.append(f"{name} {tensor.numel()} over {group}")

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(dist, "send", moves("send"))
    monkeypatch.setattr(dist, "recv", moves("recv"))
    lane = _Lane("nccl", "gloo", 1, torch.device("cpu"))  # type: ignore[arg-type]
    lane._stream, lane._done = _Stream(), _Event(seen)  # type: ignore[assignment]
    lane._buffer = torch.zeros(PIECE, dtype=torch.uint8)
    data, target = np.arange(100, dtype=np.uint8), torch.zeros(100, dtype=torch.uint8)
    piece = lane.stage(data)
    assert torch.equal(piece, torch.from_numpy(data)) and seen == ["on stream", "recorded on stream", "off", "waited"]
    lane.send(piece)
    lane.receive(target)
    assert seen[4:] == [
        "recv 1 over gloo", "on stream", "send 100 over nccl", "recorded on stream", "off", "waited",
        "send 1 over gloo", "on stream", "recv 100 over nccl", "recorded on stream", "off", "waited",
    ]  # fmt: skip
    assert torch.equal(target, torch.from_numpy(data))


class _Stream:
    device = "cuda:0"

    def __str__(self) -> str:
        return "stream"


class _Event:
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def record(self, stream: object) -> None:
        self.seen.append(f"recorded on {stream}")

    def synchronize(self) -> None:
        self.seen.append("waited")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("bound", ["", "1"], ids=["communicators made at first use", "device bound at start"])
def test_over_nccl_beside_training(tmp_path: Path, bound: str) -> None:
    for seen in run_ranks("on_gpus", 2, tmp_path, BOUND=bound):
        assert seen == {
            "label": "nccl over its own transport", "whole": "same", "sum": 1.0, "replica": None, "saved": True,
            "copy": True, "failed": None,
        }  # fmt: skip
