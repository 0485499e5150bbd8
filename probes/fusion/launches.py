"""Which scheduled kernels one launch covers. Torch-free.

The C++ backend puts several loop nests into one function, and gives equal functions one name; a split reduction
launches a second kernel. What is launched together is one kernel span.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costlab.probes.fusion.facts import GraphFacts


@dataclass(slots=True)
class LaunchGroup:
    """Kernels of the schedule that one generated function runs; `names[1:]` are further functions of the same ones."""

    kernels: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def launch_groups(facts: GraphFacts) -> list[LaunchGroup]:
    """All kernels of the graph, those of one launch together, in schedule order."""
    place: dict[int, LaunchGroup] = {}
    for name, operations in facts.calls:
        covered = list(dict.fromkeys(facts.ops[o].kernel for o in operations if o in facts.ops))
        fresh = [k for k in covered if k not in place]
        if fresh:
            group = LaunchGroup(fresh, [name])
            place.update(dict.fromkeys(fresh, group))
        elif covered and name not in place[covered[0]].names:
            place[covered[0]].names.append(name)
    for kernel in facts.kernels:
        place.setdefault(kernel.index, LaunchGroup([kernel.index]))
    return list({id(g): g for _, g in sorted(place.items())}.values())


def kernel_names(facts: GraphFacts) -> dict[int, str]:
    """Kernel index -> the name of the function that runs it first."""
    names: dict[int, str] = {}
    for group in launch_groups(facts):
        for index in group.kernels:
            if group.names:
                names[index] = group.names[0]
    return names
