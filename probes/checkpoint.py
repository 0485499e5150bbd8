"""Checkpoint saves and loads through torch.distributed.checkpoint while training steps run.

For every configuration: control steps, a copy of the state, the save, and steps until the files are durable; then
the checkpoint is loaded into fresh tensors and compared with that copy, bit by bit or, for a lossy save, against the
bound that its file states. A save's cost is the stall: the time its call blocked training plus what the steps around it
took longer than the median control step. Where steps can be repeated, training also resumes from what costlab's own
engine restored, and its losses are set beside those of the training that went on. Every save gets a fresh folder. A
configuration that fails is a row with a note, never an abort, and all ranks agree on it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from costlab.probes import checkpoint_state as states
from costlab.probes.checkpoint_attempt import attempt as _attempt
from costlab.probes.checkpoint_attempt import words as _words
from costlab.probes.checkpoint_engine import Ceilings, Engine, ceilings_of, stage_rows
from costlab.probes.checkpoint_modes import Pending, Saver, Sync
from costlab.probes.checkpoint_resume import AFTER, Moment, Repeatable, horizon
from costlab.probes.checkpoint_room import device_room as _device_room
from costlab.probes.checkpoint_room import free_disk as _free_disk
from costlab.probes.checkpoint_room import host_available as _host_available
from costlab.probes.checkpoint_savers import savers
from costlab.probes.checkpoint_state import Snapshot, Tree
from costlab.probes.peers import Peers, end_group, new_cpu_group
from costlab.probes.records import CheckpointCodecRow, CheckpointRow, CheckpointStageRow, ResumeRow, StepRow
from costlab.probes.stall import stall

if TYPE_CHECKING:
    import torch
    from torch import nn

Emit = Callable[[str, int, int], None]
Role = Literal["control", "save_sync", "save_async", "warmup"]

LEAST_STEPS = 3
FASTEST_DISK = 4e9  # bytes/s; a state that takes longer than the budget even at this rate is not tried
DISK_RESERVE = 1 << 30
GRACE_S = 20.0  # how long a save may take beyond the budget before it is given up
LOAD_OVERRUN_S = 15.0  # how far the first load may exceed the budget: an unchecked save is worth little
MOST_PARTS = 64


@dataclass
class Measured:
    """All rows of the phase."""

    rows: list[CheckpointRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    stages: list[CheckpointStageRow] = field(default_factory=list)
    codecs: list[CheckpointCodecRow] = field(default_factory=list)
    resumed: list[ResumeRow] = field(default_factory=list)


def measure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run_step: Callable[[], float],
    *,
    directory: Path,
    rank: int,
    world: int,
    device: torch.device,
    steps: int,
    emit: Emit,
    budget_s: float = 60.0,
    configurations: Sequence[Saver] | None = None,
    repeatable: Repeatable | None = None,
    copy_gbps: float | None = None,
    with_ceilings: bool = True,
) -> Measured:
    """Measure every configuration that fits into `budget_s`; called by all ranks alike.

    `run_step` runs one full training step and returns its milliseconds, the device synchronised at its end; it does not
    wait for the device before its clock starts. `directory` must be seen by all ranks; what is written there is
    removed again. Training state is the same afterwards as if only the steps had run. `repeatable` lets steps run
    again from an earlier moment; without it no training is resumed. `copy_gbps` is what the device copies within its
    memory, read and write; with `with_ceilings` the disk's and the bus's are measured before costlab's engine.
    """
    group = new_cpu_group(GRACE_S + budget_s)
    peers = Peers(group)
    owner = _first_of_host(rank)
    existed = directory.exists()
    peers.all(True)  # every rank has looked before the first one makes it
    directory.mkdir(parents=True, exist_ok=True)
    how = (repeatable, copy_gbps, with_ceilings)
    session = _Session(model, optimizer, run_step, directory, rank, world, device, steps, emit, budget_s, peers, *how)
    try:
        session.run(savers(device, world) if configurations is None else configurations)
    finally:
        for save in session.saves if owner else ():
            save.remove()
        if owner and not existed and not any(directory.iterdir()):
            directory.rmdir()
    end_group(group)
    return session.found


@dataclass
class _Save:
    """One configuration's save as it went."""

    row: CheckpointRow
    folder: Path
    reference: Snapshot | None  # what the checkpoint must hold
    window: list[float] = field(default_factory=list)
    moment: Moment | None = None

    @property
    def scratch(self) -> Path:
        """Where a configuration may write before it is measured."""
        return self.folder.with_name(f"{self.folder.name}-start")

    def remove(self) -> None:
        """Delete what was written; a file that cannot be deleted stays and keeps the parent folder."""
        for folder in (self.folder, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Session:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    run_step: Callable[[], float]
    directory: Path
    rank: int
    world: int
    device: torch.device
    steps: int
    emit: Emit
    budget_s: float
    peers: Peers
    repeatable: Repeatable | None = None
    copy_gbps: float | None = None
    with_ceilings: bool = True
    found: Measured = field(default_factory=Measured)
    saves: list[_Save] = field(default_factory=list)
    control: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # of the training that went on, by its step
    ceilings: Ceilings = field(default_factory=Ceilings)
    started: float = field(default_factory=time.perf_counter)

    @property
    def rows(self) -> list[CheckpointRow]:
        """One per operation so far."""
        return self.found.rows

    def run(self, configurations: Sequence[Saver]) -> None:
        """Measure one configuration after the other, then work out the stalls from all control steps."""
        token = int(self.peers.max(time.time_ns() // 1000 if self.rank == 0 else 0))
        for index, saver in enumerate(configurations):
            if reason := self._why_not(saver):
                self._row(saver.name, "save", ok=False, note=f"not run: {reason}")
                continue
            if isinstance(saver, Engine) and self.with_ceilings and not self.ceilings.disk:
                self._measure_ceilings()
            self._control()
            folder = self.directory / f"{token}-{index:02d}-{saver.name.replace(':', '-')}"
            self._measure(saver, folder, last=saver is configurations[-1])
        if any(s.window for s in self.saves):
            self._control()
        for save in self.saves:
            self._fill_stall(save)
        self._name_best()

    def _measure_ceilings(self) -> None:
        folder = self.directory / f"ceilings-{self.rank}"
        size = int(states.local_bytes(states.training_state(self.model, self.optimizer)))
        self.peers.all(True)  # all write at the same time, as in a save
        found, problem = _attempt(lambda: ceilings_of(folder, size, self.device))
        self.ceilings = found or Ceilings(disk=f"not measured: {problem}")
        shutil.rmtree(folder, ignore_errors=True)
        self.peers.all(True)

    def _measure(self, saver: Saver, folder: Path, *, last: bool) -> None:
        save = self._save(saver, folder)
        if isinstance(saver, Engine):
            self.found.codecs += saver.errors.rows if saver.errors else []
        if save.row.ok:
            if isinstance(saver, Engine):
                saver.describe(save.row)
                self.found.stages += stage_rows(saver, self.rank, self.ceilings, self.copy_gbps)
            if late := self._no_load(saver, save.row, last):
                _note(save.row, f"not loaded again: {late}")
            else:
                self._load(saver, save)
        _, problem = _attempt(saver.close)
        if problem:
            _note(save.row, f"closing: {problem}")
        save.reference = None
        self.peers.all(True)  # nobody reads any more
        if _first_of_host(self.rank):
            save.remove()

    def _row(self, mode: str, op: Literal["save", "load"], *, ok: bool, note: str = "") -> CheckpointRow:
        row = CheckpointRow(rank=self.rank, mode=mode, op=op, ok=ok, note=note)
        self.rows.append(row)
        return row

    def _agree(self, row: CheckpointRow, problem: str) -> bool:
        """Whether no rank has a problem; otherwise the row says whose it is."""
        culprit = int(self.peers.max(self.rank if problem else -1))
        if culprit < 0:
            return True
        row.ok = False
        _note(row, problem or f"failed on rank {culprit}")
        return False

    # What may be tried

    def _why_not(self, saver: Saver) -> str:
        """Why this configuration is left out, the same on every rank; "" to run it."""
        if reason := self._too_late("save", 0.0, saver):
            return reason
        sizes, problem = _attempt(self._sizes)
        culprit = int(self.peers.max(self.rank if sizes is None else -1))
        if sizes is None or culprit >= 0:
            return f"get_state_dict: {problem or f'failed on rank {culprit}'}"
        return self._no_room(saver, self.peers.sum(sizes[0]), self.peers.max(sizes[1]))

    def _too_late(self, op: Literal["save", "load"], overrun_s: float, saver: Saver) -> str:
        """Why an operation as long as the longest of its kind so far does not fit into the budget; the same on all.

        Of its kind are costlab's engine's, or DCP's; before the first of a kind, all.
        """
        left = self._left(overrun_s)
        done = [r for r in self.rows if r.ok and r.op == op]
        alike = [r for r in done if r.mode.startswith("costlab") == isinstance(saver, Engine)]
        expected = self.peers.max(max((r.total_ms or 0.0 for r in alike or done), default=0.0)) / 1e3
        if 0 < left >= expected:
            return ""
        return f"{max(left, 0.0):.0f} s left of the checkpoint budget of {self.budget_s:.0f} s, {expected:.0f} s needed"

    def _left(self, overrun_s: float = 0.0) -> float:
        """Seconds of the budget, the same on all ranks."""
        return self.budget_s + overrun_s - self.peers.max(time.perf_counter() - self.started)

    def _no_load(self, saver: Saver, row: CheckpointRow, last: bool) -> str:
        """Why what was saved is not loaded, "" to do it: DCP's plain way must leave time for what may be better."""
        checked = any(r.op == "load" and r.ok for r in self.rows)
        expected = self.peers.max(row.total_ms or 0.0) / 1e3
        left = self._left()
        if isinstance(saver, Sync) and expected > left / 2:
            return f"{max(left, 0.0):.0f} s of the budget are left" + ("" if last else " for other ways of saving")
        return self._too_late("load", 0.0 if checked else LOAD_OVERRUN_S, saver)

    def _sizes(self) -> tuple[float, int]:
        """Bytes of this rank's part of the checkpoint, and of the state it holds."""
        state = states.training_state(self.model, self.optimizer)
        return states.stored_bytes(state, self.world), states.local_bytes(state)

    def _no_room(self, saver: Saver, size: float, held: float) -> str:
        """Disk, host memory or shared memory that is too small for a checkpoint of `size` and `held` bytes a rank."""
        on_host = held * int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        disk = self.peers.min(_free_disk(self.directory))
        host = self.peers.min(_host_available())
        shared = self.peers.min(_free_disk(Path("/dev/shm")))
        if size / FASTEST_DISK > self.budget_s:
            return f"{size / 1e9:.1f} GB take longer than the budget of {self.budget_s:.0f} s on any disk"
        if size * 1.05 + DISK_RESERVE > disk:
            return f"{size / 1e9:.1f} GB needed, {disk / 1e9:.1f} GB free on disk"
        if on_host * saver.host_copies > 0.8 * host:
            return f"{on_host * saver.host_copies / 1e9:.1f} GB of host memory needed, {host / 1e9:.1f} GB available"
        if saver.shared and on_host * 1.05 > shared:
            return f"{on_host / 1e9:.1f} GB needed in /dev/shm, {shared / 1e9:.1f} GB free"
        return ""

    # Steps

    def _step(self, role: Role) -> float:
        start_ns = time.time_ns()
        ms = self.run_step()
        steps = self.found.steps
        steps.append(StepRow(rank=self.rank, step=len(steps), role=role, ms=ms, start_ns=start_ns))
        if self.repeatable is not None:
            self.losses[self.repeatable.index - 1] = self.repeatable.loss()
        return ms

    def _control(self) -> None:
        """Steps with nothing beside them; fewer where they would eat the budget."""
        done = 0
        while done < self.steps:
            self.emit("control steps", done, self.steps)
            self.control.append(self._step("control"))
            done += 1
            if len(self.control) == 1:
                slowest_s = self.peers.max(self.control[0]) / 1e3
                self.steps = max(min(self.steps, int(0.05 * self.budget_s / max(slowest_s, 1e-6))), LEAST_STEPS)

    # One save

    def _save(self, saver: Saver, folder: Path) -> _Save:
        state = states.training_state(self.model, self.optimizer)
        reference, where = self._reference(state)
        save = _Save(self._row(saver.name, "save", ok=True), folder, reference)
        save.row.lossy = saver.lossy
        self.saves.append(save)
        group = new_cpu_group(GRACE_S + self.budget_s)
        self.emit(f"checkpoint {saver.name}: prepare", 0, 1)
        note, problem = _attempt(partial(saver.prepare, state, save.scratch, group))
        if self._agree(save.row, problem):
            _note(save.row, note or "")
            save.moment = Moment.now(self.repeatable, self.device) if self.repeatable else None
            self._run_save(saver, save, group)
        if save.row.ok:
            end_group(group)  # after a failure a thread may still wait in it
        _note(save.row, where)
        return save

    def _run_save(self, saver: Saver, save: _Save, group: Any) -> None:
        _settle(self.device)
        self.peers.all(True)
        began = time.perf_counter()
        # Not synchronised here: copies on a side stream may run on behind the next step, whose end waits for them.
        pending, problem = _attempt(lambda: self._start(saver, save, group))
        save.row.blocked_ms = (time.perf_counter() - began) * 1e3
        ended: list[float] = []
        if pending is not None and pending.done is not None:
            pending.done.add_done_callback(lambda _: ended.append(time.perf_counter()))
        if not self.peers.any(bool(problem)):
            self._follow(saver, save, pending or Pending())
        problem = problem or _outcome(pending)
        if not self._agree(save.row, problem):
            return
        end = ended[0] if ended else None
        save.row.total_ms = save.row.blocked_ms if end is None else (end - began) * 1e3
        save.row.bytes = saver.written(save.folder, self.rank)

    def _start(self, saver: Saver, save: _Save, group: Any) -> Pending:
        state = states.training_state(self.model, self.optimizer)
        pending = saver.save(state, save.folder, group)
        if pending.staged is not None:
            self._protect(pending, save.row)
        return pending

    def _protect(self, pending: Pending, row: CheckpointRow) -> None:
        """Keep the state unchanged until it is copied: wait before the optimizer's update, or now if forward writes."""
        staged = pending.staged
        assert staged is not None
        handles: list[Any] = []
        hook = getattr(self.optimizer, "register_step_pre_hook", None)
        if hook is None or _has_stored_buffers(self.model):
            wait([staged], GRACE_S)
            _note(row, "waits for the copy at once, as the forward pass may write buffers")
            return

        def before_update(*_: object) -> None:
            wait([staged], GRACE_S)
            handles.pop().remove()

        handles.append(hook(before_update))
        _note(row, "waits for the copy before the optimizer's update")

    def _follow(self, saver: Saver, save: _Save, pending: Pending) -> None:
        """Train on until the save is durable on every rank, `steps` steps at least, and not beyond the budget."""
        role: Role = "save_sync" if pending.done is None else "save_async"
        limit = max(self.started + self.budget_s, time.perf_counter() + 0.25 * self.budget_s)
        while True:
            self.emit(f"checkpoint {saver.name}", len(save.window), max(self.steps, len(save.window) + 1))
            save.window.append(self._step(role))
            if len(save.window) < self.steps:
                continue
            if self.peers.all(pending.done is None or pending.done.done()):
                return
            if self.peers.any(time.perf_counter() > limit):
                _note(save.row, "not finished within the budget; the remaining time is waited for, not trained")
                return

    def _reference(self, state: Tree) -> tuple[Snapshot | None, str]:
        """A copy of the state to compare with, on the device if two copies fit there, and a note if it is elsewhere."""
        import torch

        held = self.peers.max(states.local_bytes(state))
        if 2.3 * held < self.peers.min(_device_room(self.device)):
            return states.snapshot(state), ""
        on_host = held * int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        if 2.5 * on_host < self.peers.min(_host_available()):
            return states.snapshot(state, torch.device("cpu")), "compared with a copy in host memory"
        return None, "not compared: no memory for a second copy of the state"

    # One load

    def _load(self, saver: Saver, save: _Save) -> None:
        row = self._row(saver.name, "load", ok=True, note="files in the page cache")
        row.lossy = saver.lossy
        state = states.training_state(self.model, self.optimizer)
        held = self.peers.max(states.local_bytes(state))
        parts = int(held // (0.8 * max(self.peers.min(_device_room(self.device)), 1.0))) + 1
        if parts > MOST_PARTS:
            row.ok, row.note = False, "not run: no device memory to load into"
            return
        total = 0.0
        wrong: list[states.Path] = []
        target: Tree = {}
        for paths in states.in_parts(state, parts):
            self.emit(f"load {saver.name}", 0, parts)
            target = {}
            made, problem = _attempt(partial(states.blank, states.subtree(state, paths)))
            if not self._agree(row, problem):
                return
            target = made or {}
            ms, problem = self._timed(partial(saver.read, target, save.folder, self.peers.group))
            if not self._agree(row, problem):
                return
            total += ms
            if save.reference is not None:
                wrong += self._compared(row, saver, save.reference.part(paths), target)
        row.total_ms = row.blocked_ms = total
        row.bytes = states.local_bytes(state)
        if save.reference is not None:
            row.within_bound, row.identical = (not wrong, None) if saver.lossy else (None, not wrong)
        self._note_load(row, wrong, parts)
        sound = self.peers.all(row.identical is True or row.within_bound is True)
        if isinstance(saver, Sync) and parts == 1 and sound:
            self._restore(row, state, target)
        if isinstance(saver, Engine) and parts == 1 and sound and self.repeatable is not None:
            save.reference = None
            self._resume(row, save, target)

    def _compared(self, row: CheckpointRow, saver: Saver, reference: Snapshot, target: Tree) -> list[states.Path]:
        """Paths that came back otherwise than the save promised."""
        restored = dict(states.leaves(target))
        unkept = [p for p in reference.differences(target) if not _kept(saver, p, reference, restored)]
        return self._unexplained(row, unkept, reference, target)

    def _unexplained(
        self, row: CheckpointRow, wrong: list[states.Path], reference: Snapshot, target: Tree
    ) -> list[states.Path]:
        """`wrong` without what every rank holds whole, each its own, and DCP stores once: it comes back as one rank's.

        Running means of batch norm are such values: equal in kind on all ranks, different in content.
        """
        if not self.peers.any(bool(wrong)):
            return []
        restored = dict(states.leaves(target))
        suspects = {p for found in self.peers.gather(wrong) for p in found}
        whole = [p for p in suspects if p in restored and p in reference.values and not states.is_shard(restored[p])]
        held = self.peers.gather({p: states.digest(reference.values[p]) for p in whole})
        others = {p for p in wrong if p in restored and any(h.get(p) == states.digest(restored[p]) for h in held)}
        if others:
            first = states.dotted(min(others, key=str))
            _note(row, f"{len(others)} values that each rank holds for itself come back as one rank's, first {first}")
        return [p for p in wrong if p not in others]

    def _note_load(self, row: CheckpointRow, wrong: list[states.Path], parts: int) -> None:
        if parts > 1:
            _note(row, f"loaded in {parts} parts: no device memory for a whole second copy")
        if wrong:
            _note(row, f"{len(wrong)} values differ, first {states.dotted(wrong[0])}")

    # Training on from what was restored

    def _resume(self, row: CheckpointRow, save: _Save, target: Tree) -> None:
        """Repeat steps from the restored state; training then goes on with the state and the step it had."""
        moment, source = save.moment, self.repeatable
        if moment is None or source is None:
            return
        left = self.budget_s - self.peers.max(time.perf_counter() - self.started)
        steps = horizon(self.peers.max(median(self.control)) / 1e3, self.peers.min(left))
        if steps < AFTER[-1]:
            missing = ", ".join(f"+{n}" for n in AFTER if n > steps)
            _note(row, f"resumed losses {missing} not run: they would not fit into the checkpoint budget")
        held = self.peers.max(states.local_bytes(target))
        if steps < 0 or 1.2 * held > self.peers.min(_device_room(self.device)):
            _note(row, "" if steps < 0 else "training not resumed: no memory for another copy of the state")
            return
        while source.index <= moment.index + steps:
            self.control.append(self._step("control"))
        state = states.training_state(self.model, self.optimizer)
        now, here = states.renewed(states.blank(state), state), Moment.now(source, self.device)
        self.emit(f"resume {row.mode}", 0, steps + 1)
        losses: list[float] = []
        _, problem = _attempt(lambda: self._repeat(target, moment, steps, losses))
        self._put(now, here)
        self._step("warmup")
        if self._agree(row, problem):
            self.found.resumed += [
                ResumeRow(
                    rank=self.rank, mode=row.mode, after=n, loss=losses[n], exact_loss=self.losses[moment.index + n]
                )
                for n in AFTER
                if n <= steps
            ]

    def _repeat(self, target: Tree, moment: Moment, steps: int, losses: list[float]) -> None:
        assert self.repeatable is not None
        self._put(target, moment)
        for _ in range(steps + 1):
            self.run_step()
            losses.append(self.repeatable.loss())

    def _put(self, state: Tree, moment: Moment) -> None:
        """Make `state` the training's own, at the step and with the random numbers of `moment`."""
        assert self.repeatable is not None
        states.put_in(self.model, self.optimizer, state)
        moment.put_back(self.repeatable, self.device)

    def _restore(self, row: CheckpointRow, state: Tree, target: Tree) -> None:
        """Time set_state_dict with the state that training holds now, so that it goes on unchanged."""
        now = states.renewed(target, state)
        ms, problem = self._timed(partial(states.put_in, self.model, self.optimizer, now))
        if not self._agree(row, problem):
            return
        _note(row, f"dcp.load {row.total_ms or 0:.0f} ms, set_state_dict {ms:.0f} ms")
        row.total_ms = row.blocked_ms = (row.total_ms or 0.0) + ms
        self._step("warmup")

    def _timed(self, work: Callable[[], object]) -> tuple[float, str]:
        _settle(self.device)
        self.peers.all(True)
        began = time.perf_counter()
        _, problem = _attempt(work)
        _settle(self.device)
        return (time.perf_counter() - began) * 1e3, problem

    # Results

    def _fill_stall(self, save: _Save) -> None:
        if not save.row.ok or not save.window:
            return
        result = stall(self.control, save.window, save.row.blocked_ms or 0.0)
        save.row.stall_ms, save.row.stall_low_ms, save.row.stall_high_ms = result
        usual = median(self.control)
        _note(save.row, f"{len(save.window)} steps around it, {len(self.control)} control steps of {usual:.2f} ms")

    def _name_best(self) -> None:
        """Mark the exact asynchronous save with the smallest stall on its slowest rank, unless it restored wrongly.

        A configuration whose checkpoint was compared comes before one for which there was no time.
        """
        compared = {r.mode: r.ok and r.identical is not False for r in self.rows if r.op == "load"}
        found: list[tuple[bool, float, CheckpointRow]] = []
        for row in [s.row for s in self.saves]:
            behind = row.mode != "sync" and not row.mode.startswith("sync:") and not row.lossy
            usable = behind and row.stall_ms is not None and compared.get(row.mode, True)
            if self.peers.all(usable):
                found.append((row.mode not in compared, self.peers.max(row.stall_ms or 0.0), row))
        if found:
            best = min(found, key=lambda f: f[:2])[2]
            best.note = "; ".join(filter(None, (f"best of {len(found)} async configurations", best.note)))


def _kept(saver: Saver, path: states.Path, reference: Snapshot, restored: dict[states.Path, Any]) -> bool:
    """Whether a value that differs does so as its save promised."""
    both = path in reference.values and path in restored
    return both and saver.accepts(states.dotted(path), reference.values[path], restored[path])


def _outcome(pending: Pending | None) -> str:
    """Wait for an asynchronous save; "" when it ended well."""
    if pending is None or pending.done is None:
        return ""
    done, _ = wait([pending.done], GRACE_S)
    if not done:
        return f"not finished {GRACE_S:.0f} s after the checkpoint budget"
    error = pending.done.exception()
    return "" if error is None else _words(error)


def _has_stored_buffers(model: nn.Module) -> bool:
    """Whether a checkpoint holds buffers, such as running means, beside the parameters."""
    return any(
        buffer is not None and name not in module._non_persistent_buffers_set
        for module in model.modules()
        for name, buffer in module._buffers.items()
    )


def _note(row: CheckpointRow, text: str) -> None:
    row.note = "; ".join(filter(None, (row.note, text)))


def _settle(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_of_host(rank: int) -> bool:
    return int(os.environ.get("LOCAL_RANK", rank)) == 0
