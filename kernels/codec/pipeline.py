"""Checkpoints while training goes on.

    checkpointer = AsyncCheckpointer("runs/a", "exact")
    checkpointer.attach(optimizer)                     # the next optimizer.step() waits for staging only
    for step, batch in enumerate(data):
        ...
        optimizer.step()
        if step % 100 == 0:
            checkpointer.save(step, {"model": model, "optim": optimizer, "step": step})
    checkpointer.close()

`save` enqueues, on a side stream that waits for the compute stream, a coded copy of the state inside the device's
memory and returns; a thread brings the copy to a bounded pool of pinned memory. Threads write what has arrived
with several O_DIRECT requests at a time; the file is synced and renamed and the manifest makes it a checkpoint.
Until the device's copy is made the state must not change: `attach` makes the optimizer's stream wait for it, or call
`wait_staged()` yourself.

The device's copy is as large as the file (a quarter of the state with `fp8`) and lasts until it is on the host. With
`snapshot="auto"` it is taken of as much as leaves 5 % of the device and 1 GiB free when the first save is planned; the
rest goes straight to the host, at the speed of the bus, before the state may change. "device" insists, "stream" takes
none.

On the CPU the copy is made before `save` returns; writing is in the background all the same. While it lasts the
process's switch interval is 50 us (`turns`), so that the background's short steps need not wait for training's thread.

A failed save never stops the process by itself: its error is raised by the next `before_step` (from the
optimizer's hook), `save` or `wait`, once, and the checkpointer can be used again; with `on_failure="warn"` it
is a warning instead. Errors of the call itself (a state that can't be stored, a refused lossy save) are raised
at once.
"""

from __future__ import annotations

import itertools
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from costlab.kernels.codec.codecs import Choice, Codec, Encoded, decode, encode
from costlab.kernels.codec.commit import Site, report_failure
from costlab.kernels.codec.errors import CheckpointError, CheckpointRefused
from costlab.kernels.codec.files import readable
from costlab.kernels.codec.finish import SaveJob
from costlab.kernels.codec.gate import DEFAULT_THRESHOLD, Adam, Moments, UpdateError, first_update_error
from costlab.kernels.codec.layout import MAX_CHAIN, NO_BASE
from costlab.kernels.codec.manifest import RankFile, directory_name
from costlab.kernels.codec.plan import Plan, PlanCache, item_of, lay_out
from costlab.kernels.codec.policy import Policy, preset
from costlab.kernels.codec.replica import Replica
from costlab.kernels.codec.slabs import DEFAULT_SLAB, Region, Slab, SlabPool
from costlab.kernels.codec.stage import SnapshotMode, Stager
from costlab.kernels.codec.state import Leaf, Part, flatten, parts_of
from costlab.kernels.codec.turns import quick_turns

COUNT_ZEROS_EVERY = 10


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed save. Bytes are this rank's; seconds count from the call of `save`.

    `launch_s` the call kept the thread, of which `launch_parts` says for what; `staged_s` until the state might change
    again; `device_s` the side stream's work until then (None on the CPU); `durable_s` until committed, which the copy
    on a peer may follow.
    `snapshot_bytes` of device memory held the copy. `timeline` has (stage, start, end) of every piece of work.
    """

    step: int
    directory: Path
    preset: str
    state_bytes: int
    file_bytes: int
    launch_s: float
    staged_s: float
    device_s: float | None
    durable_s: float
    direct: bool
    update_error: float | None
    replica: Path | None
    replica_error: str | None
    timeline: tuple[tuple[str, float, float], ...]
    launch_parts: tuple[tuple[str, float], ...] = ()
    snapshot_bytes: int = 0

    def seconds(self, stage: str) -> float:
        """First start to last end of a stage.

        Stages: launch, open, stage, copy, checksum, write, pack, sync, replica, commit.
        """
        found = [span for span in self.timeline if span[0] == stage]
        return max(s[2] for s in found) - min(s[1] for s in found) if found else 0.0


class SaveHandle:
    """A save under way. `skipped` when the one before was still being written and back-pressure is "skip"."""

    def __init__(self, step: int, skipped: bool = False) -> None:
        self.step, self.skipped = step, skipped
        self._future: Future[SaveReport] = Future()
        self._job: SaveJob | None = None

    def done(self) -> bool:
        """Whether it is committed, failed or skipped."""
        return self.skipped or self._future.done()

    def wait_staged(self) -> None:
        """Until the state may change again."""
        if self._job is not None:
            self._job.staged.wait()

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Wait until it is durable; None when it was skipped. Raises the save's `CheckpointError`."""
        return None if self.skipped else self._future.result(timeout)


