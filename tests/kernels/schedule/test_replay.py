"""When work is recorded and replayed; a recorder of the test's own stands for CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from costlab.kernels.schedule.replay import AFTER, KEPT, Replayed, Run, Work


class Recorder:
    """Notes the addresses it records at, and runs the work there when replayed."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replays = 0

    def __call__(self, work: Work, flat: Tensor) -> Run:
        self.recorded.append(flat.data_ptr())

        def run() -> None:
            self.replays += 1
            work(flat)

        return run


def double(flat: Tensor) -> None:
    flat.mul_(2)


def test_a_tensor_that_keeps_coming_is_recorded_once_and_replayed() -> None:
    recorder = Recorder()
    work, flat = Replayed(double, recorder), torch.ones(4)
    for _ in range(AFTER + 3):
        work(flat)
    assert recorder.recorded == [flat.data_ptr()]
    assert recorder.replays == 3
    assert flat.tolist() == [2.0 ** (AFTER + 3)] * 4
    work(flat.view(-1))  # another tensor of the same storage
    assert recorder.replays == 4


def test_a_recording_ends_with_the_storage() -> None:
    recorder = Recorder()
    work = Replayed(lambda _: None, recorder)
    memory = bytearray(64)
    for _ in range(3):
        flat = torch.frombuffer(memory, dtype=torch.float32)  # the same address, each time another storage
        for _ in range(AFTER):
            work(flat)
        del flat
    assert not recorder.recorded


def test_tensors_that_never_come_again_are_forgotten() -> None:
    work = Replayed(double, Recorder())
    flats = [torch.ones(4) for _ in range(3 * KEPT)]
    for flat in flats:
        work(flat)
    assert len(work._places) == KEPT
    assert all(flat.tolist() == [2.0] * 4 for flat in flats)


def test_work_that_cannot_be_recorded_is_done_all_the_same() -> None:
    tried = []

    def fails(_work: Work, flat: Tensor) -> Run:
        tried.append(flat.data_ptr())
        raise RuntimeError("operation not permitted when stream is capturing")

    work, flat = Replayed(double, fails), torch.ones(4)
    with pytest.warns(UserWarning, match="could not be recorded"):
        for _ in range(AFTER + 3):
            work(flat)
    assert tried == [flat.data_ptr()]
    assert flat.tolist() == [2.0 ** (AFTER + 3)] * 4
