"""The gradient layout sweep: runs it, keeps it, and says in one sentence what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from costlab.app.analysis.collectives import bus_factor
from costlab.app.figures import MISSING, ms, number, share, size
from costlab.app.report.chart import Series, chart
from costlab.app.report.document import Cell, Document, Log, sentence
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.probes.bucket_spec import (
    DDP_BUCKET,
    LAYOUTS,
    MIB,
    RESULT_FILE,
    BucketCase,
    BucketResult,
    BucketRow,
    BucketSpec,
)
from costlab.probes.records import AnyEvent

MODULE = "costlab.probes.bucket_sweep"
FOLDER = "sweeps"
ALIKE, NOISY = 1.05, 0.25


def run_buckets(
    spec: BucketSpec,
    on_event: Callable[[AnyEvent], None],
    *,
    ranks: int = 0,
    device: str = "auto",
    started: Callable[[Callable[[], None]], None] | None = None,
) -> BucketResult:
    """Measure; raises JobFailed, LaunchError, SpecError as `run_job` does."""
    from costlab.app.topology.calibration import run_job

    return run_job(MODULE, spec, RESULT_FILE, BucketResult, on_event, ranks=ranks, device=device, started=started)


def keep(result: BucketResult, home: Path) -> Path:
    """Store a result under its date; raises OSError."""
    from costlab.probes.tables import write_bytes

    folder = home / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    stamp = "".join(c for c in result.date[:19] if c.isdigit())
    path = folder / f"buckets-{stamp}-{result.ranks}x{result.backend}.json"
    write_bytes(path, msgspec.json.format(msgspec.json.encode(result), indent=1))
    return path


def last_kept(home: Path) -> BucketResult | None:
    """The newest stored sweep; one that cannot be read is passed over."""
    for path in sorted((home / FOLDER).glob("buckets-*.json"), reverse=True):
        try:
            return msgspec.json.decode(path.read_bytes(), type=BucketResult)
        except (OSError, msgspec.MsgspecError):
            continue
    return None


def mib(case: BucketCase) -> str:
    """The bucket's size as torch counts it: "25 MiB", or "tensor"."""
    return f"{case.bucket / MIB:g} MiB" if case.bucket else "tensor"


def busbw(row: BucketRow, ranks: int) -> float | None:
    """GB/s of the reduction as nccl-tests defines it for all_reduce; None for one rank."""
    factor = bus_factor("all_reduce", ranks)
    return row.bytes / row.reduce_seconds / 1e9 * factor if factor and row.reduce_seconds > 0 else None


def find(result: BucketResult, **fields: object) -> list[BucketRow]:
    """Rows whose case has these fields."""
    return [r for r in result.rows if all(getattr(r.case, k) == v for k, v in fields.items())]


def best_bucket(result: BucketResult) -> BucketRow | None:
    """The smallest bucket within 5 % of the least time: small ones can start before backward ends."""
    dtype = result.rows[0].case.dtype if result.rows else ""
    rows = [r for r in find(result, dtype=dtype, layout="view", every=1) if r.case.bucket > 0]
    least = min((r.seconds for r in rows), default=0.0)
    return min((r for r in rows if r.seconds <= ALIKE * least), key=lambda r: r.case.bucket, default=None)


def recommendation(result: BucketResult) -> str:
    """One sentence; what changes the training itself (dtype, frequency) is told apart from what does not."""
    best = best_bucket(result)
    if best is None:
        return "Nothing to recommend: no bucket size was measured."
    found = [
        f"Use buckets of {mib(best.case)} (bucket_cap_mb={best.case.bucket / MIB:g}) with gradients as their views"
    ]
    found.append(f": {ms(best.seconds * 1e3)} to reduce {size(best.bytes)}")
    copied = next(iter(find(result, dtype=best.case.dtype, layout="copy", every=1)), None)
    if copied is not None:
        default = ", DDP's default" if copied.case.bucket == DDP_BUCKET else ""
        found.append(f", {_against(best, copied, f'with copies into {mib(copied.case)}{default}')}")
    extra = [text for text in (_other_dtype(result, best), _less_often(result)) if text]
    if extra:
        found.append(f"; if training allows, {' and '.join(extra)}")
    noise = max((r.high - r.low) / r.seconds for r in result.rows)
    if noise > NOISY:
        found.append(f" (rounds differ by up to {share(noise)}: repeat it where nothing else runs)")
    return "".join(found) + "."


