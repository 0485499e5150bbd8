"""The layer tree of the fusion trace: traffic by module FQN, folded upwards, with identical siblings on one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from costlab.app.analysis import fusion_targets
from costlab.app.analysis.views import ClassRow, LayerRow
from costlab.probes.records import FusionStatus

COMPLETE, BROKEN = 0.95, 0.5
_WORST: dict[FusionStatus, int] = {"broken": 3, "partial": 2, "complete": 1, "unknown": 0}
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(slots=True)
class Traffic:
    """What a layer itself moves per step, without its children; bytes and ms."""

    bytes: int = 0
    lost: int = 0
    structural: int = 0
    ms: float = 0.0
    kernels: int = 0
    measured: bool = False  # whether any time was measured
    traced: bool = False  # whether the fusion trace knows it
    causes: Counter[tuple[bool, str]] = field(default_factory=Counter)  # (addressable, cause) -> bytes
    statuses: list[FusionStatus] = field(default_factory=list)
    hint: str = ""  # the cause its span names, for a layer without missed fusions

    def __iadd__(self, other: Traffic) -> Traffic:
        self.bytes += other.bytes
        self.lost += other.lost
        self.structural += other.structural
        self.ms += other.ms
        self.kernels += other.kernels
        self.measured |= other.measured
        self.traced |= other.traced
        self.causes.update(other.causes)
        self.statuses += other.statuses
        self.hint = self.hint or other.hint
        return self

    @property
    def rate(self) -> float | None:
        """1 - addressable lost / actual bytes; None where there is nothing to fuse."""
        return min(max(1 - self.lost / self.bytes, 0.0), 1.0) if self.bytes else None

    @property
    def strict_rate(self) -> float | None:
        """The same with structural losses counted."""
        return min(max(1 - (self.lost + self.structural) / self.bytes, 0.0), 1.0) if self.bytes else None

    @property
    def main_cause(self) -> str:
        """The cause that loses most; one that can be removed goes before one that cannot."""
        return max(self.causes.items(), key=lambda c: (c[0][0], c[1]))[0][1] if self.causes else self.hint


@dataclass
class Node:
    """A module of the tree. `members` are the FQNs it stands for, one unless identical siblings were folded."""

    name: str
    path: str
    layer_class: str = ""
    own: Traffic = field(default_factory=Traffic)
    children: dict[str, Node] = field(default_factory=dict)
    verdict: FusionStatus | None = None  # given from outside; stands above what the spans add up to

    @cached_property
    def all(self) -> Traffic:
        """Own traffic and that of everything below."""
        whole = Traffic()
        whole += self.own
        for child in self.children.values():
            whole += child.all
        return whole

    @cached_property
    def status(self) -> FusionStatus:
        """The given verdict, else see `status_of`."""
        return self.verdict or status_of(self.all.rate, self.own.statuses, [c.status for c in self.children.values()])

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for siblings whose figures are alike: structure, statuses, rates and bytes; times differ by noise."""
        t = self.all
        below = tuple((n, c.signature) for n, c in self.children.items())
        rate = None if t.rate is None else round(t.rate, 2)
        return self.layer_class, self.status, rate, t.bytes, t.lost, t.structural, below


def status_of(rate: float | None, own: Sequence[FusionStatus], below: Sequence[FusionStatus] = ()) -> FusionStatus:
    """Verdict of a layer: what its own spans say if they are broken, else by rate, tempered by what is below it."""
    known = [s for s in (*own, *below) if s != "unknown"]
    if not known:
        return "unknown"
    if "broken" in own or all(s == "broken" for s in known) or (rate is not None and rate < BROKEN):
        return "broken"
    if "broken" in known or (rate is not None and rate < COMPLETE):
        return "partial"
    return "complete" if rate is not None else max(known, key=_WORST.__getitem__)


