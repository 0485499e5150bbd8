"""What can be asked, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from costlab.app.whatif.spec import (
    BASELINE,
    CONTROL,
    WhatIfSpec,
    accept,
    from_command,
    make_whatif,
    parse_setting,
    spec_key,
)
from costlab.app.whatif.toggles import TOGGLES, Machine
from costlab.probes.spec import RunSpec, SpecError

CPU, BOX = Machine(gpus=0), Machine(gpus=2)
BASE = RunSpec(dtype="fp32", ranks=1)


def make(*items: str, machine: Machine = BOX, base: RunSpec = BASE, **options: object) -> WhatIfSpec:
    return make_whatif(base, items, machine=machine, **options)  # type: ignore[arg-type]


def test_each_item_is_tried_alone_and_then_all_together() -> None:
    whatif = make("cudagraphs", "bf16", "batch=8")
    assert [v.name for v in whatif.variants] == ["cudagraphs", "bf16", "batch=8", "cudagraphs + bf16 + batch=8"]
    assert whatif.arm("cudagraphs + bf16 + batch=8") == msgspec.structs.replace(
        whatif.baseline, cudagraphs=True, dtype="bf16", batch=8
    )
    assert whatif.arms()[0] == BASELINE
    assert whatif.arms()[-1] == CONTROL
    assert whatif.arm(CONTROL) == whatif.arm(BASELINE)


def test_items_that_contradict_each_other_are_not_joined() -> None:
    assert [v.name for v in make("batch=4", "batch=8").variants] == ["batch=4", "batch=8"]


def test_a_plus_joins_two_in_one_variant() -> None:
    eager = msgspec.structs.replace(BASE, compile="none")
    whatif = make("compile+cudagraphs", base=eager)
    assert whatif.arm("compile+cudagraphs").cudagraphs
    assert whatif.arm("compile+cudagraphs").compile == "block"


def test_a_factorial_has_every_combination() -> None:
    whatif = make("cudagraphs", "bf16", "sgd", factorial=True)
    assert [len(v.factors) for v in whatif.variants] == [1, 1, 1, 2, 2, 2, 3]
    with pytest.raises(SpecError, match="2 to 4 items"):
        make("bf16", factorial=True)
    with pytest.raises(SpecError, match="different options"):
        make("batch=4", "batch=8", factorial=True)


def test_settings_are_one_variant_unless_factorial() -> None:
    one = make_whatif(BASE, (), ["batch=8", "seq=256"], machine=CPU)
    assert [v.options for v in one.variants] == [{"batch": 8, "seq": 256}]
    every = make_whatif(BASE, (), ["batch=8", "seq=256"], factorial=True, machine=CPU)
    assert len(every.variants) == 3


@pytest.mark.parametrize(
    ("item", "machine", "words"),
    [
        ("cudagraphs", CPU, "needs a CUDA GPU"),
        ("hsdp", CPU, "at least 2 ranks, this run has 1"),
        ("compile", CPU, "the baseline has it already"),
        ("dtype=fp32", CPU, "changes nothing"),
        ("fusd", CPU, "no toggle and no KEY=VALUE"),
        ("bach=8", CPU, "did you mean batch?"),
        ("batch=many", CPU, "batch=many"),
        ("dtype=fp16", CPU, "choose from fp32, bf16"),
        ("seed=3", CPU, "no option 'seed' to vary"),
        ("batch=-1", CPU, "cannot be negative"),
        ("compile=none+cudagraphs", BOX, "compiled"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_words(item: str, machine: Machine, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make(item, machine=machine)


def test_too_few_legs_no_item_and_many_hosts_are_refused() -> None:
    with pytest.raises(SpecError, match="at least 2"):
        make("bf16", legs=1)
    with pytest.raises(SpecError, match="nothing to try"):
        make()
    with pytest.raises(SpecError, match="twice"):
        make("bf16", "bf16")
    with pytest.raises(SpecError, match="one host"):
        make("bf16", base=RunSpec(dtype="fp32", nnodes=2, rdzv_endpoint="a:1"))


@pytest.mark.parametrize("toggle", TOGGLES.values(), ids=lambda t: t.name)
def test_toggles_set_options_that_exist(toggle: object) -> None:
    options = toggle.options  # type: ignore[attr-defined]
    changed = msgspec.structs.replace(RunSpec(), **options)
    assert msgspec.convert(msgspec.to_builtins(changed), RunSpec) == changed


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("batch=8", {"batch": 8}),
        ("--compile-mode=reduce-overhead", {"compile_mode": "reduce-overhead"}),
        ("cudagraphs=true", {"cudagraphs": True}),
        ("lr=1e-3", {"lr": 0.001}),
    ],
)
def test_settings_have_the_option_s_type(text: str, options: dict[str, object]) -> None:
    assert parse_setting(text) == options


@pytest.mark.parametrize(
    ("fragment", "item"),
    [
        ("--dtype bf16", "dtype=bf16"),
        ("--compile block --cudagraphs", "compile=block+cudagraphs=true"),
        ("--compile-mode=reduce-overhead", "compile_mode=reduce-overhead"),
        ("--no-checkpoint --batch 8", "checkpoint=false+batch=8"),
    ],
)
def test_what_a_finding_names_as_proof_is_an_item(fragment: str, item: str) -> None:
    assert from_command(fragment) == item


@pytest.mark.parametrize("fragment", ["bf16", "--bach 8", "--dtype fp12"])
def test_what_is_no_option_proves_nothing(fragment: str) -> None:
    with pytest.raises(SpecError):
        from_command(fragment)


def test_accepting_a_variant_makes_it_the_baseline() -> None:
    whatif = make("bf16")
    assert accept(whatif.baseline, whatif.variants[0]).dtype == "bf16"


def test_the_key_tells_questions_apart_and_not_presets(tmp_path: Path) -> None:
    same = make("bf16", base=msgspec.structs.replace(BASE, preset="smoke"))
    assert spec_key(make("bf16")) == spec_key(same)
    assert spec_key(make("bf16")) != spec_key(make("bf16", legs=5))
    file = tmp_path / "own.py"
    own = msgspec.structs.replace(BASE, workload=f"{file}:make")
    file.write_text("a = 1\n")
    before = spec_key(make("bf16", base=own))
    file.write_text("a = 2\n")
    assert spec_key(make("bf16", base=own)) != before
