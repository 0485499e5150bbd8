"""Schedules on real sockets between emulated hosts, at a small size; netlab_bench.py measures at a large one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab import Layout, lab, layouts, refusal, sweep
from measure import Result, measure

MBIT = 50.0
REFUSAL = refusal()

pytestmark = pytest.mark.xdist_group("netlab")  # laboratories of two processes would share the machine's two cores
needs_lab = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)


def faster(name: str, nbytes: int, schedule: str) -> Result:
    """A measurement in which `schedule` beats the ring by 1.2x; a busy machine may spoil five of six."""
    layout = next(la for la in layouts(MBIT) if la.name == name)
    for _ in range(6):
        measured = measure(layout, nbytes, repeats=2, others=False)
        gain = measured.seconds("ring") / measured.seconds(schedule)
        if gain >= 1.2 and measured.regret() < 0.3 and worst(measured) < 0.5:
            break
    assert gain >= 1.2
    assert measured.regret() < 0.3, measured.choice.sentence
    assert worst(measured) < 0.5, measured.cells
    return measured


def worst(measured: Result) -> float:
    """Largest error of the simulator, as a factor either way minus one."""
    factors = [c.simulated / c.measured for c in measured.cells if c.simulated is not None]
    return max(max(f, 1 / f) for f in factors) - 1


@needs_lab
def test_hybrid_beats_ring_on_a_daisy_chain() -> None:
    faster("4x2 daisy chain", 5 << 18, "hybrid")


@needs_lab
def test_hybrid_beats_ring_with_a_slow_host_at_the_end() -> None:
    measured = faster("4x2 slow host at the end", 5 << 17, "hybrid")
    order = next(c.plan.order for c in measured.choice.candidates if c.plan.schedule == "hybrid")
    assert 3 in (order[0], order[-1]), "the slow host belongs at an end of the chain"


@needs_lab
def test_two_hosts_gain_from_two_levels() -> None:
    faster("2x4 switched", 3 << 18, "two-level")


@needs_lab
def test_a_failing_lab_leaves_nothing_behind() -> None:
    def spaces() -> set[str]:
        """This process's own: others may make and remove theirs meanwhile."""
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
        return {name for name in names if name.startswith(f"costlab-{os.getpid()}-")}

    before = spaces()
    with pytest.raises(KeyError), lab(Layout("small", 2, 1, MBIT)) as namespaces:
        assert len(spaces() - before) >= len(set(namespaces))
        raise KeyError("on purpose")
    assert spaces() == before


def listed(pid: int) -> bool:
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return f"costlab-{pid}-" in spaces


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lab_ends_with_its_process(number: signal.Signals) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from lab import Layout, lab\n"
        "with lab(Layout('small', 2, 1, 50.0)): os.kill(os.getpid(), int(sys.argv[2]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), str(int(number))])
    assert child.wait(30) in (143, -signal.SIGKILL)
    assert listed(child.pid) == (number == signal.SIGKILL), "what SIGKILL leaves, the next lab removes"
    sweep()
    assert not listed(child.pid)


def test_a_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.os.geteuid", lambda: 1000)
    assert "root" in refusal()
    monkeypatch.setattr("lab.os.geteuid", lambda: 0)
    monkeypatch.setattr("lab.shutil.which", lambda _: None)
    assert "apt-get install iproute2" in refusal()
