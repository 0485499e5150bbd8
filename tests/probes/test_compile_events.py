"""Compile events of functions whose events are known, on the torch that is installed."""

from __future__ import annotations

import inspect
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils

from costlab.probes import compile_internals as internals
from costlab.probes.compile_events import CompileEvents, clean_guard, clean_reason, function_name
from costlab.probes.records import CompileRow
from costlab.probes.sources import scrub, shorten, user_frame

from . import compiled_functions
from .compiled_functions import prints, refused, scaled

HERE = Path(compiled_functions.__file__)
LINES = inspect.getsource(compiled_functions).splitlines()


def line_of(mark: str) -> str:
    number = next(i for i, text in enumerate(LINES, 1) if mark in text)
    return f"{shorten(str(HERE))}:{number}"


@dataclass
class Recorded:
    cold: list[CompileRow]
    warm: list[CompileRow]
    notes: list[str]
    children_before: int  # largest child of this process before the compiles, bytes


def work() -> None:
    compiled = torch.compile(scaled)
    x = torch.ones(4, requires_grad=True)
    compiled(x, 2.0).sum().backward()
    compiled(x.detach().double().requires_grad_(), 2.0).sum().backward()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """One cold and one warm compile through Inductor, with a reset of Dynamo in the middle of each."""
    former = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    torch._dynamo.reset()
    cold, warm = CompileEvents(), CompileEvents()
    for events in (cold, warm):
        with events:
            torch.compile(prints, backend="eager")(torch.ones(3))
            torch.compile(refused, backend="eager")(torch.ones(3))
            torch._dynamo.reset()
            work()
        torch._dynamo.reset()
    yield Recorded(cold.rows(3, "cold"), warm.rows(3, "warm"), cold.notes + warm.notes, children)
    if former is None:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = former


def of(rows: list[CompileRow], kind: str) -> list[CompileRow]:
    return [r for r in rows if r.kind == kind]


def test_nothing_is_missing_on_this_torch(recorded: Recorded) -> None:
    assert recorded.notes == []


def test_rows_carry_rank_and_run(recorded: Recorded) -> None:
    assert {(r.rank, r.run) for r in recorded.cold} == {(3, "cold")}
    assert {(r.rank, r.run) for r in recorded.warm} == {(3, "warm")}


def test_the_break_survives_a_reset_with_reason_and_line(recorded: Recorded) -> None:
    breaks = {b.source: b for b in of(recorded.cold, "break")}
    assert set(breaks) == {line_of("# the break"), line_of("# the refusal")}
    met = breaks[line_of("# the break")]
    assert "print" in met.detail and met.count == 1 and "\n" not in met.detail


def test_a_refused_frame_is_named_as_running_eager(recorded: Recorded) -> None:
    (row,) = (b for b in of(recorded.cold, "break") if b.source == line_of("# the refusal"))
    assert row.detail.startswith("not compiled, runs eager: ")


def test_graphs_with_operators_and_seconds(recorded: Recorded) -> None:
    graphs = of(recorded.cold, "graph")
    named = {(g.name, g.detail): g for g in graphs}
    forward = named["0/0", "scaled"]
    assert forward.count == 2 and forward.seconds and forward.source == line_of("def scaled")
    backward = named["0/0", "scaled (backward)"]
    assert backward.count is None and backward.seconds and backward.source == line_of("def scaled")
    assert any(g.detail.startswith("prints (resumed at line") for g in graphs)


def test_the_recompile_tells_the_failed_guard(recorded: Recorded) -> None:
    (row,) = of(recorded.cold, "recompile")
    assert row.name == "0/1" and "dtype mismatch. expected Float, actual Double" in row.detail
    assert row.source == line_of("def scaled") and row.seconds


def test_caches_miss_cold_and_hit_warm(recorded: Recorded) -> None:
    def counts(rows: list[CompileRow]) -> dict[tuple[str, str], int | None]:
        return {(r.name, r.detail): r.count for r in of(rows, "cache")}

    cold, warm = counts(recorded.cold), counts(recorded.warm)
    assert cold["fx_graph", "miss"] == 4 and cold["fx_graph", "hit"] == 0  # two dtypes, forward and backward
    assert warm["fx_graph", "miss"] == 0 and warm["fx_graph", "hit"] == 4
    assert cold["aot_autograd", "miss"] == 2 and warm["aot_autograd", "hit"] == 2
    assert cold["aot_autograd", "bypass"] == 0 and set(cold) == set(warm)


def test_phases_sum_to_the_total_and_to_the_graphs(recorded: Recorded) -> None:
    for rows in (recorded.cold, recorded.warm):
        seconds = {r.name: r.seconds or 0.0 for r in of(rows, "phase")}
        total = seconds.pop("total")
        assert sum(seconds.values()) == pytest.approx(total)
        graphs = sum(g.seconds or 0.0 for g in of(rows, "graph"))
        assert graphs <= total <= graphs + 1.0  # the rest: frames without a graph
    cold = {r.name: r.seconds for r in of(recorded.cold, "phase")}
    assert {"dynamo", "aot", "inductor", "codegen", "backward", "total"} <= set(cold)


