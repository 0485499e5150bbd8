"""The new-run form: texts to a spec and back to a command."""

from __future__ import annotations

import shlex

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.tui.form import build_spec, choices, command_line, parse_extra, preset_names, preset_values
from costlab.probes.spec import PRESETS, WORKLOAD_SIZES, RunSpec, SpecError


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_valid_and_gives_itself_back(preset: str) -> None:
    spec = build_spec(preset_values(preset), "", preset)
    assert spec.preset == (preset if preset in PRESETS else None)
    expected = ["costlab", "run", *(["--preset", preset] if preset in PRESETS else [])]
    assert shlex.split(command_line(spec)) == expected


def test_changed_fields_are_in_the_command() -> None:
    values = preset_values("smoke") | {"ranks": "4", "recompute": "block", "cudagraphs": "on"}
    spec = build_spec(values, "--lr 1e-3 --no-checkpoint --seed=7", "smoke")
    assert (spec.ranks, spec.recompute, spec.cudagraphs, spec.lr, spec.checkpoint, spec.seed) == (
        4,
        "block",
        True,
        1e-3,
        False,
        7,
    )
    words = shlex.split(command_line(spec))
    assert words[:4] == ["costlab", "run", "--preset", "smoke"]
    assert {"--no-checkpoint", "--cudagraphs"} <= set(words)
    assert words[words.index("--ranks") + 1] == "4"


@pytest.mark.parametrize(
    ("values", "extra", "message"),
    [
        ({"ranks": "two"}, "", "--ranks must be a whole number, got 'two'"),
        ({"ranks": "-1"}, "", "--ranks cannot be negative"),
        ({"dtype": "fp8"}, "", "--dtype must be one of fp32, bf16"),
        ({"workload": "bert"}, "", "no workload 'bert'"),
        ({"size": "70b"}, "", "llama has no size '70b'; there are: tiny"),
        ({"cudagraphs": "on", "compile": "none"}, "", "--cudagraphs needs a compiled model"),
        ({}, "--colour red", "extra: no option --colour"),
        ({}, "--seed", "extra: --seed needs a value"),
        ({}, "seed 7", "extra: 'seed' is no option"),
        ({}, "'open", "extra: no closing quotation"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, str], extra: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        build_spec(preset_values("smoke") | values, extra, "smoke")


@given(st.text(max_size=40))
def test_extra_text_is_refused_in_words_or_understood(text: str) -> None:
    try:
        found = parse_extra(text)
    except SpecError as error:
        assert str(error).startswith("extra: ")
    else:
        assert set(found) <= set(RunSpec.__struct_fields__)


def test_a_workload_of_ones_own_may_have_any_size() -> None:
    assert build_spec({"workload": "my/train.py:make", "size": "whatever"}).size == "whatever"


def test_choices_are_those_of_the_spec() -> None:
    assert choices("parallel") == ("ddp", "fsdp", "hsdp")
    assert choices("cudagraphs") == ("off", "on")


def test_the_sizes_offered_are_those_the_workloads_know() -> None:
    from costlab.probes.workloads import gpt2, llama, resnet

    known = {"llama": llama.SIZES, "gpt2": gpt2.SIZES, "resnet50": resnet.SIZES}
    assert {name: tuple(sizes) for name, sizes in known.items()} == WORKLOAD_SIZES


def test_a_default_spec_survives_its_own_command() -> None:
    assert command_line(RunSpec()) == "costlab run"
    changed = msgspec.structs.replace(RunSpec(), workload="a b.py:make")
    assert shlex.split(command_line(changed)) == ["costlab", "run", "--workload", "a b.py:make"]


def test_recomputation_has_named_policies_and_a_share() -> None:
    values = preset_values("smoke")
    for policy in choices("recompute"):
        assert build_spec(values | {"recompute": policy}, "", "smoke").recompute == policy
    assert choices("recompute")[:3] == ("none", "block", "operator")
    with pytest.raises(SpecError, match="--recompute"):
        build_spec(values | {"recompute": "budget:7"}, "", "smoke")
