"""The interpreter's switch interval: short inside, as before outside, whatever overlaps or fails."""

from __future__ import annotations

import sys
import threading

import pytest

from costlab.kernels.codec.turns import QUICK, quick_turns


@pytest.mark.parametrize("before", [0.005, 0.2, 1e-5])
def test_restored_after_overlapping_blocks_and_errors(before: float) -> None:
    kept = sys.getswitchinterval()
    sys.setswitchinterval(before + 5e-7)
    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        with quick_turns():
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=inside)
    try:
        with pytest.raises(KeyError), quick_turns():
            other.start()
            assert entered.wait(10)
            raise KeyError
        assert sys.getswitchinterval() == pytest.approx(min(before, QUICK), abs=2e-6), "the other block is still inside"
        leave.set()
        other.join()
        assert sys.getswitchinterval() == pytest.approx(before, abs=1e-7)
    finally:
        leave.set()
        sys.setswitchinterval(kept)