def build_tree(own: dict[str, Traffic], classes: dict[str, str]) -> Node:
    """The tree of all layers in `own` (module FQN -> its traffic), containers filled in.

    Siblings come in the order of `classes` (the model's own), unknown ones after them.
    """
    root = Node(name="model", path="", layer_class=classes.get("", ""))
    place = {path: n for n, path in enumerate(classes)}
    for path in sorted(own, key=lambda p: (place.get(p, len(place)), _natural(p))):
        node = root
        for name in path.split(".") if path else ():
            below = f"{node.path}.{name}" if node.path else name
            node = node.children.setdefault(name, Node(name=name, path=below, layer_class=classes.get(below, "")))
        node.own += own[path]
    return root


def _natural(path: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in path.split(".")]


def strip_index(layer: str) -> str:
    """The FQN with every index replaced: layers.3.attention -> layers.*.attention."""
    return _INDEX.sub("*", layer)


def covers(path: str, layer: str) -> bool:
    """Whether the line `path` of the fusion tree stands for module `layer` or one above it.

    A component of `path` may be "*", or a list of indices and ranges such as "0,2-5".
    """
    want, have = path.split(".") if path else [], layer.split(".") if layer else []
    return len(want) <= len(have) and all(_matches(w, h) for w, h in zip(want, have, strict=False))


def _matches(want: str, have: str) -> bool:
    if want == have or (want == "*" and have.isdecimal()):
        return True
    if not have.isdecimal() or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", want):
        return False
    ends = [part.partition("-") for part in want.split(",")]
    return any(int(low) <= int(have) <= int(high or low) for low, _, high in ends)


def _ranges(indices: Sequence[int]) -> str:
    """[0, 2, 3, 4] -> "0,2-4"."""
    out: list[list[int]] = []
    for i in sorted(indices):
        if out and i == out[-1][1] + 1:
            out[-1][1] = i
        else:
            out.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def target_of(layer_class: str) -> float:
    """The fusion-rate target of a layer class: the user's, else that of targets.toml."""
    return fusion_targets.active().of(layer_class)


def gap_ms(t: Traffic, layer_class: str, copy_gbps: float | None) -> float | None:
    """Time saved by closing the gap to the target, modelled on the measured copy bandwidth; None without a rate."""
    if t.rate is None or not t.traced:
        return None
    return saves_ms(fusion_targets.gap_bytes(t.bytes, t.lost, target_of(layer_class)), copy_gbps)


def saves_ms(lost: int, copy_gbps: float | None) -> float | None:
    """Time that moving `lost` bytes takes at the measured copy bandwidth (read + write)."""
    return lost / (copy_gbps * 1e6) if copy_gbps else None


def layer_rows(root: Node, copy_gbps: float | None) -> list[LayerRow]:
    """The tree as lines from the model down, identical siblings folded."""
    return list(_lines([root], "", "model", 0, 1, copy_gbps))


def _lines(
    members: list[Node], path: str, label: str, depth: int, alike: int, copy_gbps: float | None
) -> Iterator[LayerRow]:
    """One line for `members`, which are alike, then the lines below it."""
    below = _children(members)
    groups = _alike(below)
    if groups and len(groups) == 1 and not any(_owns(m) for m in members):
        # A bare list of identical modules: its line and theirs would say the same.
        count = len(groups[0]) // len(members)
        yield from _lines(groups[0], f"{path}.*" if path else "*", f"{label} ({count} alike)", depth, count, copy_gbps)
        return
    yield _line(members, path, label, depth, alike, copy_gbps)
    for name, text, nodes in _grouped(groups, len(members)) if groups else _named(below):
        count = len(nodes) // len(members)
        yield from _lines(nodes, f"{path}.{name}" if path else name, text, depth + 1, count, copy_gbps)


def _owns(node: Node) -> bool:
    """Whether a module moves anything itself; the rest of a difference of sums does not count."""
    return bool(node.own.bytes or node.own.kernels or node.own.ms > 1e-6 * node.all.ms)


