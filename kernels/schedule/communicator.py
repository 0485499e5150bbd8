"""All-reduce by a plan over a torch.distributed process group: the entry point for training code and benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from costlab.kernels.schedule import compat
from costlab.kernels.schedule.errors import ScheduleAborted, ScheduleError, ScheduleRefused, ScheduleTimeout
from costlab.kernels.schedule.executor import Call, Scratch, Wires, buffers, run_streams, run_threads
from costlab.kernels.schedule.plan import SYMMETRIC, Layout, Plan, check_layout
from costlab.kernels.schedule.program import Program, build, tracks
from costlab.kernels.schedule.replay import Work
from costlab.kernels.schedule.symmetric import SymmetricMemory, refusal

Reduction = Literal["sum", "avg"]

TAG = "costlab::comm::"  # around what runs: what it is, and which call of which communicator
ISSUED = "costlab::comm-issued::"  # where a call was made whose work runs on threads of the communicator's own
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
_FIRST_TAG = 7100  # keeps clear of tags that training code uses on the same group
_TAGS_EACH = 256
_THREADS = 64
_READY = 256  # calls remembered
_communicators: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def _next_tags(group: ProcessGroup) -> int:
    """The first of a communicator's own tags on `group`; communicators are made in the same order on all ranks."""
    number = _communicators.get(group, 0)
    _communicators[group] = number + 1
    return _FIRST_TAG + number * _TAGS_EACH


def _signature(tensor: Tensor, plan: Plan, op: str) -> tuple[Any, ...]:
    return plan, op, tensor.dtype, tensor.numel(), tensor.device