def test_peak_memory_while_compiling(recorded: Recorded) -> None:
    memory = {r.name: r.bytes or 0 for r in of(recorded.cold, "memory")}
    assert memory["host peak"] >= memory["host before"] > 1 << 27  # torch alone is larger
    compiler = memory.get("child peak", 0)  # absent only where a child of another test was larger
    assert compiler > max(recorded.children_before, 1 << 20) or recorded.children_before > 100 << 20
    assert "device peak" not in memory or torch.cuda.is_available()


def test_no_absolute_path_anywhere(recorded: Recorded) -> None:
    for row in recorded.cold + recorded.warm:
        assert str(Path.cwd()) not in row.detail + row.source
        assert not row.source.startswith("/")


def test_everything_is_put_back() -> None:
    from torch._dynamo.callback import CompilationCallbackHandler
    from torch._dynamo.output_graph import GraphCompileReason

    def state() -> tuple[object, ...]:
        limit = torch._dynamo.utils._compilation_metrics.maxlen
        handler = CompilationCallbackHandler
        return (
            limit,
            handler.run_start_callbacks,
            handler.run_end_callbacks,
            GraphCompileReason.__dict__["__post_init__"],
        )

    before = state()
    with pytest.raises(ValueError, match="inside"), CompileEvents():
        assert state() != before
        raise ValueError("inside")
    assert state() == before


def test_many_compiles_are_all_kept() -> None:
    """More than Dynamo's default of 64 records."""
    torch._dynamo.reset()
    with CompileEvents() as events:
        for n in range(70):
            torch._dynamo.reset()
            torch.compile(scaled, backend="eager")(torch.ones(n + 1), 2.0)
    assert len(of(events.rows(0, "cold"), "graph")) == 70


def test_a_failing_collector_leaves_the_compile_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("our own fault")

    torch._dynamo.reset()
    monkeypatch.setattr(CompileEvents, "_on_break", broken)
    with CompileEvents() as events:
        assert torch.compile(prints, backend="eager")(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert events.notes == ["collector error: RuntimeError: our own fault"]


def test_an_absent_internal_is_named_not_fatal() -> None:
    hooks = internals.Hooks(lambda _: None, lambda: None, lambda: None)
    hooks._wrap("torch._dynamo.callback", "NoSuchHandler", "run", lambda: None)
    hooks._wrap("torch._dynamo.no_such_module", "X", "run", lambda: None)
    assert len(hooks.missing) == 2 and "NoSuchHandler" in hooks.missing[0]


def test_counters_cleared_in_between_do_not_go_negative() -> None:
    torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] += 5
    with CompileEvents() as events:
        torch._dynamo.utils.counters.clear()
        torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] += 2
    counts = {(r.name, r.detail): r.count for r in of(events.rows(0, "warm"), "cache")}
    assert counts["fx_graph", "hit"] == 2


def test_reasons_in_one_line() -> None:
    raw = (
        "Failed to trace\n  Explanation: because of `x`\n  Hint: do this.\n"
        "  Hint: Please report an issue to PyTorch.\n\n"
        "  Developer debug context: secret\n\n For more details about this graph break, please visit: https://x/y.html"
    )
    assert clean_reason(raw) == "Failed to trace: because of `x` Hint: do this."
    assert clean_reason("generic_jump TensorVariable()") == "generic_jump TensorVariable()"
    assert clean_reason("\n") == "no reason given"
    assert len(clean_reason("x" * 5000)) == 600


def test_guards_in_one_line() -> None:
    raw = (
        "2/1: x == 4.5                    # if x > 1:  # home/me/model.py:11 in forward\nUser stack trace:\n"
        '  File "model.py", line 11, in forward\n    if x > 1:\n'
        "2/0: tensor 'y' size mismatch at index 0. expected 8, actual 9"
    )
    assert (
        clean_guard(raw) == "2/1: x == 4.5 # if x > 1:; 2/0: tensor 'y' size mismatch at index 0. expected 8, actual 9"
    )
    assert clean_guard("\n") == "no guard given"


def test_function_names() -> None:
    assert function_name("torch_dynamo_resume_in_forward_at_41") == "forward (resumed at line 41)"
    assert function_name("forward") == "forward"


def test_positions_without_absolute_paths(tmp_path: Path) -> None:
    assert shorten(str(tmp_path / "a/b.py"), tmp_path) == "a/b.py"
    assert shorten("/somewhere/else/model.py", tmp_path) == "model.py"
    assert shorten("/opt/v/lib/python3.11/site-packages/torch/nn/functional.py", tmp_path) == "torch/nn/functional.py"
    assert shorten("<string>", tmp_path) == "<string>"
    text = f"f(x)  # {tmp_path}/m.py:7 in forward, see https://pytorch.org/docs/a.html and 3/4 of a/b"
    assert scrub(text, tmp_path) == "f(x)  # m.py:7 in forward, see https://pytorch.org/docs/a.html and 3/4 of a/b"


def test_the_users_frame_is_the_innermost_of_their_own_code() -> None:
    library = "/v/lib/python3.11/site-packages"
    stack = (("/home/me/train.py", 1), ("/home/me/model.py", 2), (f"{library}/torch/nn/modules/module.py", 3))
    assert user_frame(stack) == ("/home/me/model.py", 2)
    assert user_frame(((f"{library}/lib/x.py", 5), (f"{library}/torch/y.py", 6))) == (f"{library}/lib/x.py", 5)
    assert user_frame(((f"{library}/torch/y.py", 6),)) == (f"{library}/torch/y.py", 6)
    assert user_frame(()) == ("", 0)
