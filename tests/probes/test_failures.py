"""Kinds of failures by their words, and that each says what to try."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from costlab.probes.failures import KINDS, advice, classify
from costlab.probes.session import own_line
from costlab.probes.workloads.base import WorkloadError, coerce

WIDE, NARROW = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3, dtype=torch.bfloat16)
ROWS = torch.zeros(3, dtype=torch.long)
MIXED: list[Callable[[], object]] = [
    lambda: functional.linear(WIDE, NARROW[0, 0]),
    lambda: functional.conv2d(WIDE, NARROW),
    lambda: functional.scaled_dot_product_attention(WIDE, NARROW, WIDE),
    lambda: functional.layer_norm(NARROW, (3,), torch.ones(3, dtype=torch.float64)),
    lambda: torch.dot(WIDE.flatten(), NARROW.flatten()),
    lambda: torch.ones(3).index_add(0, ROWS, NARROW[0, 0, 0]),
    lambda: torch.ones(3).index_put((ROWS,), NARROW[0, 0, 0]),
    lambda: torch.ones(3).scatter_add(0, ROWS, NARROW[0, 0, 0]),
    lambda: torch.baddbmm(WIDE[0], NARROW[0], WIDE[0]),
    lambda: torch.lerp(WIDE, NARROW, 0.5),
    lambda: torch.nn.LSTM(3, 3)(NARROW[0]),
    lambda: functional.binary_cross_entropy(WIDE, NARROW),
    lambda: functional.prelu(WIDE, NARROW[0, 0, 0, :1]),
    lambda: torch.fft.fft(NARROW),
    lambda: torch.linalg.svd(NARROW[0, 0]),
    lambda: functional.batch_norm(WIDE, torch.zeros(1), torch.ones(1), NARROW.flatten()[:1], training=True),
]


@pytest.mark.parametrize("mix", MIXED)
def test_operators_that_take_one_element_type_say_so(mix: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        mix()
    assert classify(type(caught.value).__name__, str(caught.value)) == "dtype"


def test_the_users_own_line_is_named_where_one_is_in_the_traceback(tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text("import json\n\n\ndef make():\n    return json.loads('{')\n")
    scope: dict[str, Callable[[], object]] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(ValueError) as caught:
        scope["make"]()
    assert own_line(caught.value) == "my_model.py:5"
    assert (
        advice("error", own_line(caught.value))
        == "look at my_model.py:5, the last line of your own code in the traceback"
    )
    assert "my_model.py:5" in advice("dtype", "my_model.py:5") and "--dtype fp32" in advice("dtype", "my_model.py:5")
    with pytest.raises(WorkloadError) as of_ours:
        coerce(1, "here")
    of_ours.value.__traceback__ = of_ours.tb.tb_next
    assert own_line(of_ours.value) == ""
    assert advice("error", "") == KINDS["error"]


def test_a_line_of_costlab_reached_through_a_link_is_not_the_users_own(tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.symlink_to(Path(inspect.getfile(coerce)).parent)
    scope: dict[str, Callable[..., object]] = {}
    source = Path(inspect.getfile(coerce)).read_text()
    exec(compile(source, str(linked / "base.py"), "exec"), scope)
    with pytest.raises(Exception, match="here") as caught:
        scope["coerce"](1, "here")
    assert any(str(linked) in str(entry.path) for entry in caught.traceback)
    caught.value.__traceback__ = caught.tb.tb_next
    assert own_line(caught.value) == ""


def test_other_advice_has_no_line() -> None:
    assert advice("disk", "my_model.py:5") == KINDS["disk"]


@pytest.mark.parametrize(
    ("name", "message", "kind"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "out-of-memory"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", "host-out-of-memory"),
        ("DistBackendError", "NCCL error: unhandled system error", "communication"),
        ("RuntimeError", "your module has parameters that were not used in producing loss.", "unused-parameters"),
        ("NotImplementedError", "Could not run 'x' with arguments from the 'SparseCPU' backend", "sparse-gradients"),
        ("AttributeError", "'DistributedDataParallel' object has no attribute 'training_step'", "past-the-wrapper"),
        ("RuntimeError", "aten.mm.default got mixed torch.Tensor and DTensor, need to convert", "past-the-wrapper"),
        ("AttributeError", "'FSDPNet' object has no attribute 'head2'", "error"),
        ("AssertionError", "FSDP expects uniform original parameter dtype but got {a, b}", "mixed-parameters"),
        ("AssertionError", "FSDP expects uniform reduce dtype but got {a, b}", "mixed-parameters"),
        ("ValueError", "fully_shard doesn't support scalar parameters. Change x to a 1D tensor", "scalar-parameters"),
        ("RuntimeError", "result type Float can't be cast to the desired output type Long", "error"),
        ("AssertionError", "FSDP expects uniform requires_grad but got {True, False}", "error"),
        ("RuntimeError", "AdamW does not support sparse gradients", "sparse-gradients"),
        ("RuntimeError", "torch.compile with aot_autograd does not currently support double backward", "compile"),
        ("OSError", "[Errno 28] No space left on device", "disk"),
        ("RuntimeError", "shape '[2, 3]' is invalid for input of size 5", "error"),
    ],
)
def test_known_words_have_a_kind_with_advice(name: str, message: str, kind: str) -> None:
    assert classify(name, message) == kind
    assert KINDS[kind]