class Handle:
    """A collective under way. `wait` orders the result before what follows; `synchronize` blocks the host."""

    def __init__(
        self,
        future: Future[None] | None,
        event: torch.cuda.Event | None,
        held: tuple[Any, ...],
        abort: Callable[[], None],
    ) -> None:
        self._future = future
        self._event = event
        self._held = held  # tensors in use on other streams
        self._abort = abort

    def wait(self) -> None:
        """Block on the CPU, or make the current CUDA stream wait. Raises what the collective raised."""
        if self._future is not None:
            self._future.result()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._held = ()

    def then(self, action: Callable[[BaseException | None], None]) -> None:
        """Call `action` with the error or None once the result is there (CPU) or has been issued (CUDA)."""
        if self._future is None:
            action(None)
        else:
            self._future.add_done_callback(lambda done: action(done.exception()))

    def is_completed(self) -> bool:
        """Whether the result is there (also true after a failure, which `wait` raises)."""
        done = self._future is None or self._future.done()
        return done and (self._event is None or self._event.query())

    def synchronize(self, timeout: timedelta) -> None:
        """Block the host until the result is there.

        Raises:
            ScheduleTimeout: it was not in time; the communicator has been aborted.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if time.monotonic() > deadline:
                self._abort()
                raise ScheduleTimeout(f"no result after {timeout.total_seconds():g} s; the communicator was aborted")
            time.sleep(0.0002)
        self.wait()


class Communicator:
    """Runs planned all-reduces over the ranks of one process group.

    All members must create it and call it in the same order, as with any collective. Results are bit-identical on all
    ranks. Calls are ordered: an asynchronous one ends before the next one starts. On a GPU, blocking calls are ordered
    by the CUDA stream they are made on, which should be the same one throughout.

    Args:
        group: the ranks that reduce; the default group if None.
        layout: ranks of the group (0..N-1) by segment; one segment if None.
        timeout: for a single transfer on the CPU. On a GPU it goes to the groups made here, whose watchdog ends the
            process; `Handle.synchronize` with a shorter time raises instead. The plan `backend` is a call of `group`
            itself, with that group's time-out.
    """

    def __init__(
        self, group: ProcessGroup | None = None, layout: Layout | None = None, timeout: timedelta = timedelta(minutes=5)
    ) -> None:
        parent = group if group is not None else dist.group.WORLD
        if parent is None:
            raise ScheduleError("torch.distributed is not initialised")
        self.parent = parent
        self.peers = tuple(dist.get_process_group_ranks(parent))
        self.rank = dist.get_rank(parent)
        self.world_size = len(self.peers)
        self.layout: Layout = layout or (tuple(range(self.world_size)),)
        self.timeout = timeout
        check_layout(self.layout, (), self.world_size)
        self.scratch = Scratch()
        self._groups: dict[str, ProcessGroup | None] = {}
        self._tags: dict[str, int] = {}
        self._first_tag = _next_tags(parent)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="costlab-track")
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="costlab-call")
        self._last: Future[None] | None = None
        self._broken: BaseException | None = None
        self._symmetric: SymmetricMemory | None = None
        self._pending = False  # whether an asynchronous CUDA call may still run
        self._on_parent = False  # whether transfers ran over the parent group itself
        self._ready: dict[tuple[Any, ...], Work] = {}  # CUDA calls that have been checked before
        self._begun: torch.cuda.Event | None = None  # for all calls: a wait takes what was recorded last
        self._issued: dict[torch.device, bool] = {}
        self._calls = 0
        self._working = threading.local()  # `call`: the one that this thread works on

    def all_reduce(self, tensor: Tensor, plan: Plan, op: Reduction = "sum", *, async_op: bool = False) -> Handle | None:
        """Reduce `tensor` in place over all ranks; any shape, size and strides.

        Args:
            plan: the schedule and its chunks; the same on all ranks.
            op: `avg` divides each contribution before summing (floating point only), so fp16 does not overflow.
            async_op: return a handle at once; the tensor must not be touched before its `wait`.

        Raises:
            ScheduleRefused: dtype, device, plan and ranks do not fit.
            ScheduleError: a transfer failed; the communicator is then broken.
            ScheduleTimeout: a transfer took longer than the time-out.
            ScheduleAborted: the communicator was aborted, or broke before.
        """
        if async_op and self.issues(tensor.device):
            stream = self.issue(tensor, plan, op)
            return Handle(None, stream.record_event(), (tensor,), self.abort)
        ready = None if async_op or self._pending else self._ready.get(_signature(tensor, plan, op))
        if ready is not None and tensor.is_contiguous():
            self._repeat(ready, tensor, plan)
            return None
        self._check(tensor, plan, op)
        if tensor.numel() == 0:
            return Handle(None, None, (), self.abort) if async_op else None
        if self.issues(tensor.device):
            self._here(tensor, plan, op)
            return None
        self._prepare_groups(plan, torch.device("cpu"))
        return self._on_threads(tensor, plan, op, async_op)

    def issues(self, device: torch.device) -> bool:
        """Whether calls with tensors of this device are work of a CUDA stream, issued by the caller's thread."""
        if device not in self._issued:
            self._issued[device] = device.type == "cuda" and self._takes(device)
        return self._issued[device]

    def issue(self, tensor: Tensor, plan: Plan, op: Reduction = "sum") -> torch.cuda.Stream:
        """Start an all-reduce on the communicator's own stream, which is returned and holds the result in its order.

        An asynchronous `all_reduce` without a handle, for tensors of a device that `issues`; raises as that does. The
        caller keeps the tensor until the work is done.
        """
        ready = self._ready.get(_signature(tensor, plan, op)) if tensor.is_contiguous() else None
        if ready is None:
            self._check(tensor, plan, op)
            if not self.issues(tensor.device):
                raise ScheduleRefused(f"calls with {tensor.device.type} tensors are not issued on a stream")
            self._prepare_groups(plan, tensor.device)
        stream = self._enter(tensor.device)
        with torch.cuda.stream(stream):
            if ready is not None:
                self._repeat(ready, tensor, plan)
            elif tensor.numel():
                self._first(tensor, plan, op)
        return stream

    def _enter(self, device: torch.device) -> torch.cuda.Stream:
        """The communicator's own stream, after what the current one holds."""
        if self._begun is None:
            self._begun = torch.cuda.Event()
        stream = self.call_stream(device)
        self._begun.record(torch.cuda.current_stream(device))
        stream.wait_event(self._begun)
        self._pending = True
        return stream

    def prepare(self, plan: Plan, like: Tensor) -> None:
        """Create the groups and buffers for `plan` and warm them up; collective. Needed before a CUDA graph capture."""
        self.all_reduce(torch.zeros_like(like), plan)

    def run(self, program: Program, flat: Tensor, name: str) -> None:
        """Run a program of one's own, on the calling thread, in place on a flat tensor of a device with a backend."""
        self._check_open()
        self._drain()
        device = flat.device if self._takes(flat.device) else torch.device("cpu")
        for track in program:
            self._track_group(track, device)
        if flat.is_cuda and self._takes(flat.device):
            self._run_cuda(flat, program, name, name.replace("-", "_"))
            return
        host = flat.cpu()
        self._run_cpu(host, program, name, name.replace("-", "_"))
        if host is not flat:
            flat.copy_(host)

    def abort(self) -> None:
        """Give up: pending and later calls raise ScheduleAborted, here and soon on the peers.

        Where the group's own connections carry transfers (gloo, and the plan `backend`) the group is aborted with it.
        """
        if self._broken is None:
            self._broken = ScheduleAborted("the communicator was aborted")
        self._abort_groups()

    def _abort_groups(self) -> None:
        made = [group for group in self._groups.values() if group is not None]
        # peers may wait for a rank that has not called yet, so on gloo the parent counts even if it was not used
        shared = self._on_parent or (not made and compat.serves_cpu_by_gloo(self.parent))
        for group in [*made, self.parent] if shared else made:
            compat.abort_group(group)

    def close(self) -> None:
        """Wait for pending calls and end the threads. The process groups live until torch destroys them all."""
        self._queue.shutdown(wait=True)
        self._pool.shutdown(wait=True)

    # ------------------------------------------------------------------ checks

    def _check(self, tensor: Tensor, plan: Plan, op: str) -> None:
        self._check_open()
        if op not in ("sum", "avg"):
            raise ScheduleRefused(f"op is sum or avg, not {op!r}")
        if tensor.dtype not in DTYPES:
            raise ScheduleRefused(f"all-reduce of {tensor.dtype} is not supported")
        if op == "avg" and not tensor.is_floating_point():
            raise ScheduleRefused(f"avg of {tensor.dtype} would have to round; sum it and divide as you like")
        if tensor.layout != torch.strided:
            raise ScheduleRefused(f"all-reduce needs a dense tensor, not {tensor.layout}")
        check_layout(self.layout, plan.order, self.world_size)
        if plan.schedule == "backend" and tensor.dtype == torch.int16:
            raise ScheduleRefused("neither NCCL nor gloo reduces int16; another schedule does")
        reason = refusal(tensor.device, tensor.dtype, self.world_size) if plan.schedule in SYMMETRIC else ""
        if reason:
            raise ScheduleRefused(reason)

    def _check_open(self) -> None:
        if self._broken is not None:
            raise ScheduleAborted(f"this communicator is no longer usable: {self._broken}") from self._broken

    def _takes(self, device: torch.device) -> bool:
        """Whether the backend sends from this device; gloo's point-to-point calls take host memory only."""
        return device.type == "cpu" or compat.backend_name(self.parent, device) != "gloo"

    # ------------------------------------------------------------------ groups

    def _prepare_groups(self, plan: Plan, device: torch.device) -> None:
        if plan.schedule in SYMMETRIC:
            self._group("backend", [self._everyone], device)
        for track in tracks(plan):
            self._track_group(track, device)
        if plan.inside == "backend":
            if len({len(s) for s in self.layout}) > 1:
                raise ScheduleRefused("the backend's collectives inside need segments of equal size")
            for track, members in self._native_members(plan):
                self._group(f"native-{track}", members, device)

    @property
    def _everyone(self) -> list[int]:
        return list(range(self.world_size))

    def _track_group(self, track: str, device: torch.device) -> ProcessGroup:
        """NCCL runs a group's transfers in order on one stream, so each track needs a group; gloo has tags."""
        self._tags.setdefault(track, self._first_tag + len(self._tags))
        if compat.backend_name(self.parent, device) == "gloo":
            self._on_parent = True
            return self.parent
        group = self._group(track, [self._everyone], device)
        if group is None:
            raise ScheduleError(f"no group for track {track}")
        return group

    def _native_members(self, plan: Plan) -> list[tuple[str, list[list[int]]]]:
        segments = [list(s) for s in self.layout]
        rows = [(track, segments) for track in ("scatter", "gather")] if len(segments[0]) > 1 else []
        if plan.schedule == "two-level" and len(segments) > 1:
            rows.append(("lane", [list(lane) for lane in zip(*self.layout, strict=True)]))
        return rows

    def _group(self, name: str, members: list[list[int]], device: torch.device) -> ProcessGroup | None:
        """This rank's group of that name, made on first use together with those of the other members."""
        key = f"{name}-{device.type}"
        if key not in self._groups:
            ranks = [sorted(self.peers[m] for m in row) for row in members]
            group = compat.new_groups(self.parent, ranks, self.timeout, device, f"costlab-{name}")
            if group is not None and compat.backend_name(group, device) == "nccl":
                # a first point-to-point call that some members sit out is undefined on NCCL
                dist.all_reduce(torch.zeros(1, device=device), group=group)
            self._groups[key] = group
        return self._groups[key]

    def _wires(self, program: Program, device: torch.device) -> dict[str, Wires]:
        rows = {}
        for track in program:
            group = self._track_group(track, device)
            native = self._groups.get(f"native-{track}-{device.type}")
            rows[track] = Wires(group, self.peers, self._tags[track], native)
        return rows

    # ------------------------------------------------------------------ running

    def _tagged(
        self, schedule: str, flat: Tensor, kind: str = "all_reduce"
    ) -> Callable[[], AbstractContextManager[Any]]:
        """A profiler annotation that trace readers class as communication; a profiler keeps no more than its name."""
        nbytes = flat.numel() * flat.element_size()
        what = f"{kind} schedule={schedule} bytes={nbytes} dtype={str(flat.dtype).removeprefix('torch.')}"
        call = getattr(self._working, "call", "") or self._next_call()
        name = f"{TAG}{what} ranks={','.join(map(str, self.peers))} call={call}"
        return lambda: torch.profiler.record_function(name)

    def _next_call(self) -> str:
        self._calls += 1
        return f"{self._first_tag}.{self._calls}"

    def _on_threads(self, tensor: Tensor, plan: Plan, op: Reduction, async_op: bool) -> Handle | None:
        call = self._next_call()

        def work() -> None:
            self._working.call = call
            try:
                with self._tagged(plan.schedule, tensor)():
                    reduce()
            finally:
                del self._working.call

        def reduce() -> None:
            flat = tensor.detach().contiguous().view(-1).cpu()  # a view where the tensor is contiguous and on the CPU
            self._reduce_flat(flat, plan, op)
            if flat.data_ptr() != tensor.data_ptr() or flat.device != tensor.device:
                tensor.detach().copy_(flat.view(tensor.shape))

        if not async_op:
            self._drain()
            self._guarded(work)
            return None
        with torch.profiler.record_function(ISSUED + call):
            self._last = self._queue.submit(self._guarded, work)
        return Handle(self._last, None, (tensor,), self.abort)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run; a failure breaks the communicator and tells the peers by aborting its groups."""
        self._check_open()
        try:
            work()
        except ScheduleRefused:
            raise
        except BaseException as error:
            self._broken = self._broken or error
            self._abort_groups()
            raise

    def _drain(self) -> None:
        if self._last is not None:
            self._last.exception()  # its own handle raises it
            self._last = None
            self._check_open()

    def _reduce_flat(self, flat: Tensor, plan: Plan, op: Reduction) -> None:
        if plan.schedule in SYMMETRIC:
            self._reduce_symmetric(flat, plan, self._scale(op))
            return
        if op == "avg" and not self._averages(flat, plan):
            flat.mul_(self._scale(op))
        if plan.schedule == "backend":
            self._backend(flat, op)
        else:
            program = build(plan, self.layout, flat.numel(), self.rank)
            if flat.is_cuda:
                self._run_cuda(flat, program, plan.schedule)
            else:
                self._run_cpu(flat, program, plan.schedule)

    def _scale(self, op: Reduction) -> float:
        return 1.0 / self.world_size if op == "avg" else 1.0

    def _averages(self, flat: Tensor, plan: Plan) -> bool:
        return plan.schedule == "backend" and flat.is_cuda and compat.averages(self.parent, flat.device)

    def _backend(self, flat: Tensor, op: Reduction) -> None:
        """The parent's own call: a communicator beside it would only cost memory and cold buffers."""
        self._on_parent = True
        with self._tagged("backend", flat)():
            try:
                if flat.is_cuda:
                    own = op if compat.averages(self.parent, flat.device) else "sum"
                    compat.all_reduce_call(self.parent, own)(flat)
                    return
                work = dist.all_reduce(flat, group=self.parent, async_op=True)
                if work is not None:
                    work.wait(self.timeout)
            except RuntimeError as error:
                late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
                raise (ScheduleTimeout if late else ScheduleError)(f"backend all-reduce failed: {error}") from error

    def _reduce_symmetric(self, flat: Tensor, plan: Plan, scale: float) -> None:
        if self._symmetric is None:
            group = self._group("backend", [self._everyone], flat.device) or self.parent
            self._symmetric = SymmetricMemory(group, self._ready.clear)
        with self._tagged(plan.schedule, flat)():
            self._symmetric.all_reduce(flat, plan, scale)

    def _run_cpu(self, flat: Tensor, program: Program, name: str, kind: str = "all_reduce") -> None:
        run_threads(self._call(flat, program, name, kind, self.timeout), self._pool)

    def _run_cuda(self, flat: Tensor, program: Program, name: str, kind: str = "all_reduce") -> None:
        for track in program:
            self._stream(track, flat.device)
        run_streams(self._call(flat, program, name, kind, None), self._streams)

    def _call(self, flat: Tensor, program: Program, name: str, kind: str, timeout: timedelta | None) -> Call:
        held = buffers(program, flat, self.scratch)
        wires = self._wires(program, flat.device)
        return Call(name, self.rank, flat, program, wires, held, timeout, self._tagged(name, flat, kind))

    def call_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The CUDA stream that asynchronous calls run on."""
        return self._stream("call", device)

    def _stream(self, name: str, device: torch.device) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = compat.urgent_stream(device)
        return self._streams[name]

    def _here(self, tensor: Tensor, plan: Plan, op: Reduction) -> None:
        """A call on the current stream, after asynchronous ones."""
        self._prepare_groups(plan, tensor.device)
        if self._pending and torch.cuda.is_current_stream_capturing():
            raise ScheduleRefused("prepare() between an asynchronous call and the capture of a CUDA graph")
        if self._pending:
            torch.cuda.current_stream(tensor.device).wait_stream(self.call_stream(tensor.device))
            self._pending = False
        self._first(tensor, plan, op)

    def _first(self, tensor: Tensor, plan: Plan, op: Reduction) -> None:
        flat = self._reduce_cuda(tensor, plan, op)
        if plan.schedule in SYMMETRIC or plan.schedule == "backend":
            self._remember(tensor, flat, plan, op)

    def _reduce_cuda(self, tensor: Tensor, plan: Plan, op: Reduction) -> Tensor:
        """Reduce on the current stream; returns the flat tensor that was worked on."""
        flat = tensor.detach().contiguous().view(-1)
        self._guarded(lambda: self._reduce_flat(flat, plan, op))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))
        return flat

    def _remember(self, tensor: Tensor, flat: Tensor, plan: Plan, op: Reduction) -> None:
        """Keep what runs this call, so that the next one like it costs the host no more than the library's own."""
        if len(self._ready) >= _READY:
            self._ready.clear()
        self._ready[_signature(tensor, plan, op)] = self._work(flat, plan, op)

    def _work(self, flat: Tensor, plan: Plan, op: Reduction) -> Work:
        scale = self._scale(op)
        if self._symmetric is not None and plan.schedule in SYMMETRIC:
            return self._symmetric.work(flat, plan, scale)
        averages = op == "avg" and self._averages(flat, plan)
        call = compat.all_reduce_call(self.parent, "avg" if averages else "sum")

        def scaled(flat: Tensor) -> None:
            flat.mul_(scale)
            call(flat)

        return call if op == "sum" or averages else scaled

    def _repeat(self, work: Work, tensor: Tensor, plan: Plan) -> None:
        if self._broken is not None:
            self._check_open()
        # a view costs the host a microsecond, and the library takes any shape
        bare = not tensor.requires_grad and (tensor.dim() == 1 or plan.schedule == "backend")
        flat = tensor if bare else tensor.detach().view(-1)
        try:
            if compat.profiling():
                with self._tagged(plan.schedule, flat)():
                    work(flat)
            else:
                work(flat)
        except RuntimeError as error:
            self._broken = self._broken or error
            self._abort_groups()
            raise ScheduleError(f"{plan.schedule} all-reduce failed: {error}") from error
