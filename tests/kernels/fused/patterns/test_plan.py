"""Plan files: what is written is read, and nothing hostile gets through with more than one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.kernels.fused import plan as plans
from costlab.kernels.fused import registry
from costlab.kernels.fused.patterns.engine import PASSES
from costlab.kernels.fused.plan import Guards, Measured, Plan, PlanError, Rewrite, covers, decode, encode, read, write

FIGURES = st.floats(-1e6, 1e6)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=40)
NAMES = st.lists(st.sampled_from(["layers", "*", "0", "mlp", "norm_1", "Block"]), max_size=4).map(".".join)


@st.composite
def rewrites(draw: st.DrawFn) -> Rewrite:
    how: Any = draw(st.sampled_from(["module", "pattern", "loss"]))
    low = draw(st.integers(0, 100))
    return Rewrite(
        kernel=draw(st.sampled_from(plans.KERNELS_OF[how])),
        how=how,
        where=draw(NAMES),
        guards=Guards(rows_min=low, rows_max=draw(st.none() | st.integers(low, 1 << 40)), dtypes=("bfloat16",)),
        predicted_ms=draw(st.none() | FIGURES),
        measured=draw(st.none() | st.builds(Measured, change=FIGURES, low=FIGURES, high=FIGURES, n=st.integers(0, 99))),
        decision=draw(st.sampled_from(["kept", "dropped", "untried"])),
        why=draw(WORDS),
    )


PLANS = st.builds(Plan, workload=WORDS, rewrites=st.lists(rewrites(), max_size=5).map(tuple), notes=st.just(("x",)))


def test_names_are_those_of_the_kernels_there_are() -> None:
    assert set(plans.MODULE_KERNELS) | set(plans.LOSS_KERNELS) == set(registry.KERNELS)
    assert set(plans.PATTERN_KERNELS) == set(PASSES)


@given(PLANS)
@settings(deadline=None)
def test_what_is_written_is_read(plan: Plan) -> None:
    assert decode(encode(plan)) == plan


@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
@settings(deadline=None)
def test_any_bytes_are_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(PlanError) as caught:
        decode(data, "plan.json")
    text = str(caught.value)
    assert text.startswith("plan.json: ") and "\n" not in text and "\x1b" not in text and len(text) < 400


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["kernel", "how", "where", "guards", "predicted_ms", "measured", "decision", "why", "places"])


@given(KEYS, VALUES)
@settings(deadline=None)
def test_any_value_of_a_field_is_read_or_refused_in_one_line(key: str, value: Any) -> None:
    raw = json.loads(encode(Plan(rewrites=(Rewrite(kernel="gated", how="pattern", where="layers.*"),))))
    raw["rewrites"][0][key] = value
    try:
        decode(json.dumps(raw).encode())
    except PlanError as error:
        assert "\n" not in str(error) and "\x1b" not in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "other\x1b[2J"}, "not a fusion plan"),
        ({"rewrites": [{"kernel": "rm -rf", "how": "pattern"}]}, "no kernel 'rm -rf'"),
        ({"rewrites": [{"kernel": "rope", "how": "loss"}]}, "no kernel 'rope' to put in by loss"),
        ({"rewrites": [{"kernel": "rope", "how": "pattern", "where": "a/../b"}]}, "no module name"),
        ({"rewrites": [{"kernel": "rope", "how": "pattern", "guards": {"rows_min": 9, "rows_max": 3}}]}, "no shape"),
        ({"rewrites": [{"kernel": "rope", "how": "pattern", "why": "\x1b[31m"}]}, "control characters"),
        ({"rewrites": [{"kernel": "rope", "how": "pattern"}] * 600}, "at most 512"),
        ({"key": "0" * 16, "environment": {"torch": "2"}}, "edited or damaged"),
    ],
)
def test_damage_is_named(change: dict[str, Any], words: str) -> None:
    raw = json.loads(encode(Plan())) | change
    with pytest.raises(PlanError, match=words.replace("[", r"\[")):
        decode(json.dumps(raw).encode())


def test_files(tmp_path: Path) -> None:
    plan = Plan(rewrites=(Rewrite(kernel="gated", how="pattern", where="layers.*.mlp"),))
    write(plan, tmp_path / "plan.json")
    assert read(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    for path in (tmp_path / "absent.json", tmp_path, "a\0b"):
        with pytest.raises(PlanError, match="cannot read the plan"):
            read(path)
    (tmp_path / "large.json").write_bytes(b" " * (plans.MOST_BYTES + 1))
    with pytest.raises(PlanError, match="at most"):
        read(tmp_path / "large.json")


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(PlanError):
        decode(b'{"format": "costlab-fusion-plan", "version": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_a_star_is_one_index() -> None:
    assert covers("layers.*.mlp", "layers.3.mlp") and covers("layers.*.mlp", "layers.*.mlp")
    assert covers("layers.3.mlp", "layers.3.mlp") and covers("", "")
    assert not covers("layers.*.mlp", "layers.3.attention") and not covers("layers.*", "layers.3.mlp")
    assert not covers("", "layers.3")
