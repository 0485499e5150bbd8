"""One rank of the checkpoint tests: `python checkpoint_ranks.py RANK WORLD STORE OUT`; writes what it saw as JSON.

Scenarios run one after the other in one process, because importing torch takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from costlab.probes.checkpoint import measure
from costlab.probes.checkpoint_modes import Pending, Saver, Staged, Sync
from costlab.probes.checkpoint_savers import savers

CPU = torch.device("cpu")
TABLES = ("rows", "steps", "stages", "codecs", "resumed")


class Trouble(Saver):
    """Raises on rank 1 only, at the given moment; the other ranks have done nothing that waits for it."""

    def __init__(self, moment: str) -> None:
        self.name = f"async:trouble-{moment}"
        self._moment = moment

    def prepare(self, *_: object) -> str:
        if self._moment == "prepare" and dist.get_rank() == 1:
            raise MemoryError("no memory on this rank")
        return ""

    def save(self, *_: object) -> Pending:
        if dist.get_rank() == 1:
            raise OSError("/secret/place: disk quota exceeded")
        return Pending()


class FailingWrite(Sync):
    """A write that fails on rank 1 within DCP's own collectives."""

    name = "sync:write"

    def save(self, state: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> Pending:
        from torch.distributed.checkpoint import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        class Writer(FileSystemWriter):
            def write_data(self, *args: Any, **kwargs: Any) -> Any:
                if dist.get_rank() == 1:
                    raise OSError("no space left on device")
                return super().write_data(*args, **kwargs)

        save(state, storage_writer=Writer(path), process_group=group)
        return Pending()


class Torn(Sync):
    """Stores a state in which one value has changed, as a torn copy would."""

    name = "sync:torn"

    def save(self, state: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> Pending:
        changed = dict(state, model=dict(state["model"]))
        weight = changed["model"]["0.weight"].detach().clone()
        weight.to_local().view(-1)[0] += 1
        changed["model"]["0.weight"] = weight
        return super().save(changed, path, group)


class Training:
    """A small FSDP2 model with its optimizer; deterministic by seed, step and rank."""

    def __init__(self, with_norm: bool = False) -> None:
        torch.manual_seed(0)
        norm = [torch.nn.BatchNorm1d(32)] if with_norm else []
        self.model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)), *norm)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.index = 0
        self.taken: list[int] = []  # numbers of the steps, repeated ones included
        self._loss = torch.zeros(())

    def step(self) -> float:
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(1000 * self.index + dist.get_rank())
        self.optimizer.zero_grad()
        self._loss = self.model(torch.randn(8, 32, generator=generator)).square().mean()
        self._loss.backward()
        self.optimizer.step()
        self.taken.append(self.index)
        self.index += 1
        return (time.perf_counter() - started) * 1e3

    def loss(self) -> float:
        return float(self._loss)

    def state(self) -> list[torch.Tensor]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        from costlab.probes.checkpoint_state import leaves, local

        return [local(v) for _, v in leaves(list(get_state_dict(self.model, self.optimizer))) if torch.is_tensor(v)]


def scenario(
    directory: Path, configurations: list[Saver], budget_s: float = 60.0, with_norm: bool = False
) -> dict[str, Any]:
    """Measure, then compare with a twin that only took the same number of steps."""
    training, twin = Training(with_norm), Training(with_norm)
    training.step()
    told: list[str] = []
    found = measure(
        training.model,
        training.optimizer,
        training.step,
        directory=directory,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=CPU,
        steps=4,
        emit=lambda what, *_: told.append(what),
        budget_s=budget_s,
        configurations=configurations,
        repeatable=training,
        copy_gbps=1.0,
    )
    for _ in range(training.index):
        twin.step()
    pairs = zip(training.state(), twin.state(), strict=True)
    return {
        **{name: [msgspec.to_builtins(r) for r in getattr(found, name)] for name in TABLES},
        "repeated": len(training.taken) - training.index,
        "told": sorted(set(told)),
        "unharmed": all(torch.equal(a, b) for a, b in pairs),
        "left": directory.exists(),
    }


def main() -> None:
    rank, world, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    results = {
        "all": scenario(out / "all", savers(CPU, world), budget_s=240.0),
        "trouble": scenario(
            out / "trouble",
            [Trouble("prepare"), Trouble("save"), FailingWrite(), Torn(), Staged("async:default")],
        ),
        "norm": scenario(out / "norm", [Sync(), Torn()], with_norm=True),
        "poor": scenario(out / "poor", savers(CPU, world), budget_s=0.0),
    }
    (out / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
