"""The generated source of one kernel of a run, read when it is asked for. No Textual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costlab.app.analysis.views import View
from costlab.probes.records import KernelSourceRow

if TYPE_CHECKING:
    from costlab.app.store import Run

RANK = 0  # which alone writes them


class SourceView(View, frozen=True, kw_only=True):
    """Source as generated; `language` is triton or cpp, `cut` says that the end is missing."""

    language: str
    source: str
    cut: bool


def kernel_source(run: Run, name: str, phase: str = "") -> SourceView | None:
    """The newest source of kernel `name`, of that phase where both phases have one; None where none was recorded."""
    table = run.table(KernelSourceRow.table, KernelSourceRow, (RANK,))
    found = table[table.name == name]
    same = found[found.phase == phase]
    chosen = same if len(same) else found
    if chosen.empty:
        return None
    row = chosen.iloc[-1]
    return SourceView(language=str(row.language), source=str(row.source), cut=bool(row.cut))
