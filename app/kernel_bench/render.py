"""The kernels' benchmark as bars and table, as Markdown and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from costlab.app.figures import MISSING, number, times
from costlab.app.report.document import Bar, Bars, Cell, Document, sentence
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.probes.kernel_spec import KernelBench, KernelRow

PEERS = ("eager", "inductor")


def render(bench: KernelBench, form: str, width: int = 80) -> str:
    """`form` is text, md or json."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(plain(bench)), indent=2).decode() + "\n"
    doc = document(bench)
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def of_ceiling(row: KernelRow, kind: str) -> float | None:
    """The share of the ceiling that one way reaches on the device, None if it was not measured."""
    time = row.times.get(kind)
    return row.ceiling_ms / time.device_ms if time is not None and row.ceiling_ms and time.device_ms else None


def faster(row: KernelRow, called: bool) -> float | None:
    """The quickest peer's time over the fused kernel's, as called or on the device."""

    def pick(kind: str) -> float:
        time = row.times[kind]
        return time.called_ms if called else time.device_ms

    peers = [pick(kind) for kind in PEERS if kind in row.times]
    return min(peers) / pick("fused") if peers and "fused" in row.times else None


def plain(bench: KernelBench) -> dict[str, Any]:
    """JSON's form: the measured, and the ratios that the table shows."""
    data: dict[str, Any] = msgspec.to_builtins(bench)
    for row, out in zip(bench.rows, data["rows"], strict=True):
        out["of_ceiling"] = {kind: of_ceiling(row, kind) for kind in row.times}
        out["faster_than_best"] = {"called": faster(row, True), "device": faster(row, False)}
    return data


def document(bench: KernelBench) -> Document:
    """Heading, share of the ceiling as bars, all times as a table, and what was not measured."""
    doc = Document()
    doc.heading(f"Fused kernels: {bench.device}, torch {bench.torch}, Triton {bench.triton}", 1)
    doc.say(
        f"Ceilings measured here: copy {number(bench.copy_gbs)} GB/s (read + write), matrix product"
        f" {number(bench.matmul_tflops)} TFLOP/s in bf16."
    )
    doc.heading("Share of the ceiling, on the device")
    bars = [
        Bar(f"{row.kernel}, {row.way}: {kind}", f"{share:.0%} of {row.ceiling}", min(share, 1.0))
        for row in bench.rows
        for kind in ("fused", *PEERS)
        if (share := of_ceiling(row, kind)) is not None
    ]
    if bars:
        doc.blocks.append(Bars(bars))
    doc.heading("Times")
    headers = ["kernel", "way", "device ms", "eager", "Inductor", "faster", "as called", "faster as called", "error"]
    doc.table(headers, [_cells(row) for row in bench.rows], right=tuple(range(2, 9)), drop=(8, 6))
    doc.say(
        f"Medians of {bench.samples} calls, inputs rotated past the L2 cache. Device: calls enqueued ahead. As called:"
        " one after the other from Python, the host's time in it where the device waits for it. Faster: the quicker of"
        " eager and Inductor over the fused kernel. Error: relative difference of outputs or gradients from eager."
    )
    failed = [f"{r.kernel}, {r.way}, {kind}: {why}" for r in bench.rows for kind, why in r.failed.items()]
    doc.items([[sentence(text)] for text in failed])
    return doc


def _cells(row: KernelRow) -> list[Cell]:
    def device(kind: str) -> str:
        return number(row.times[kind].device_ms) if kind in row.times else MISSING

    called = number(row.times["fused"].called_ms) if "fused" in row.times else MISSING
    error = MISSING if row.error is None else f"{row.error:.0e}"
    ratios = times(faster(row, False)), times(faster(row, True))
    return [row.kernel, row.way, device("fused"), *map(device, PEERS), ratios[0], called, ratios[1], error]
