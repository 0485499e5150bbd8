"""The collective benchmark as nccl-tests' table, as Markdown and as JSON, another run's figures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from costlab.app.analysis.collectives import CONVENTION, bus_factor
from costlab.app.figures import MISSING, number
from costlab.app.importers.nccl_tests import PeerResult
from costlab.app.report.document import Cell, Document, sentence
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.probes.collective_spec import BenchResult, BenchRow


def bandwidths(row: BenchRow, ranks: int) -> tuple[float, float | None]:
    """algbw and busbw in GB/s; busbw is None for an operation without a factor."""
    algbw = row.size / row.time_us / 1e3
    factor = bus_factor(row.op, ranks)
    return algbw, None if factor is None else algbw * factor


def render_bench(result: BenchResult, form: str, peers: Sequence[PeerResult] = (), width: int = 100) -> str:
    """`form` is text, md or json."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(_plain(result, peers)), indent=2).decode() + "\n"
    doc = _document(result, peers)
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def _plain(result: BenchResult, peers: Sequence[PeerResult]) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(result)
    for row, plain_row in zip(result.rows, data["rows"], strict=True):
        plain_row["algbw_gbps"], plain_row["busbw_gbps"] = bandwidths(row, result.ranks)
        plain_row["peer_busbw_gbps"] = _peer(row, peers)
    return {**data, "convention": CONVENTION}


def _peer(row: BenchRow, peers: Sequence[PeerResult]) -> float | None:
    """busbw of the same operation and size elsewhere; in place beside in place."""
    for peer in peers:
        if peer.op not in ("", row.op):
            continue
        for other in peer.rows:
            timing = other.in_place if row.in_place else other.out_of_place
            if other.size == row.size and timing is not None:
                return timing.busbw
    return None


def _document(result: BenchResult, peers: Sequence[PeerResult]) -> Document:
    doc = Document()
    version = f" {result.version}" if result.version else ""
    doc.heading(f"Collectives: {result.ranks} ranks, {result.backend}{version}, {result.device}", 1)
    headers = ["op", "size B", "count", "type", "redop", "root", "place", "time us", "algbw", "busbw", "#wrong"]
    if peers:
        headers.append("nccl-tests busbw")
    rows: list[list[Cell]] = [_cells(row, result.ranks, peers) for row in result.rows]
    doc.table(headers, rows, right=(1, 2, 5, 7, 8, 9, 10, 11), drop=(5, 4, 3))
    doc.say(sentence(CONVENTION))
    doc.say(
        "time: mean over back-to-back calls and over ranks, as nccl-tests' -a 1; torch.distributed's own cost is in it."
    )
    doc.items([[sentence(text)] for text in (*result.skipped, *(f"not read: {r}" for p in peers for r in p.refused))])
    return doc


def _cells(row: BenchRow, ranks: int, peers: Sequence[PeerResult]) -> list[Cell]:
    algbw, busbw = bandwidths(row, ranks)
    cells: list[Cell] = [
        row.op, str(row.size), str(row.count), row.dtype, row.redop, str(row.root), "in" if row.in_place else "out",
        number(row.time_us), number(algbw), number(busbw), MISSING if row.wrong is None else str(row.wrong),
    ]  # fmt: skip
    return [*cells, number(_peer(row, peers))] if peers else cells
