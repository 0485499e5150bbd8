"""Layer classes by FQN and module type."""

from __future__ import annotations

import re
from collections.abc import Mapping

from costlab.probes.fusion.fqn import ancestors

CLASSES = ("embedding", "attention", "mlp", "norm", "conv", "head", "loss", "optimizer", "fsdp", "other")

_BY_TYPE: tuple[tuple[str, str], ...] = (
    (r"embedding|wte$|wpe$|rotary|rope$|position", "embedding"),
    (r"attention|attn|multihead", "attention"),
    (r"norm(\dd)?$|norm\d*d?$", "norm"),
    (r"^(lazy)?conv|convblock|convbn|bottleneck|basicblock|pool", "conv"),
    (r"loss|crossentropy", "loss"),
    (r"mlp|feedforward|^ffn|swiglu|geglu|glu$|expert|moe", "mlp"),
    (r"^(adam|sgd|lion|adagrad|optimizer)", "optimizer"),
    (r"head$|classifier", "head"),
)
_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"^(tok_emb\w*|pos_emb\w*|embed\w*|emb|wte|wpe|\w*embeddings?|rope|rotary\w*)$", "embedding"),
    (
        r"^(attn|attention|self_attn|self_attention|cross_attn|mha|q_proj|k_proj|v_proj|o_proj|qkv\w*|wq|wk|wv|wo)$",
        "attention",
    ),
    (r"^(norm\d*|ln_?\w*|\w*_norm|\w*layernorm|bn\d*|rms\w*|final_norm)$", "norm"),
    (r"^(mlp|ffn|feed_forward|feedforward|experts?|moe|w1|w2|w3|gate_proj|up_proj|down_proj|fc[12])$", "mlp"),
    (r"^(conv\d*|stem|downsample|layer\d+)$", "conv"),
    (r"^(lm_head|head|output|classifier|fc|to_logits)$", "head"),
    (r"^(loss|criterion|loss_fn)$", "loss"),
    (r"^optimizer$", "optimizer"),
    (r"^fsdp$", "fsdp"),
)


def _first(table: tuple[tuple[str, str], ...], text: str) -> str:
    return next((name for expression, name in table if re.search(expression, text)), "")


def classify(fqn: str, module_type: str) -> str:
    """The class of a layer, one of `CLASSES`.

    The innermost FQN component that tells wins, except that a norm, convolution or embedding module is what its type
    says wherever it sits. A projection inside an attention or MLP module belongs to that module's class.
    """
    kind = module_type.lower()
    typed = _first(_BY_TYPE, kind)
    if typed in ("norm", "conv", "embedding", "loss", "attention", "mlp"):
        return typed
    for path in ancestors(fqn):
        named = _first(_BY_NAME, path.rpartition(".")[2].lower())
        if named:
            return named
    return typed or "other"


def class_of(fqn: str, known: Mapping[str, str]) -> str:
    """Class of a layer from the workload's own table, else from the closest classified ancestor, else by its name."""
    if fqn in known:
        return known[fqn]
    for path in ancestors(fqn):
        found = known.get(path, "")
        if found and found != "other":
            return found
    return classify(fqn, "")
