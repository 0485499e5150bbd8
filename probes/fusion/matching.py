"""Finds, for every measured launch, the scheduled kernel and the module instance it ran for. Torch-free.

Loop kernels match by name; a name that occurs several times in a graph, or in several graphs, is told apart by order.
Library calls match in order among those of their family (matrix product, convolution, attention, or the operator's
own name) between the loop kernels around them. A kernel with a generated name that no span has is the second pass of
the reduction launched before it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costlab.probes.fusion import fqn
from costlab.probes.fusion.model import GraphSpan, KernelSpan
from costlab.probes.fusion.rates import bases, serving_root
from costlab.probes.trace.model import Launch

_GRAPH_PREFIX = re.compile(r"^graph_\d+_")
_NUMBERED = re.compile(r"_\d+$")
_GENERATED = re.compile(r"^(triton|cpp)_")
_MATMUL = re.compile(r"(^|_)(add|ba?d?d?b)?mm($|_)|linear|matmul|gemm|mkl")
_LIBRARY_KINDS = ("extern", "template", "user_triton", "device_copy")
_COLLECTIVE_KINDS = ("collective", "wait")


@dataclass(slots=True)
class Match:
    """A launch and what it belongs to. Without `graph` it was launched by no known graph."""

    launch: Launch
    name: str
    graph: int | None = None
    kernel: int | None = None
    base: str = ""
    alias: bool = False  # a further kernel of the span

    @property
    def phase(self) -> str:
        """forward, backward, optimizer or other."""
        return self.launch.phase or "other"


def kernel_name(name: str) -> str:
    """A profiler name without the graph counter that C++ kernels carry."""
    return _GRAPH_PREFIX.sub("", name)


def is_generated(name: str) -> bool:
    """Whether Inductor generated the kernel, by its name."""
    return bool(_GENERATED.match(name))


def family(operator: str) -> str:
    """What a library call is, coarse enough to survive dispatch: `aten::cudnn_convolution` is a convolution."""
    name = operator.replace("::", ".")
    parts = [p for p in name.split(".") if p not in ("default", "out", "aten", "torch", "ops")]
    base = (parts[0] if parts else name).lower()
    if len(parts) > 1 and parts[0] in ("mkl", "mkldnn", "onednn", "extern_kernels"):
        base = parts[1].lower()
    backward = "_backward" if "backward" in base else ""
    if "conv" in base:
        return "convolution" + backward
    if "attention" in base or "flash" in base:
        return "attention" + backward
    return "matmul" if _MATMUL.search(base) else base.strip("_")


def same_phase(graph: GraphSpan, phase: str) -> bool:
    """Whether a graph is one that runs in this phase of a step."""
    return (graph.phase == "backward") == (phase == "backward")


Slot = tuple[int, int, str]  # graph, kernel, base


class Matcher:
    """Matches the launches of one rank. `blocks` are the FQNs of modules that may share a graph."""

    def __init__(self, graphs: Sequence[GraphSpan], blocks: Iterable[str]) -> None:
        self.graphs = graphs
        self.blocks = sorted({b for b in blocks if b}, key=fqn.natural)
        self._by_name: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for g, graph in enumerate(graphs):
            for k, kernel in enumerate(graph.kernels):
                # Library kernels share names such as extern_kernels.mm, which no profiler shows.
                if kernel.kind not in ("extern", *_COLLECTIVE_KINDS, "nop"):
                    for name in _shown_names(kernel):
                        self._by_name[name].append((g, k))

    def match(self, launches: Sequence[Launch]) -> list[Match]:
        """One match per launch, in start order."""
        ordered = [Match(x, kernel_name(x.name)) for x in sorted(launches, key=lambda x: x.start)]
        self._match_names(ordered)
        groups: dict[tuple[int, str, str], list[Match]] = defaultdict(list)
        for match in ordered:
            if match.launch.compiled or match.graph is not None:
                groups[match.launch.step, match.phase, match.launch.frame].append(match)
        for (_, phase, frame), group in groups.items():
            self._match_library(group, phase, frame)
            _match_second_passes(group)
        return ordered

    # Loop kernels

    def _match_names(self, ordered: Sequence[Match]) -> None:
        groups: dict[tuple[int, str, str, str], list[Match]] = defaultdict(list)
        for match in ordered:
            if match.name in self._by_name:
                anchor = match.launch.frame or match.launch.layer
                groups[match.launch.step, match.phase, anchor, match.name].append(match)
        for (_, phase, anchor, name), group in groups.items():
            sequence = self._sequence(name, phase, anchor)
            exact = bool(sequence) and (len(group) % len(sequence) == 0 or len({s[2] for s in sequence}) == 1)
            for index, match in enumerate(group):
                if not sequence:
                    continue
                match.graph, match.kernel, match.base = sequence[index % len(sequence)]
                if not exact:  # some instances did not run: which, cannot be told
                    match.base = fqn.parent(match.base) or ""

    def _sequence(self, name: str, phase: str, anchor: str) -> list[Slot]:
        """Where a kernel name runs in one pass of the phase, in order."""
        found = self._by_name[name]
        found = [f for f in found if same_phase(self.graphs[f[0]], phase)] or found
        found = [f for f in found if not self.graphs[f[0]].superseded] or found
        # Kernels of other kinds of blocks may have the same name: an encoder's and a decoder's are numbered alike.
        found = [f for f in found if anchor and fqn.alike(anchor, self.graphs[f[0]].root)] or found
        placed: dict[str, list[Slot]] = defaultdict(list)
        for pattern in dict.fromkeys(fqn.pattern(self.graphs[g].root) for g, _ in found):
            here = [(g, k) for g, k in found if fqn.pattern(self.graphs[g].root) == pattern]
            roots = {self.graphs[g].root for g, _ in here}
            for base in self._bases(roots, anchor):
                serving = serving_root(base, roots)
                placed[base] += [(g, k, base) for g, k in here if self.graphs[g].root == serving]
        backward = phase == "backward"
        order = sorted(placed, key=fqn.natural, reverse=backward)
        slots = []
        for base in order:
            graphs = sorted({s[0] for s in placed[base]}, reverse=backward)
            slots += [s for g in graphs for s in placed[base] if s[0] == g]
        return slots

    def _bases(self, roots: set[str], anchor: str) -> list[str]:
        root = next(iter(roots))
        near = fqn.alike(anchor, root) if anchor else None
        if near is not None:
            return [near]
        found = dict.fromkeys(b for r in sorted(roots, key=fqn.natural) for b in bases(r, self.blocks))
        return list(found)

    # Library calls

    def _match_library(self, group: list[Match], phase: str, frame: str) -> None:
        """Place library launches between the loop kernels around them, then pair them in order."""
        contexts = self._contexts(group, phase, frame)
        waiting: dict[tuple[int, str, int], list[Match]] = defaultdict(list)
        budget: dict[tuple[int, str, int], Counter[str]] = {}
        for index, match in enumerate(group):
            if match.graph is not None or is_generated(match.name):
                continue
            before, after = contexts[index]
            kind = family(match.launch.op or match.name)
            key = before or after
            if before is not None and after is not None and before != after:
                left = budget.setdefault(before, self._families(before[0]))
                key = before if left[kind] > 0 else after
            if key is not None:
                budget.setdefault(key, self._families(key[0]))[kind] -= 1
                waiting[key].append(match)
        for (graph, base, _), matches in waiting.items():
            self._pair(graph, base, matches)

    def _contexts(
        self, group: list[Match], phase: str, frame: str
    ) -> list[tuple[tuple[int, str, int] | None, tuple[int, str, int] | None]]:
        """For each launch the (graph, base, invocation) of the loop kernels before and after it."""
        seen: Counter[tuple[int, str, int]] = Counter()
        own: list[tuple[int, str, int] | None] = []
        for match in group:
            if match.graph is None or match.kernel is None:
                own.append(None)
                continue
            slot = (match.graph, match.base, match.kernel)
            own.append((match.graph, match.base, seen[slot]))
            seen[slot] += 1
        if not any(own):
            only = self._only_graph(phase, frame)
            return [(only, only)] * len(group)
        before = _filled(own)
        after = list(reversed(_filled(list(reversed(own)))))
        return list(zip(before, after, strict=True))

    def _only_graph(self, phase: str, frame: str) -> tuple[int, str, int] | None:
        """The graph of a frame that launched nothing by name, if there is only one."""
        fit = []
        for g, graph in enumerate(self.graphs):
            base = frame if fqn.pattern(frame) == fqn.pattern(graph.root) else None
            if base is not None and same_phase(graph, phase) and not graph.superseded:
                fit.append((g, base, 0))
        return fit[0] if len(fit) == 1 else None

    def _families(self, graph: int) -> Counter[str]:
        return Counter(f for f, _ in self._library(graph))

    def _library(self, graph: int) -> list[tuple[str, int]]:
        """(family, kernel) of a graph's library calls in order."""
        calls = []
        for k, kernel in enumerate(self.graphs[graph].kernels):
            if kernel.kind in (*_LIBRARY_KINDS, *_COLLECTIVE_KINDS):
                calls.append((family(kernel.ops[0] if kernel.ops else kernel.name), k))
        return calls

    def _pair(self, graph: int, base: str, matches: list[Match]) -> None:
        calls: dict[str, list[int]] = defaultdict(list)
        for kind, k in self._library(graph):
            calls[kind].append(k)
        by_family: dict[str, list[Match]] = defaultdict(list)
        for match in matches:
            by_family[family(match.launch.op or match.name)].append(match)
        for kind, launched in by_family.items():
            slots = calls.get(kind, [])
            for index, match in enumerate(launched):
                match.graph, match.base = graph, base
                if slots:  # a call may launch several kernels
                    place = index * len(slots) // len(launched) if len(launched) >= len(slots) else index
                    match.kernel = slots[place]
                    match.alias = (
                        len(launched) > len(slots) and index > 0 and launched[index - 1].kernel == match.kernel
                    )


def _shown_names(kernel: KernelSpan) -> list[str]:
    """Names under which a profiler shows a kernel; only the wrapper numbers a user's Triton kernel."""
    names = [kernel_name(n) for n in (kernel.name, *kernel.aliases) if n]
    if kernel.kind == "user_triton":
        names += [_NUMBERED.sub("", n) for n in names]
    return list(dict.fromkeys(names))


def _filled(values: Sequence[tuple[int, str, int] | None]) -> list[tuple[int, str, int] | None]:
    """Each value, or the last one before it."""
    last = None
    filled = []
    for value in values:
        last = value if value is not None else last
        filled.append(last)
    return filled


def _match_second_passes(group: Iterable[Match]) -> None:
    """Join generated kernels without a span of their own to the loop kernel launched before them."""
    previous: Match | None = None
    for match in group:
        if match.graph is not None and match.kernel is not None and is_generated(match.name):
            previous = match
        elif match.graph is None and is_generated(match.name) and previous is not None:
            match.graph, match.kernel, match.base, match.alias = previous.graph, previous.kernel, previous.base, True
