"""The codec table as text, Markdown or JSON."""

from __future__ import annotations

import msgspec

from costlab.app.figures import MISSING, count, number, share
from costlab.app.report.document import Cell, Document, sentence
from costlab.app.report.markdown import to_markdown
from costlab.app.report.terminal import to_text
from costlab.probes.codec_spec import ClaimRow, CodecResult, CodecTableRow

HEADERS = ["codec", "bits", "ratio", "rel. L2", "1st update", "to zero", "max abs", "encode", "decode"]
HARMFUL = 0.10  # of the first update; the engine refuses a lossy save beyond it


def render(result: CodecResult, form: str, width: int = 80) -> str:
    """The table as "text" (for `width` columns), "md" or "json"; ends with a line feed."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    doc = build(result)
    return to_markdown(doc) if form == "md" else to_text(doc, width)


def build(result: CodecResult) -> Document:
    """A table for each class of tensors, the claim, what the figures mean."""
    doc = Document()
    doc.heading(f"Codecs on {result.source}", 1)
    share_of = share(result.sampled / result.values) if result.values else MISSING
    doc.say(
        f"{result.kind}, {count(result.tensors)} float tensors of {count(result.values)} values, {share_of} of them "
        f"measured on {result.device}; {count(result.exact)} in norms, biases and the like stay exact under any preset."
    )
    for kind in dict.fromkeys(r.tensor_class for r in result.rows):
        rows = [r for r in result.rows if r.tensor_class == kind]
        doc.heading(f"{kind[:1].upper()}{kind[1:]}s, {count(rows[0].values)} values")
        claimed = [_claimed(result.claim)] if kind == "weight" and result.claim else []
        doc.table(HEADERS, [*map(_row, rows), *claimed], right=range(1, 9), drop=(6, 8, 7))
        if kind == "weight" and result.claim:
            doc.say(needs(result.claim))
    doc.say(
        "Bits: stored bits a value, scales and structure included. Ratio: original over stored bytes. 1st update: "
        "relative error of the first Adam update after a restore with only this class coded; ! where it is above "
        f"{share(HARMFUL)}, where a lossy save is refused. To zero: values that were not zero and came back as zero. "
        "Encode and decode: GB/s of the original bytes, best of three."
    )
    doc.items([[sentence(note)] for note in result.notes])
    return doc


def _row(r: CodecTableRow) -> list[Cell]:
    error = share(r.update_error) if r.update_error is not None else MISSING
    if r.update_error is not None and r.update_error > HARMFUL:
        error = f"! {error}"
    return [
        r.codec, number(r.bits), number(r.ratio), share(r.rel_l2), error, count(r.flushed), number(r.max_abs),
        number(r.encode_gbps), number(r.decode_gbps),
    ]  # fmt: skip


def _claimed(claim: ClaimRow) -> list[Cell]:
    """The claimed row: nothing but its size is known of it."""
    cells: list[Cell] = ["claimed: fp8 + CSR", number(claim.bits), *[MISSING] * 7]
    return cells


def needs(claim: ClaimRow) -> str:
    """What the claimed size would need, beside what is there."""
    have = "" if claim.zeros is None else f"; FP8 makes {share(claim.zeros)} zeros of these"
    measured = "" if claim.measured_bits is None else f" and takes {number(claim.measured_bits)} bits"
    return (
        f"FP8 in 16x16 blocks at {claim.bits:g} bits a value, as has been claimed, needs {share(claim.bitmap_zeros)} "
        f"of the values to be exactly zero with a bitmap, {share(claim.csr16_zeros)} with 16-bit CSR, "
        f"{share(claim.csr32_zeros)} with 32-bit CSR{have}{measured}. Without zeros, no code of so many bits has less "
        f"than {share(claim.least_error)} error on Gaussian values."
    )