@dataclass(slots=True)
class _Previous:
    """The last save, for deltas: where it is and, by name, the fp32 values it decodes to and their chain lengths."""

    directory: str
    digest: bytes
    saves_since_keyframe: int
    values: dict[str, torch.Tensor]
    chains: dict[str, int]


class AsyncCheckpointer:
    """See the module. One per process; under torch.distributed every rank constructs one and calls `save` alike.

    root: directory of the checkpoints, made if absent; shared by all ranks.
    policy: name of a preset or a `Policy`.
    pool_bytes: most staging memory; default what one save needs. With a smaller pool the device's copy lasts as long as
        the disk takes.
    snapshot: where the copy is made that training waits for: "auto", "device" or "stream" (see the module).
    queue_depth: write requests in flight, and threads.
    direct: O_DIRECT where the filesystem has it.
    back_pressure: when the save before isn't written yet, "wait" for it or "skip" this one (rank 0 decides for all).
    on_failure: "raise" the error of a failed save at the next call, or "warn".
    gate_threshold, gate_every, on_refusal: a lossy save whose first resumed Adam update would be off by more than the
        threshold (worst parameter, relative) is refused with "raise", stored exactly with "exact". Measured at the
        first and every `gate_every`-th save, synchronously; 0 never.
    adam: the optimizer's constants for the gate.
    replica: sends each file to a peer; `Replica.create` makes it.
    commit_timeout: seconds to wait for the other ranks.
    per_rank: globs of names that differ between ranks though they aren't DTensors.
    """

    def __init__(
        self, root: Path | str, policy: str | Policy = "exact", *, pool_bytes: int | None = None,
        snapshot: SnapshotMode = "auto", slab_bytes: int = DEFAULT_SLAB, queue_depth: int = 8, direct: bool = True,
        back_pressure: Literal["wait", "skip"] = "wait", on_failure: Literal["raise", "warn"] = "raise",
        gate_threshold: float = DEFAULT_THRESHOLD, gate_every: int = 50,
        on_refusal: Literal["raise", "exact"] = "raise",
        adam: Adam | None = None, per_rank: Sequence[str] = ("rng*", "*.rng*"), replica: Replica | None = None,
        commit_timeout: float = 600.0,
    ) -> None:  # fmt: skip
        self.root = Path(root)
        self.policy = policy if isinstance(policy, Policy) else preset(policy)
        self.direct, self.back_pressure, self.on_failure = direct, back_pressure, on_failure
        self.gate_threshold, self.gate_every, self.on_refusal = gate_threshold, gate_every, on_refusal
        self.adam, self.per_rank, self.replica = adam or Adam(), tuple(per_rank), replica
        self.commit_timeout = commit_timeout
        with readable(f"creating {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
        self.rank, self.world_size, self.run = _identity()
        self.pool = SlabPool(slab_bytes, pool_bytes, pinned=torch.cuda.is_available())
        self.failures: list[CheckpointError] = []
        self.last_report: SaveReport | None = None
        self._unraised: CheckpointError | None = None
        self._writers = ThreadPoolExecutor(queue_depth, thread_name_prefix="checkpoint-write")
        self._coordinator = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._stager = Stager(snapshot)
        self._plans = PlanCache()
        self._last: SaveHandle | None = None
        self._saved_steps: set[int] = set()
        self._lossy_saves = self._saves = 0
        self._zeros: frozenset[str] = frozenset()
        self._previous: _Previous | None = None
        self._hooks: list[Any] = []
        self._control = _control_group() if back_pressure == "skip" and self.world_size > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make every `optimizer.step()` call `before_step` first."""
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.before_step()))

    def before_step(self) -> None:
        """Make the current stream wait for the last save's copy, and raise the error of a save that failed since.

        Waits in the thread itself on the CPU, and for a copy whose kernels may have found values to keep as they are.
        """
        job = None if self._last is None else self._last._job
        if job is not None:
            job.enqueued.wait()
            if job.coded_later or self._stager.done is None:
                job.staged.wait()
            else:
                torch.cuda.current_stream(self._stager.device).wait_event(self._stager.done)
        self._surface()

    def wait_staged(self) -> None:
        """Until the state may change again."""
        if self._last is not None:
            self._last.wait_staged()

    def wait(self) -> SaveReport | None:
        """Until the last save is durable; its report. Raises the error of one that failed."""
        if self._last is not None and not self._last.skipped:
            self._last._future.exception()
        self._surface()
        return self.last_report

    def close(self) -> None:
        """Wait for what is under way, end the threads, detach from optimizers. Raises the error of a failed save."""
        try:
            self.wait()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._coordinator.shutdown()
            self._writers.shutdown()

    def _surface(self) -> None:
        error, self._unraised = self._unraised, None
        if error is None:
            return
        if self.on_failure == "raise":
            raise error
        warnings.warn(f"a checkpoint was not saved: {error}", RuntimeWarning, stacklevel=3)

    def warm_up(self, state: Any) -> None:
        """Do all of a save of this state but the writing: pins the staging memory and compiles the kernels."""
        parts = parts_of(state, self.rank, self.world_size, self.per_rank)
        plan = self._plan(parts, self._tier(self.policy, None))
        self.pool.reserve(plan.fixed_end + self.pool.slab_bytes + plan.packed_end)

        def drop(_index: int, slab: Slab) -> None:
            if self._stager.stream is not None:
                self._stager.stream.synchronize()
            self.pool.release(slab)

        fixed, packed = Region(self.pool, plan.start, drop), Region(self.pool, 0, drop)
        self._stager.begin(plan, fixed, packed)
        self._stager.copy_direct(plan, fixed, packed)
        self._stager.resolve(plan)
        self._stager.copy_snapshot(plan, fixed, packed)
        plan.release()

    def save(self, step: int, state: Any) -> SaveHandle:
        """Begin a save. Returns when the device's copy is enqueued (CUDA) or all copies are made (CPU).

        Raises `CheckpointError` for a state that can't be stored or a step saved before, `CheckpointRefused`
        when the gate refuses, and the error of an earlier save that failed since.
        """
        marks = [("", time.perf_counter())]
        self._surface()
        if step in self._saved_steps:
            raise CheckpointError(f"step {step} was saved before; a step directory is never written twice")
        if not self._make_way():
            return SaveHandle(step, skipped=True)
        self._saved_steps.add(step)
        site = Site(
            self.root, step, self.run, self.rank, self.world_size, self.policy.name, None, None, self.commit_timeout
        )
        try:
            flat = flatten(state)
            parts = parts_of(flat, self.rank, self.world_size, self.per_rank)
            marks.append(("names", time.perf_counter()))
            policy, error = self._gated(parts, flat)
            pending = self._tier(policy, self._previous)
            marks.append(("gate", time.perf_counter()))
            plan = self._plan(parts, pending)
            marks.append(("plan", time.perf_counter()))
        except Exception as problem:  # also a device without memory left to code in: the other ranks must not wait
            report_failure(site, problem)
            if self.replica is not None:
                self._coordinator.submit(self.replica.decline, site.directory.name, self.replica.source_name)
            if isinstance(problem, CheckpointError):
                raise
            raise CheckpointError(f"planning {site.directory}: {type(problem).__name__}: {problem}") from problem
        base = pending.previous.directory if pending.previous is not None else None
        measured = None if error is None else error.worst
        return self._begin(marks, replace(site, base=base, update_error=measured, preset=policy.name), plan, pending)

    def _make_way(self) -> bool:
        """Whether this save goes on; waits for the one before unless it is to be skipped."""
        busy = self._last is not None and not self._last.done()
        skip = busy and self.back_pressure == "skip"
        if self._control is not None:
            skip = _of_rank_zero(skip, self._control)
        if busy and not skip and self._last is not None:
            self._last._future.exception()
            self._surface()
        return not skip

    def _gated(self, parts: Sequence[Part], flat: Mapping[str, Leaf]) -> tuple[Policy, UpdateError | None]:
        """The policy to save with, after measuring the first resumed update where it is due."""
        if not self.policy.lossy:
            return self.policy, None
        due = self.gate_every > 0 and self._lossy_saves % self.gate_every == 0
        self._lossy_saves += 1
        error = first_update_error(self._moments(parts, flat), self.adam) if due else None
        if error is None or error.worst <= self.gate_threshold:
            return self.policy, error
        if self.on_refusal == "exact":
            return preset("exact"), error
        raise CheckpointRefused(
            f"the first optimizer update after restoring this {self.policy.name} checkpoint would be off by "
            f"{error.worst:.1%} for {error.worst_name} ({error.overall:.1%} overall), more than "
            f"{self.gate_threshold:.1%}; save exactly, or choose another codec for the moments"
        )

    def _moments(self, parts: Sequence[Part], flat: Mapping[str, Leaf]) -> Iterator[Moments]:
        local = {part.name: part for part in parts if isinstance(part.value, torch.Tensor)}
        for name, second in local.items():
            stem, _, last = name.rpartition(".")
            first = local.get(f"{stem}.exp_avg")
            if last != "exp_avg_sq" or first is None:
                continue
            m, v = (self._moment(part) for part in (first, second))
            if m is None or v is None:
                continue
            step = flat.get(f"{stem}.step")
            count = int(step) if isinstance(step, torch.Tensor | int | float) else 1
            yield Moments(stem, m[0], v[0], m[1], v[1], count)

    def _moment(self, part: Part) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A moment's local values and what they would be restored to."""
        value = part.value
        if not isinstance(value, torch.Tensor) or not value.numel():
            return None
        value = value.detach()
        shape = part.box.global_shape if part.box else tuple(value.shape)
        return value, decode(encode(value, self.policy.choose(part.name, shape, value.dtype)), device=value.device)

    def _tier(self, policy: Policy, previous: _Previous | None) -> _Pending:
        """Whether this save is a keyframe or holds deltas against the last one."""
        every = policy.keyframe_every
        full = every is None or previous is None or previous.saves_since_keyframe + 1 >= every
        return _Pending(policy, None if full else previous)

    def _plan(self, parts: Sequence[Part], pending: _Pending) -> Plan:
        """Lay the save out. What is packed in the background is held until then and must fit half of a bounded pool."""
        key = (pending.policy.name, self._zeros) if pending.policy.keyframe_every is None else object()
        return self._plans.get(key, parts, lambda: self._new_plan(parts, pending))

    def _new_plan(self, parts: Sequence[Part], pending: _Pending) -> Plan:
        limit = self.pool.limit_bytes
        plan = lay_out([item_of(part, pending.choose, pending.encode, self._zeros) for part in parts])
        if limit is None or plan.packed_end <= limit // 2:
            return plan
        plan = lay_out([item_of(part, pending.choose, pending.encode, frozenset()) for part in parts])
        if plan.packed_end > limit // 2:
            raise CheckpointError(
                f"{plan.packed_end} bytes are to be compressed in the background, more than half of the {limit} bytes "
                "of staging memory: raise pool_bytes or save without zstd"
            )
        return plan

    def _begin(self, marks: list[tuple[str, float]], site: Site, plan: Plan, pending: _Pending) -> SaveHandle:
        pending.keep_keyframe(plan)
        count = self._saves % COUNT_ZEROS_EVERY == 0
        self._saves += 1
        job = SaveJob(plan, site, self.pool, self._writers, self._stager, self.direct, self.replica, count_zeros=count)
        job.timeline.origin = began = marks[0][1]
        handle = self._last = SaveHandle(site.step)
        handle._job = job
        job.open_soon()
        marks.append(("prepare", time.perf_counter()))
        try:
            self._stager.begin(plan, job.fixed, job.packed)
        except BaseException as error:
            job.failure = error if isinstance(error, CheckpointError) else CheckpointError(f"staging failed: {error}")
            if not isinstance(error, Exception):
                raise
        finally:
            marks.append(("snapshot", time.perf_counter()))
            job.launch_parts = tuple((name, end - start) for (_, start), (name, end) in itertools.pairwise(marks))
            job.timeline.add("launch", began)
            job.launched.set()
            self._coordinator.submit(self._complete, job, handle, pending)
        return handle

    def _complete(self, job: SaveJob, handle: SaveHandle, pending: _Pending) -> None:
        """The background thread's part of a save."""
        try:
            with quick_turns():  # a writer back from the disk would wait for the training thread's next 5 ms
                file = job.run()
            if pending.policy.keyframe_every is not None:
                self._previous = pending.committed(job.site, bytes.fromhex(file.digest))
            self._zeros = job.zeros
            self.last_report = _report(job, file, self._stager)
        except BaseException as error:
            self._previous = None
            failure = (
                error if isinstance(error, CheckpointError) else CheckpointError(f"{job.site.directory}: {error!r}")
            )
            self.failures.append(failure)
            self._unraised = failure
            handle._future.set_exception(failure)
        else:
            handle._future.set_result(self.last_report)


class _Pending:
    """Codecs of one save: deltas against `previous`, or a keyframe that holds delta-coded tensors exactly."""

    def __init__(self, policy: Policy, previous: _Previous | None) -> None:
        self.policy, self.previous = policy, previous
        self._values: dict[str, torch.Tensor] = {}
        self._chains: dict[str, int] = {}
        self._keep: set[str] = set()

    def choose(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Choice:
        """The policy's codec; RAW in place of a delta where there is no base, or the chain is at its end."""
        choice = self.policy.choose(name, shape, dtype)
        if choice.codec is not Codec.DELTA4:
            return choice
        known = self.previous is not None and name in self.previous.values and self.previous.chains[name] < MAX_CHAIN
        if not known:
            self._keep.add(name)
        return choice if known else Choice()

    def encode(self, name: str, tensor: torch.Tensor, choice: Choice) -> tuple[Encoded, bytes, int]:
        """Encode at once; a delta also gives the values it will decode to, which the next builds on (closed loop)."""
        previous = self.previous
        if choice.codec is not Codec.DELTA4 or previous is None:
            return encode(tensor, choice), NO_BASE, 0
        base = previous.values[name]
        found = encode(tensor, choice, base)
        if found.choice.codec is Codec.RAW:
            self._values[name], self._chains[name] = tensor.float().clone(), 0
            return found, NO_BASE, 0
        self._values[name] = decode(replace(found, dtype=torch.float32), base)
        self._chains[name] = previous.chains[name] + 1
        return found, previous.digest, self._chains[name]

    def keep_keyframe(self, plan: Plan) -> None:
        """Copy the values that later deltas will build on, before the state changes."""
        for item in plan.items:
            if item.entry.name in self._keep:
                self._values[item.entry.name] = item.source.float().clone()
                self._chains[item.entry.name] = 0

    def committed(self, site: Site, digest: bytes) -> _Previous:
        """What the next save can build on."""
        age = 0 if self.previous is None else self.previous.saves_since_keyframe + 1
        return _Previous(directory_name(site.step, site.run), digest, age, self._values, self._chains)


def _report(job: SaveJob, file: RankFile, stager: Stager) -> SaveReport:
    line, site = job.timeline, job.site
    spans = tuple(sorted(line.spans, key=lambda span: span[1]))
    staged = [span[2] for span in spans if span[0] == "stage"]
    return SaveReport(
        site.step, site.directory, site.preset, job.plan.source_bytes, file.size,
        launch_s=line.seconds("launch"), staged_s=max(staged, default=0.0), device_s=stager.staged_seconds(),
        durable_s=max(span[2] for span in spans if span[0] != "replica"), direct=job.direct,
        update_error=site.update_error,
        replica=job.replica_path, replica_error=job.replica_error, timeline=spans, launch_parts=job.launch_parts,
        snapshot_bytes=0 if stager.done is None else stager.snapshot_bytes,
    )  # fmt: skip


def _identity() -> tuple[int, int, str]:
    """(rank, world size, an id of this run that all ranks share); a collective under torch.distributed."""
    import torch.distributed as dist

    run = [secrets.token_hex(4)]
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1, run[0]
    dist.broadcast_object_list(run, src=0)
    return dist.get_rank(), dist.get_world_size(), run[0]


def _control_group() -> Any:
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


def _of_rank_zero(choice: bool, group: Any) -> bool:
    """Rank 0's choice."""
    import torch.distributed as dist

    decided = torch.tensor([int(choice)])
    dist.broadcast(decided, src=0, group=group)
    return bool(decided)