def _named(children: dict[str, list[Node]]) -> Iterator[tuple[str, str, list[Node]]]:
    for name, nodes in children.items():
        yield name, name, nodes


def _grouped(groups: list[list[Node]], members: int) -> Iterator[tuple[str, str, list[Node]]]:
    for nodes in groups:
        indices = _ranges(sorted({int(n.name) for n in nodes}))
        count = len(nodes) // members
        yield indices, f"{indices.replace('-', '–')} ({count} alike)" if count > 1 else indices, nodes


def _children(members: Iterable[Node]) -> dict[str, list[Node]]:
    """Children of alike nodes, those of one name together."""
    out: dict[str, list[Node]] = {}
    for member in members:
        for name, child in member.children.items():
            out.setdefault(name, []).append(child)
    return out


def _alike(children: dict[str, list[Node]]) -> list[list[Node]] | None:
    """Indexed siblings grouped by signature, at least one group of two; None where there is nothing to fold."""
    if len(children) < 2 or not all(name.isdecimal() for name in children):
        return None
    groups: dict[object, list[Node]] = {}
    for nodes in children.values():
        groups.setdefault(tuple(n.signature for n in nodes), []).extend(nodes)
    return list(groups.values()) if len(groups) < len(children) else None


def _line(nodes: list[Node], path: str, label: str, depth: int, alike: int, copy_gbps: float | None) -> LayerRow:
    t = Traffic()
    for node in nodes:
        t += node.all
    layer_class = nodes[0].layer_class
    return LayerRow(
        path=path,
        label=label,
        depth=depth,
        layer_class=layer_class,
        status=max((n.status for n in nodes), key=_WORST.__getitem__),
        rate=t.rate,
        target=target_of(layer_class) if t.rate is not None else None,
        ms=t.ms if t.measured else None,
        bytes=t.bytes if t.traced else None,
        lost=t.lost if t.traced else None,
        structural=t.structural if t.traced else None,
        main_cause=t.main_cause,
        saves_ms=saves_ms(t.lost, copy_gbps) if t.traced else None,
        gap_ms=gap_ms(t, layer_class, copy_gbps),
        kernels=t.kernels,
        alike=alike,
        has_children=any(n.children for n in nodes),
    )


def class_rows(root: Node, copy_gbps: float | None) -> list[ClassRow]:
    """Own traffic by layer class, without that of children, so that classes sum to the step; largest loss first."""
    groups: dict[str, list[Node]] = {}
    for node in _walk(root):
        if node.own.bytes or node.own.ms:
            groups.setdefault(node.layer_class, []).append(node)
    rows = [_class_row(name, nodes, copy_gbps) for name, nodes in groups.items()]
    return sorted(rows, key=lambda r: (-(r.lost or 0), -(r.ms or 0.0), r.layer_class))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children.values():
        yield from _walk(child)


def _class_row(name: str, nodes: list[Node], copy_gbps: float | None) -> ClassRow:
    t = Traffic()
    for node in nodes:
        t += node.own
    return ClassRow(
        layer_class=name,
        layers=len(nodes),
        status=status_of(t.rate, (), [_own_status(n) for n in nodes]),
        rate=t.rate,
        strict_rate=t.strict_rate,
        target=target_of(name) if t.rate is not None else None,
        ms=t.ms if t.measured else None,
        bytes=t.bytes if t.traced else None,
        lost=t.lost if t.traced else None,
        structural=t.structural if t.traced else None,
        saves_ms=saves_ms(t.lost, copy_gbps) if t.traced else None,
        gap_ms=gap_ms(t, name, copy_gbps),
    )


def _own_status(node: Node) -> FusionStatus:
    """Verdict of a module's own traffic; a span's status speaks for its children too, so with those the rate does."""
    rate, statuses = node.own.rate, node.own.statuses
    return status_of(rate, ("complete",) if node.children and rate is not None else statuses)
