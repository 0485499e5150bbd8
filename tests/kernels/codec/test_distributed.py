"""Two gloo ranks on the CPU: FSDP2 shards saved without gathering, replicas, one rank failing, another world size."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.manifest import committed, latest, rank_name

WORLD = 2


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 65), torch.nn.LayerNorm(65), torch.nn.Linear(65, 48))


def rank_main(root: str) -> None:
    """What one rank runs; writes what it saw to `<root>/seen-<rank>.json` and `full.pt` (rank 0)."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from costlab.kernels.codec.pipeline import AsyncCheckpointer
    from costlab.kernels.codec.replica import Replica

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen: dict[str, Any] = {}
    model = _model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = Replica(dist.new_group(backend="gloo"), Path(root) / f"peer-{rank}")
    checkpointer = AsyncCheckpointer(Path(root) / "runs", replica=replica, slab_bytes=1 << 20, commit_timeout=20)
    checkpointer.attach(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 48)).square().mean().backward()
        optimizer.step()

    step()
    state = {"model": model, "optim": optimizer, "rng": torch.tensor([rank]), "step": 1}
    report = checkpointer.save(1, state).result(30)
    assert report is not None
    seen["replica"] = [str(report.replica), report.replica_error]
    seen["update"] = replica.label
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(full, Path(root) / "full.pt")
    step()
    directory = Path(root) / "runs"
    with Checkpoint.open(report.directory) as checkpoint:
        fresh = {**state, "rng": torch.tensor([-1]), "step": 0}
        checkpoint.load(fresh, rank=rank)
    seen["resumed"] = bool(
        all(
            torch.equal(v.full_tensor() if isinstance(v, DTensor) else v, full[k])
            for k, v in model.state_dict().items()
        )
    )
    seen["rng"], seen["step"] = int(fresh["rng"]), fresh["step"]
    bad = {**state, "broken": {1, 2}} if rank == 1 else state
    try:
        checkpointer.save(2, bad).result(30)
        seen["failure"] = None
    except CheckpointError as error:
        seen["failure"] = str(error)
    try:
        checkpointer.wait()
    except CheckpointError as error:
        seen["surfaced"] = str(error)
    dist.barrier()
    checkpointer.save(3, state).result(30)
    checkpointer.close()
    replica.close()
    seen["latest"] = latest(directory).name[:15]  # type: ignore[union-attr]
    (Path(root) / f"seen-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both ranks have run."""
    root = tmp_path_factory.mktemp("world")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import runpy, sys; runpy.run_path({__file__!r})['rank_main'](sys.argv[1])"
    ranks = []
    for rank in range(WORLD):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-c", code, str(root)]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=90)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode == 0 for process in ranks), "\n".join(errors)
    return root


def _seen(root: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / f"seen-{rank}.json").read_text())
    return found


def test_shards_are_saved_without_gathering_and_read_as_whole_tensors(ran: Path) -> None:
    directory = next(d for d, m in committed(ran / "runs") if m.step == 1)
    full = torch.load(ran / "full.pt")
    with Checkpoint.open(directory) as checkpoint:
        checkpoint.verify()
        assert len(checkpoint.files) == WORLD
        for name, value in full.items():
            assert torch.equal(checkpoint.tensor(f"model.{name}"), value), name
        assert len(checkpoint.places["model.0.weight"]) == WORLD
        assert checkpoint.places["model.0.weight"][1][1].start == (33, 0)
        assert len(checkpoint.places["step"]) == 1
        assert {"rng@0", "rng@1"} <= set(checkpoint.names)


def test_every_rank_resumes_its_own_shard_and_its_own_values(ran: Path) -> None:
    for rank in range(WORLD):
        seen = _seen(ran, rank)
        assert seen["resumed"] and seen["rng"] == rank and seen["step"] == 1


def test_a_plain_model_loads_what_two_ranks_saved(ran: Path) -> None:
    full, model = torch.load(ran / "full.pt"), _model()
    with Checkpoint.open(next(d for d, m in committed(ran / "runs") if m.step == 1)) as checkpoint:
        checkpoint.load({"model": model})
    assert all(torch.equal(value, full[name]) for name, value in model.state_dict().items())


def test_one_rank_that_fails_fails_the_save_on_all_and_the_next_one_works(ran: Path) -> None:
    assert "set" in _seen(ran, 1)["failure"]
    assert "rank-00001 could not save" in _seen(ran, 0)["failure"]
    assert "rank-00001 could not save" in _seen(ran, 0)["surfaced"]
    assert [m.step for _, m in committed(ran / "runs")] == [3, 1]
    assert all(_seen(ran, rank)["latest"] == "step-0000000003" for rank in range(WORLD))


def test_replicas_stand_in_for_lost_files(ran: Path, tmp_path: Path) -> None:
    original = next(d for d, m in committed(ran / "runs") if m.step == 1)
    assert _seen(ran, 0)["replica"][1] is None and "TCP" in _seen(ran, 0)["update"]
    copy = tmp_path / original.name
    shutil.copytree(original, copy)
    (copy / rank_name(1)).unlink()
    with pytest.raises(CheckpointError):
        Checkpoint.open(copy)
    full = torch.load(ran / "full.pt")
    with Checkpoint.open(copy, replicas=[ran / "peer-0", ran / "peer-1"]) as checkpoint:
        checkpoint.verify()
        assert torch.equal(checkpoint.tensor("model.0.weight"), full["0.weight"])
        replica = ran / "peer-0" / original.name / rank_name(1)
        assert replica.read_bytes() == (original / rank_name(1)).read_bytes()
