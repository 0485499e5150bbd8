"""FQNs and layer classes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costlab.probes.fusion import fqn
from costlab.probes.fusion.classes import CLASSES, class_of, classify

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be shared
PART = st.sampled_from(["layers", "0", "11", "mlp", "norm", "module", "w1"])
PATH = st.lists(PART, max_size=5).map(".".join)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("module._orig_mod.layers.0._checkpoint_wrapped_module.mlp", "layers.0.mlp"),
        ("_fsdp_wrapped_module.layers.3._orig_mod", "layers.3"),
        ("net.module.conv", "net.module.conv"),
        ("_orig_mod", ""),
        ("layers.0.__self__.norm1", "layers.0.norm1"),
        ("", ""),
    ],
)
def test_wrappers_leave_no_trace_in_a_name(name: str, expected: str) -> None:
    assert fqn.normalise(name) == expected


@BUSY
@given(PATH)
def test_normalising_twice_changes_nothing(path: str) -> None:
    once = fqn.normalise(path)
    assert fqn.normalise(once) == once


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("L['self'].attn.qkv", "attn.qkv"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self'].layers[3].mlp", "layers.3.mlp"),
        ("L['self'].layers['3'].mlp", "layers.3.mlp"),
        ("L['model']", ""),
        ("G['net'].head", "head"),
        ("L['self'].block@1", "block"),
        ("L['fn'].__self__._modules['norm1']", "norm1"),
    ],
)
def test_a_guard_source_becomes_a_path(source: str, expected: str) -> None:
    assert fqn.from_source(source) == expected


@BUSY
@given(PATH)
def test_ancestors_end_at_the_model(path: str) -> None:
    found = list(fqn.ancestors(path))
    assert found[0] == path and found[-1] == ""
    assert all(fqn.inside(path, a) for a in found)
    assert len(found) == len([p for p in path.split(".") if p]) + 1


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("layers.7", "layers.0", "layers.7"),
        ("layers.7.mlp", "layers.0", "layers.7"),
        ("head", "layers.0", None),
        ("layers.7", "", ""),
        ("", "layers.0", None),
        ("decoder.7", "layers.0", None),
    ],
)
def test_instances_of_a_repeated_block(path: str, root: str, expected: str | None) -> None:
    assert fqn.alike(path, root) == expected


def test_natural_order_counts() -> None:
    names = ["layers.10", "norm", "layers.2", "layers.2.mlp", ""]
    assert sorted(names, key=fqn.natural) == ["", "layers.2", "layers.2.mlp", "layers.10", "norm"]


def test_the_frames_module_is_the_root_unless_paths_say_otherwise() -> None:
    known = frozenset({"", "layers", "layers.0", "layers.0.mlp", "head"})
    assert fqn.closest_root(["layers.0", "layers", ""], ["mlp"], known) == "layers.0"
    assert fqn.closest_root(["layers.0", "layers", ""], ["layers.0.mlp", "head"], known) == ""
    assert fqn.closest_root(["layers.0"], [], known) == "layers.0"
    assert fqn.closest_root([], ["mlp"], known) == ""


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("tok_emb", "Embedding", "embedding"),
        ("layers.3.attention", "Attention", "attention"),
        ("layers.3.attention.wq", "Linear", "attention"),
        ("layers.3.feed_forward.w1", "Linear", "mlp"),
        ("layers.3.mlp.w2", "Linear", "mlp"),
        ("layers.3.attention_norm", "RMSNorm", "norm"),
        ("layer1.0.bn1", "BatchNorm2d", "norm"),
        ("layer1.0.conv1", "Conv2d", "conv"),
        ("layer1.0", "Bottleneck", "conv"),
        ("lm_head", "Linear", "head"),
        ("fc", "Linear", "head"),
        ("criterion", "CrossEntropyLoss", "loss"),
        ("whatever", "Thing", "other"),
        ("", "", "other"),
    ],
)
def test_classes(name: str, kind: str, expected: str) -> None:
    assert classify(name, kind) == expected


@BUSY
@given(PATH, st.sampled_from(["Linear", "Conv2d", "", "LayerNorm", "X"]))
def test_every_class_is_a_known_one(path: str, kind: str) -> None:
    assert classify(path, kind) in CLASSES


def test_the_workloads_own_table_comes_first() -> None:
    known = {"layers.0.mixer": "attention"}
    assert class_of("layers.0.mixer", known) == "attention"
    assert class_of("layers.0.mixer.proj", known) == "attention"
    assert class_of("lm_head", known) == "head"
