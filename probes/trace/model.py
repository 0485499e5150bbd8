"""What a rank's trace is turned into, whatever recorded it. Plain values; times in us of the trace's clock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Launch:
    """One execution of a device kernel, copy or collective (on CPU: of a leaf operator)."""

    name: str
    start: float
    dur: float
    category: str  # matmul | memory | communication | copy | other
    stream: str = ""
    step: int = 0  # index of the profiled step
    phase: str = ""  # forward | backward | optimizer | other
    layer: str = ""  # FQN of the innermost costlab:: or module annotation it was launched under
    frame: str = ""  # FQN of the compiled block whose graph launched it, "" when eager
    compiled: bool = False
    op: str = ""  # launching operator
    launch_start: float | None = None  # host time of the launch call
    bytes_moved: int | None = None
    correlation: int | None = None

    @property
    def end(self) -> float:
        """End time in us."""
        return self.start + self.dur


@dataclass(slots=True)
class Collective:
    """One collective call as its issuing operator described it."""

    kind: str
    start: float
    dur: float
    step: int
    seq: int
    group: str
    group_size: int  # 0: the trace does not say
    dtype: str
    bytes_in: int | None  # None: the trace does not say
    bytes_out: int | None
    exposed: float = 0.0
    layer: str = ""
    phase: str = ""
    schedule: str = ""  # of our own, "" for the library's


@dataclass(slots=True)
class StepWindow:
    """One profiled step on the trace's clock."""

    step: int
    start: float
    end: float


@dataclass(slots=True)
class RankTrace:
    """A rank's profiled steps."""

    rank: int | None
    device: str  # cuda | cpu
    steps: list[StepWindow] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    parts: list[tuple[int, str, float]] = field(default_factory=list)  # step, part name, us; sums to the window
    problems: list[str] = field(default_factory=list)  # what is missing or damaged, in words
