"""Builds Kineto documents event by event, in the form torch.profiler writes for one GPU rank."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

MAIN, AUTOGRAD = 100, 101


@dataclass
class Recording:
    """A trace being written; times in us."""

    rank: int | None = 0
    world: int = 2
    events: list[dict[str, Any]] = field(default_factory=list)
    correlation: int = 0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
        self.events.append(event | ({"args": args} if args else {}))

    def note(self, name: str, ts: float, dur: float, tid: int = MAIN) -> None:
        self.add("user_annotation", name, ts, dur, tid)

    def op(self, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> None:
        self.add("cpu_op", name, ts, dur, tid, **args)

    def forward_op(self, name: str, ts: float, dur: float, sequence: int) -> None:
        self.op(name, ts, dur, **{"Sequence number": sequence, "Fwd thread id": 0})

    def backward_op(self, name: str, ts: float, dur: float, sequence: int) -> None:
        self.op(name, ts, dur, AUTOGRAD, **{"Sequence number": sequence, "Fwd thread id": 1})

    def call(self, name: str, ts: float, dur: float, tid: int = MAIN) -> None:
        """A runtime call that launches nothing."""
        self.correlation += 1
        self.add("cuda_runtime", name, ts, dur, tid, correlation=self.correlation)

    def kernel(
        self,
        name: str,
        launched: float,
        ts: float,
        dur: float,
        *,
        tid: int = MAIN,
        stream: int = 7,
        cat: str = "kernel",
        **args: Any,
    ) -> None:
        """A kernel with the call that launched it, 2 us long."""
        calls = {"gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}
        self.call(calls.get(cat, "cudaLaunchKernel"), launched, 2.0, tid)
        self.again(name, ts, dur, stream=stream, cat=cat, **args)

    def again(self, name: str, ts: float, dur: float, *, stream: int = 7, cat: str = "kernel", **args: Any) -> None:
        """A further device event of the last launch call."""
        self.add(cat, name, ts, dur, 900 + stream, correlation=self.correlation, stream=stream, device=0, **args)

    def nccl(self, name: str, launched: float, ts: float, dur: float, elements: tuple[int, int], **more: Any) -> None:
        """A collective's kernel as torch annotates it, over ranks 0 and 1 in bfloat16."""
        given, out = elements
        args = {
            "Collective name": name,
            "In msg nelems": given,
            "Out msg nelems": out,
            "Group size": 2,
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
        }
        self.kernel(
            "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", launched, ts, dur, stream=20, **(args | more)
        )

    def document(self) -> dict[str, Any]:
        """The whole file as JSON would hold it."""
        head: dict[str, Any] = {"schemaVersion": 1}
        if self.rank is not None:
            head["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": self.world}
        return head | {"traceEvents": self.events}

    def json(self) -> bytes:
        """The file's bytes."""
        return json.dumps(self.document()).encode()