def _apart(a: BucketRow, b: BucketRow) -> bool:
    """Whether the rounds of the two do not overlap."""
    return a.high < b.low or b.high < a.low


def _against(best: BucketRow, other: BucketRow, what: str) -> str:
    if not _apart(best, other):
        return f"not told apart from {ms(other.seconds * 1e3)} {what}"
    off = best.seconds / other.seconds - 1
    return f"{share(abs(off))} {'less' if off < 0 else 'more'} than {ms(other.seconds * 1e3)} {what}"


def _other_dtype(result: BucketResult, best: BucketRow) -> str:
    others = [
        r for r in find(result, bucket=best.case.bucket, layout="view", every=1) if r.case.dtype != best.case.dtype
    ]
    faster = [r for r in others if r.high < best.low]
    if not faster:
        return ""
    least = min(faster, key=lambda r: r.seconds)
    return f"{least.case.dtype} gradients take {ms(least.seconds * 1e3)}"


def _less_often(result: BucketResult) -> str:
    rows = [r for r in result.rows if r.case.layout == "view" and r.case.every > 1]
    if not rows:
        return ""
    alike = find(result, bucket=rows[0].case.bucket, dtype=rows[0].case.dtype, layout="view", every=1)
    least = min(rows, key=lambda r: r.per_batch)
    if not alike or least.high / least.case.every >= alike[0].low:
        return ""
    n = least.case.every
    return (
        f"reducing every {n} micro-batches (no_sync) takes {ms(least.per_batch * 1e3)} a micro-batch instead of "
        f"{ms(alike[0].seconds * 1e3)}"
    )


def render_buckets(result: BucketResult, form: str, width: int = 100) -> str:
    """`form` is text, md or json."""
    if form == "json":
        data = msgspec.to_builtins(result)
        for row, plain_row in zip(result.rows, data["rows"], strict=True):
            plain_row["busbw_gbps"], plain_row["seconds_per_batch"] = busbw(row, result.ranks), row.per_batch
        data["recommendation"] = recommendation(result)
        return msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n"
    doc = buckets_document(result)
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def buckets_document(result: BucketResult) -> Document:
    """Recommendation, plot, table, how it was measured."""
    doc = Document()
    version = f" {result.version}" if result.version else ""
    doc.heading(f"Gradient layout: {result.ranks} ranks, {result.backend}{version}, {result.device}", 1)
    doc.say(recommendation(result))
    series = []
    for dtype in dict.fromkeys(r.case.dtype for r in result.rows):
        rows = [r for r in find(result, dtype=dtype, layout="view", every=1) if r.case.bucket > 0]
        points = [(float(r.case.bucket), bw) for r in rows for bw in (busbw(r, result.ranks),) if bw is not None]
        series.append(Series(dtype, points))
    drawn = chart(series, at=lambda b: f"{b / MIB:.3g} MiB")
    if drawn:
        doc.say("busbw over bucket size, gradients as views:")
        doc.blocks.append(Log(drawn))
    headers = ["bucket", "dtype", "layout", "every", "calls", "time", "rounds", "a micro-batch", "busbw GB/s"]
    doc.table(headers, [_cells(r, result.ranks) for r in result.rows], right=(0, 3, 4, 5, 6, 7, 8), drop=(4, 6))
    doc.items([[f"{name}: {words}."] for name, words in LAYOUTS.items()])
    doc.say(
        f"Time: median of all micro-batches' accumulation with one reduction of {result.elements:,} gradients in "
        f"{result.tensors} tensors, slowest rank; rounds: least and largest median of a round. All buckets are issued, "
        "then awaited, with no compute beside them. Every: micro-batches to one reduction. busbw = bytes / time of the "
        "reduction x 2(n-1)/n, GB = 1e9 bytes. In training the last bucket cannot be hidden, so the smallest of the "
        "sizes within 5 % of the least time is named."
    )
    doc.items([[sentence(f"not measured: {text}")] for text in result.skipped])
    if not result.complete:
        doc.say("The sweep did not come to its end.")
    return doc


def _cells(row: BucketRow, ranks: int) -> list[Cell]:
    case: BucketCase = row.case
    return [
        mib(case), case.dtype, case.layout, str(case.every), str(row.collectives),
        ms(row.seconds * 1e3), f"{ms(row.low * 1e3)}-{ms(row.high * 1e3)}", ms(row.per_batch * 1e3),
        number(busbw(row, ranks)) if ranks > 1 else MISSING,
    ]  # fmt: skip
