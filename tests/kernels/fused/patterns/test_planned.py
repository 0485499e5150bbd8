"""Plans on models: through Inductor's hook, per block and whole, with known and symbolic shapes, and undone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn

from costlab import kernels
from costlab.kernels.fused.launch import INTERPRETED
from costlab.kernels.fused.patterns.capture import rewriting
from costlab.kernels.fused.patterns.engine import Record
from costlab.kernels.fused.patterns.inductor import PatternPass, install, supported
from costlab.kernels.fused.plan import Guards, Plan, PlanError, Rewrite, environment_key
from costlab.kernels.fused.planned import Wanted, apply, environment
from tests.kernels.fused.patterns import user_models as models

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes no fake tensors")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    assert inductor.pre_grad_custom_pass is None


def rewrite(kernel: str, where: str = "", **more: Any) -> Rewrite:
    return Rewrite(kernel=kernel, how="pattern", where=where, **more)


def gradients(model: nn.Module, run: Any, tokens: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(tokens), list(model.parameters())))


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-7


@pytest.mark.skipif(os.name != "posix", reason="compiles C++")
def test_inductors_hook_puts_the_plan_in_and_gradients_stay() -> None:
    model, tokens = models.Functional(), torch.randint(0, 50, (2, 16))
    expected = gradients(model, model, tokens)
    plan = Plan(rewrites=(rewrite("add_rms_norm", "blocks.*"), rewrite("gated", "blocks.*"), rewrite("rope", "head")))
    applied = apply(model, plan, reference=True)
    try:
        close(gradients(model, torch.compile(model), tokens), expected)
    finally:
        applied.undo()
    done = [(s.kernel, s.owner) for s in applied.record.sites if s.path != "eager"]
    assert sorted(done) == [("add_rms_norm", f"blocks.{i}") for i in (0, 0, 1, 1)] + [
        ("gated", f"blocks.{i}") for i in (0, 1)
    ], applied.record.sites
    left = {s.kernel for s in applied.record.sites if s.reason == "not in the plan"}
    assert {"rope", "linear_cross_entropy", "add_rms_norm"} <= left
    assert not applied.findings and not applied.record.findings


def by_block(model: nn.Module, backend: Any, **options: Any) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend, **options)


def test_a_compiled_block_is_known_by_the_model_it_is_in() -> None:
    """Code in no submodule of its frame has no path; the frame is told by its parameters."""
    model, tokens = models.Functional(), torch.randint(0, 50, (2, 16))
    expected = gradients(model, model, tokens)
    record = Record()
    by_block(
        model,
        rewriting(Wanted(model, [rewrite("gated", "blocks.*"), rewrite("rope", "blocks.*")], reference=True), record),
    )
    close(gradients(model, model, tokens), expected)
    assert {s.kernel for s in record.sites if s.path == "specialised"} == {"gated", "rope"}


def test_a_path_is_chosen_for_each_shape() -> None:
    """Within the plan's rows a kernel, outside the unfused operations, symbolic rows where the plan serves them."""
    model = models.PostNorm()
    for dynamic, paths in ((True, {"dynamic", "eager"}), (False, {"eager"})):
        torch._dynamo.reset()
        record = Record()
        limits = Guards(rows_min=10, rows_max=40, dynamic=dynamic)
        wanted = Wanted(model, [rewrite("gated", guards=limits)], reference=True)
        compiled = torch.compile(model, backend=rewriting(wanted, record), dynamic=True)
        for rows in (2, 5, 6, 20):
            x = torch.randn(3, rows, 24)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        assert {s.path for s in record.sites if s.kernel == "gated"} == paths, record.sites
    torch._dynamo.reset()
    record = Record()
    compiled = torch.compile(model, backend=rewriting(Wanted(model, [rewrite("gated")], reference=True), record))
    compiled(torch.randn(3, 4, 24))
    assert [s.path for s in record.sites if s.kernel == "gated"] == ["specialised"] * 2


def test_another_models_graphs_are_left_alone() -> None:
    record = Record()
    wanted = Wanted(models.Functional(), [rewrite("gated")], reference=True)
    torch.compile(models.PostNorm(), backend=rewriting(wanted, record))(torch.randn(3, 4, 24))
    gates = [s for s in record.sites if s.kernel == "gated"]
    assert gates and all(s.path == "eager" and "not of the model" in s.reason for s in gates)


def test_without_kernels_nothing_is_put_in_and_it_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels run here")
    model = models.PostNorm()
    applied = kernels.apply(model, Plan(rewrites=(rewrite("gated"),)))
    assert applied.idle and "not available on cpu" in applied.findings[0]
    assert applied.fused_loss(lambda m, b: m(b), torch.randn(2, 3)) is None
    applied.undo()


def test_another_environment_is_said() -> None:
    model, other = models.PostNorm(), {**environment(torch.device("cpu")), "device": "another"}
    plan = Plan(environment=other, key=environment_key(other), rewrites=(rewrite("gated"),))
    applied = apply(model, plan, reference=True)
    applied.undo()
    assert applied.findings == ["the plan was measured elsewhere (device differ): its savings are not this machine's"]


def test_a_plan_for_another_model_changes_nothing() -> None:
    model = models.PostNorm()
    plan = Plan(rewrites=(Rewrite(kernel="rope", how="module", where="layers.*.attention"),))
    applied = apply(model, plan, reference=True)
    applied.undo()
    assert applied.swapped == [] and "fits nothing in this model" in applied.findings[-1]


def test_a_plan_file_that_cannot_be_read_is_one_line() -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        kernels.apply(models.PostNorm(), "no-such-plan.json")


def test_a_pass_that_is_there_already_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported()
    called: list[str] = []
    before = PatternPass(lambda _m, _s: "no", Record(), "first")
    monkeypatch.setattr(PatternPass, "__call__", lambda self, _graph: called.append(self.identity))
    inductor.pre_grad_custom_pass = before
    remove = install(lambda _m, _s: "no", Record(), "second")
    mine = inductor.pre_grad_custom_pass
    assert mine is not None and mine.before is before  # type: ignore[union-attr]
    assert mine.uuid() != before.uuid() and mine.uuid()[1] == "second"  # type: ignore[union-attr]
    monkeypatch.undo()
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    mine(graph)  # type: ignore[operator]
    remove()
    assert inductor.pre_grad_custom_pass is before
    inductor.pre_grad_custom_pass = None
    nameless = PatternPass(lambda _m, _s: "no", Record(), "third", before=lambda _graph: None)
    assert nameless.uuid() is None
