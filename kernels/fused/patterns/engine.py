"""Applies the rules to a graph: match, guard, put in, check by shapes, take out what is superfluous, or leave it all.

Nothing here may fail a compilation: whatever goes wrong in a rule becomes a finding and the graph stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from costlab.kernels.fused.patterns import gates, norms, rotary
from costlab.kernels.fused.patterns.guards import Choice, Limits, Path, choose, unshared
from costlab.kernels.fused.patterns.matches import Emitter, Match, NearMiss, Rule
from costlab.kernels.fused.patterns.ops import dtype_of, value, written

# A larger pattern before those it contains.
RULES: dict[str, Rule] = {
    "losses": gates.losses,
    "norms": norms.norms,
    "gates": gates.gates,
    "rotations": rotary.rotations,
}
# Passes over the operands, forward and backward together.
PASSES = {
    "linear_cross_entropy": 3,
    "add_rms_norm": 8,
    "add_layer_norm": 8,
    "rms_norm": 5,
    "layer_norm": 5,
    "gated": 8,
    "rope": 4,
}
FINDINGS = 64


@dataclass(frozen=True)
class Site:
    """A place the rules looked at: rewritten if `path` is not "eager", else left for `reason`.

    `owner` is the path of the innermost module around it, relative to the compiled frame; `frame` are the modules seen
    in the frame as (path, class name), from which the frame's own module can be told.
    """

    kernel: str
    path: Path
    reason: str = ""
    owner: str = ""
    frame: tuple[tuple[str, str], ...] = ()
    graph: int = 0  # number of the graph within its record
    source: str = ""
    dtype: str = ""
    device: str = ""
    rows: int | None = None  # None where symbolic
    columns: int | None = None
    bytes: int | None = None  # what the kernel moves, forward and backward; see `traffic`


PARAMETER = "Parameter"  # in place of a class name: a parameter of the frame's own module
_PARAMETER = re.compile(r"L_[a-z]+_parameters_(\w+)_")
Frame = tuple[tuple[str, str], ...]
Wanted = Callable[[Match, Site], Limits | str]


@dataclass
class Record:
    """What was done to the graphs seen so far."""

    sites: list[Site] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    graphs: int = 0

    def note(self, text: str) -> None:
        """Keep a finding, up to a number that a person would read."""
        if text not in self.findings and len(self.findings) < FINDINGS:
            self.findings.append(text)


def rewrite(
    graph: fx.Graph, wanted: Wanted, record: Record, rules: Iterable[Rule] | None = None, dry: bool = False
) -> int:
    """Rewrite what is wanted in place; the number of rewrites. With `dry` only look.

    `wanted` says for a match in which limits it is to be rewritten, or why not.
    """
    count, frame, seen = 0, frame_of(graph), len(record.sites)
    for rule in RULES.values() if rules is None else rules:
        try:
            for one in rule(graph):  # one at a time: a rule reads on in the graph that the rewrite before has left
                if isinstance(one, NearMiss):
                    record.sites.append(site_of(one.kernel, one.root, frame, Choice("eager", one.reason)))
                else:
                    count += _one(graph, one, frame, wanted, record, dry)
        except Exception as error:  # a rule that fails must not take the compilation with it
            record.note(f"a fusion rule failed with {type(error).__name__}: {error}")
    record.graphs += 1
    record.sites[seen:] = [replace(site, graph=record.graphs) for site in record.sites[seen:]]
    return count


def _one(graph: fx.Graph, match: Match, frame: Frame, wanted: Wanted, record: Record, dry: bool) -> int:
    seen = site_of(match.kernel, match.root, frame, Choice("specialised"), match)
    try:
        limits = wanted(match, seen)
        if isinstance(limits, str):
            choice = Choice("eager", limits)
        else:
            shared = unshared(match)
            choice = Choice("eager", shared) if shared else choose(match, limits, written(graph))
        if choice.path != "eager" and not dry:
            _put_in(graph, match)
    except Exception as error:  # see above; the graph is as it was
        choice = Choice("eager", f"the rewrite failed with {type(error).__name__}: {error}")
        record.note(f"{match.kernel} at {seen.owner or 'the model'} is left as it is: {choice.reason}")
    record.sites.append(site_of(match.kernel, match.root, frame, choice, match, seen))
    return int(choice.path != "eager")


class NotEqual(Exception):
    """The kernel's outputs are not of the replaced ones' shape or dtype."""


def _put_in(graph: fx.Graph, match: Match) -> None:
    """Put the kernel's call in and take the old nodes out; on any failure the graph is left as it was."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = max(match.operands, key=order.__getitem__)
    gone = {*match.inner, *match.outputs}
    users = [u for out in match.outputs for u in out.users if u not in gone]
    if any(order[u] <= order[last] for u in users):
        raise NotEqual("a result is used before all operands are there")
    if last.op == "placeholder":  # nothing may stand between placeholders
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    emitter = Emitter(graph, last)
    try:
        new = match.emit(emitter)
        _check(match, emitter, new)
    except BaseException:
        emitter.undo()
        raise
    for node in emitter.made:
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
            if key in match.root.meta:
                node.meta.setdefault(key, match.root.meta[key])
    for old, fresh in zip(match.outputs, new, strict=True):
        fresh.meta["example_value"] = value(old)
        old.replace_all_uses_with(fresh, delete_user_cb=lambda user: user not in gone)
    _erase(graph, gone, order)


