"""The state of a recording, reduced from its events."""

from __future__ import annotations

import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from costlab.app.tui.cells import text_of
from costlab.app.tui.live import PHASES, EventQueue, LiveRun
from costlab.app.tui.panes.live import clock_text, phase_lines, progress_lines
from costlab.probes.records import AnyEvent, Failure, Finished, Heartbeat, Hello, Log, PhaseEvent, Progress, StepEvent
from costlab.probes.spec import RunSpec


def run() -> LiveRun:
    return LiveRun(spec=RunSpec(), run_dir=Path("/runs/x"), began=100.0)


def test_phases_follow_the_first_rank_to_enter_them() -> None:
    live = run()
    for t, rank, phase in [(1, 0, "start"), (2, 1, "start"), (3, 1, "build"), (4, 0, "check-in"), (5, 0, "build")]:
        live.feed(PhaseEvent(t=t, rank=rank, phase=phase))
    assert live.phase == "build"
    assert live.phases["start"].end == 3
    assert live.phases["build"].begin == 3
    assert live.ranks == {0: "build", 1: "build"}


def test_progress_never_goes_back_and_ends_with_its_phase() -> None:
    live = run()
    live.feed(PhaseEvent(t=1, rank=0, phase="measure"))
    live.feed(Progress(t=2, rank=0, phase="measure", done=5, total=20, eta_s=9))
    live.feed(Progress(t=2, rank=1, phase="measure", done=4, total=20))
    assert live.progress is not None
    assert live.progress.done == 5
    text = text_of(progress_lines(live, 60)[0])
    assert "5/20" in text
    assert "ETA 0:09" in text
    live.feed(PhaseEvent(t=3, rank=1, phase="profile"))
    assert live.progress is None


def test_steps_of_another_kind_start_a_new_trend() -> None:
    live = run()
    for n in range(3):
        live.feed(StepEvent(t=n, rank=0, step=n, ms=90.0, role="warmup"))
    live.feed(StepEvent(t=4, rank=0, step=0, ms=50.0, role="timed", loss=2.0))
    live.feed(StepEvent(t=4, rank=1, step=0, ms=999.0, role="timed"))
    assert list(live.steps_ms) == [50.0]
    assert live.typical_ms == 50.0


def test_the_first_failure_is_kept() -> None:
    live = run()
    live.feed(Failure(t=1, rank=1, kind="error", phase="build", message="first"))
    live.feed(Failure(t=2, rank=0, kind="communication", phase="build", message="second"))
    assert live.failure is not None
    assert live.failure.message == "first"


def test_what_is_over_has_a_duration_and_what_is_to_come_has_none() -> None:
    live = run()
    live.feed(PhaseEvent(t=100, rank=0, phase="start"))
    live.feed(PhaseEvent(t=104, rank=0, phase="build"))
    texts = [text_of(row) for row in phase_lines(live, now=110)]
    assert texts[0].split() == ["✓", "start", "4.00", "s"]
    assert texts[PHASES.index("build")].split() == ["▸", "build", "0:06"]
    assert texts[-1].split() == ["·", "write"]
    live.finish("cancelled", 111)
    assert not live.active
    assert live.phases["build"].end == 111


EVENTS: st.SearchStrategy[AnyEvent] = st.one_of(
    st.builds(Hello, t=st.floats(0, 9), rank=st.integers(-1, 3), pid=st.just(1)),
    st.builds(PhaseEvent, t=st.floats(0, 9), rank=st.integers(-1, 3), phase=st.sampled_from([*PHASES, "done", "odd"])),
    st.builds(
        Progress, t=st.floats(0, 9), phase=st.sampled_from(PHASES), done=st.integers(0, 5), total=st.integers(0, 5)
    ),
    st.builds(
        StepEvent, t=st.floats(0, 9), step=st.integers(0, 5), ms=st.floats(0, 9), role=st.sampled_from(["a", "b"])
    ),
    st.builds(Log, t=st.floats(0, 9), text=st.text(max_size=5)),
    st.builds(Heartbeat, t=st.floats(0, 9)),
    st.builds(Finished, t=st.floats(0, 9), rank=st.integers(-1, 3)),
)


@given(st.lists(EVENTS, max_size=40))
def test_any_order_of_events_can_be_drawn(events: list[AnyEvent]) -> None:
    live = run()
    for event in events:
        live.feed(event)
    phase_lines(live, 10.0)
    progress_lines(live, 40)
    assert sum(times.end is None for times in live.phases.values()) <= 1


def test_the_queue_wakes_its_reader_once_for_a_flood() -> None:
    queue = EventQueue()
    wakes: list[bool] = []

    def flood() -> None:
        wakes.extend(queue.put(Log(t=n, text=str(n))) for n in range(500))

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(wakes) == 1
    assert len(queue.take()) == 2000
    assert queue.put(Log(t=0, text=""))


def test_times_are_written_as_clocks() -> None:
    assert [clock_text(s) for s in (0, 21.4, 724, 3753, -3)] == ["0:00", "0:21", "12:04", "1:02:33", "0:00"]
