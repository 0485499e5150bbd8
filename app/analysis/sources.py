"""The generated source of a run's kernels: of one when it is asked for, of the longest for the report. No Textual."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from costlab.app.analysis.views import KernelCode, KernelView, View
from costlab.probes.records import KernelSourceRow

if TYPE_CHECKING:
    from costlab.app.store import Run

RANK = 0  # which alone writes them
MOST = 20  # sources of a report


class SourceView(View, frozen=True, kw_only=True):
    """Source as generated; `language` is triton or cpp, `cut` says that the end is missing.

    `variants` counts the different sources of that name: graphs number their kernels each on its own.
    """

    language: str
    source: str
    cut: bool
    variants: int = 1


def kernel_source(run: Run, name: str, phase: str = "") -> SourceView | None:
    """The newest source of kernel `name`, of that phase where both phases have one; None where none was recorded."""
    table = run.table(KernelSourceRow.table, KernelSourceRow, (RANK,))
    found = table[table.name == name]
    same = found[found.phase == phase]
    chosen = same if len(same) else found
    if chosen.empty:
        return None
    row = chosen.iloc[-1]
    variants = int(chosen.source.nunique())
    return SourceView(language=str(row.language), source=str(row.source), cut=bool(row.cut), variants=variants)


def longest(run: Run, kernels: Iterable[KernelView], most: int = MOST) -> list[KernelCode]:
    """The sources of the kernels that take longest in a step, all layers together; at most `most`, longest first."""
    if run.table(KernelSourceRow.table, KernelSourceRow, (RANK,)).empty:
        return []
    times: dict[tuple[str, str], float] = {}
    for kernel in kernels:
        key = (kernel.name, kernel.phase)
        times[key] = times.get(key, 0.0) + kernel.ms
    found: list[KernelCode] = []
    for (name, phase), ms in sorted(times.items(), key=lambda item: -item[1]):
        view = kernel_source(run, name, phase)
        if view is not None:
            found.append(KernelCode(name=name, phase=phase, ms=ms, **msgspec.structs.asdict(view)))
        if len(found) == most:
            break
    return found