def _check(match: Match, emitter: Emitter, new: tuple[fx.Node, ...]) -> None:
    """Run the new nodes on the example tensors: results must have the old ones' shapes and dtypes."""
    # The examples' own mode: the one that is current while a backend runs may be another.
    mode = getattr(value(match.operands[0]), "fake_mode", None)
    made: dict[fx.Node, Any] = {}
    inside = set(emitter.made)

    def example(node: fx.Node) -> Any:
        return made[node] if node in inside else value(node)

    with mode if mode is not None else nullcontext(), torch.no_grad():
        for node in emitter.made:
            args = fx.map_arg(node.args, example)
            target: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
            made[node] = target(*args)
            if isinstance(made[node], Tensor):
                node.meta["example_value"] = made[node]
    for old, fresh in zip(match.outputs, new, strict=True):
        before, after = value(old), made[fresh]
        if before is None or before.dtype != after.dtype or tuple(before.shape) != tuple(after.shape):
            raise NotEqual(f"the kernel gives {after.dtype} {tuple(after.shape)} for {old.name}")


def _erase(graph: fx.Graph, gone: set[fx.Node], order: dict[fx.Node, int]) -> None:
    """Take out what nothing uses any more, users before what they use."""
    for node in sorted(gone, key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)


def frame_of(graph: fx.Graph) -> Frame:
    """The modules that the graph's code ran in, as (path relative to the frame, class name), and its own parameters."""
    found = {}
    for node in graph.nodes:
        if node.op == "placeholder" and (own := _PARAMETER.fullmatch(str(node.target))):
            found[own[1]] = PARAMETER
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if name := relative(str(path)):
                found[name] = _class_name(kind)
    return tuple(sorted(found.items()))


def site_of(
    kernel: str,
    root: fx.Node,
    frame: Frame,
    choice: Choice,
    match: Match | None = None,
    like: Site | None = None,
) -> Site:
    """The site of a node; `like` gives the place where the node itself may be gone."""
    tensor = None if match is None else value(match.operands[0])
    stack = list((root.meta.get("nn_module_stack") or {}).values())
    owner = relative(str(stack[-1][0])) if stack else ""
    place = like or Site(kernel, "eager", owner=owner, source=_source(root.meta.get("stack_trace")))
    known = match is not None and isinstance(match.rows, int)
    return Site(
        kernel=kernel,
        path=choice.path,
        reason=choice.reason,
        owner=place.owner,
        frame=frame,
        source=place.source,
        dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else _dtype_name(root),
        device=tensor.device.type if tensor is not None else "",
        rows=match.rows if match is not None and known else None,
        columns=match.columns if match is not None and isinstance(match.columns, int) else None,
        bytes=like.bytes if like else traffic(match),
    )


def _dtype_name(node: fx.Node) -> str:
    dtype = dtype_of(node)
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def traffic(match: Match | None) -> int | None:
    """Bytes the kernel itself moves, forward and backward, by its docstring; None where sizes are symbolic.

    Of the loss only what the softmax moves: the products are matrix math.
    """
    if match is None or not isinstance(match.rows, int) or not isinstance(match.columns, int):
        return None
    tensors = [value(n) for n in match.operands]
    first = tensors[0]
    if first is None:
        return None
    elements = match.rows * match.columns
    if match.kernel == "rope" and tensors[1] is not None:
        elements = first.numel() + tensors[1].numel()
    elif match.kernel == "linear_cross_entropy" and tensors[1] is not None:
        elements = match.rows * int(tensors[1].shape[0])
    return PASSES[match.kernel] * elements * first.element_size()


def _class_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2].strip("'>")


def _source(trace: Any) -> str:
    """file.py:line of the innermost frame of a stack trace, without its folders."""
    lines = [line.strip() for line in str(trace or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    name, _, rest = lines[-1].removeprefix("File ").partition(", line ")
    return f"{name.strip(chr(34)).replace(chr(92), '/').rpartition('/')[2]}:{rest.partition(',')[0]}"


def relative(path: str) -> str:
    """Module path relative to the compiled frame, from a source such as `L['self'].layers.0.attn`."""
    text = re.sub(r"^[LG]\['[^']*'\]\.?", "", path)
    text = re.sub(r"_modules\['([^']+)'\]", r"\1", text)
    text = re.sub(r"\['([^']+)'\]|\[(\d+)\]", lambda m: "." + (m[1] or m[2]), text)
    parts = [p for p in text.split(".") if p and p not in ("_orig_mod", "_fsdp_wrapped_module")]
    while parts[:1] == ["module"]:  # DDP's
        parts = parts[1:]
    return ".".join(parts)
