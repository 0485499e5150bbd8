"""Everything a reader must refuse, and fuzzing: one exception type, whatever the bytes."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forge
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from costlab.kernels.codec import layout
from costlab.kernels.codec.codecs import Choice, Codec, encode
from costlab.kernels.codec.container import Container
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.layout import Limits
from costlab.kernels.codec.writing import ContainerWriter, entry_of, extent_bytes, literal_entry, patch_bytes

# Records in the order of the sorted names.
BF16, CSR, DELTA, FP8, LITERAL, LOG, MAP, RAW, ZIP = range(9)
NAMES = ["b16", "csr", "delta", "fp8", "lit", "log", "map", "raw", "zip"]


def _tensors() -> dict[str, tuple[torch.Tensor, Choice]]:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(64, 80, generator=generator)
    dense[3, 3] = float("nan")
    half = torch.randn(32, 40, generator=generator) * (torch.rand(32, 40, generator=generator) < 0.4)
    few = torch.zeros(64, 100)
    few[3, 5], few[3, 9], few[60, 1] = 1.0, 2.0, 3.0
    fp8 = Choice(Codec.FP8, (16, 16))
    return {
        "b16": (torch.randn(5, 7, generator=generator), Choice(Codec.BF16)), "csr": (few, fp8), "fp8": (dense, fp8),
        "log": (torch.rand(9, 9, generator=generator), Choice(Codec.LOG8)), "map": (half, fp8),
        "raw": (torch.arange(12.0).view(3, 4), Choice()), "zip": (torch.zeros(50, 50), Choice(Codec.ZSTD)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file with an entry of every kind."""
    path = tmp_path_factory.mktemp("good") / "f"
    writer = ContainerWriter(path, NAMES, step=5)
    for name, (tensor, choice) in _tensors().items():
        found = encode(tensor, choice)
        writer.add(entry_of(name, found), extent_bytes(found), patch_bytes(found))
    found = encode(torch.ones(16, 16), Choice(Codec.DELTA4, (16, 16)), torch.zeros(16, 16))
    writer.add(entry_of("delta", found, base=bytes([7] * 32), chain=1), extent_bytes(found))
    writer.add(*literal_entry("lit", "text"))
    writer.commit()
    return path.read_bytes()


def read_all(path: Path, limits: Limits | None = None, mode: Any = "map") -> dict[str, Any]:
    """Every value of a file but the delta, whose base isn't there."""
    with Container.open(path, limits=limits, mode=mode) as file:
        return {
            name: file.value(name) for name, entry in file.entries.items() if entry.choice.codec is not Codec.DELTA4
        }


def refuse(path: Path, data: bytes, match: str, limits: Limits | None = None) -> None:
    """Writing these bytes and reading them must raise, in map and in read mode, with this in the text."""
    path.write_bytes(data)
    for mode in ("map", "read"):
        with pytest.raises(CheckpointError, match=match):
            read_all(path, limits, mode)


def test_the_good_file_is_good_and_editing_nothing_keeps_it_so(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "f"
    for data in (
        good,
        forge.reseal(good),
        forge.record(good, RAW),
        forge.content(good, path, "map", lambda e: e.sum()),
    ):
        assert data == good
        path.write_bytes(data)
        got = read_all(path)
        assert torch.equal(got["raw"], torch.arange(12.0).view(3, 4)) and got["lit"] == "text"
        with Container.open(path) as file:
            layouts = [file.entries[n].layout.name for n in ("fp8", "map", "csr")]
            assert layouts == ["DENSE", "BITMAP", "CSR16"] and file.entries["fp8"].patch_count == 1


HEADER_CASES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("1 bad magic", lambda d: b"\x88" + d[1:], "bad magic"),
    ("1 mangled by text mode", lambda d: d.replace(b"\r\n", b"\n", 1), "bad magic"),
    ("2 unknown major", lambda d: forge.header(d, major=2), "format 2"),
    ("2 unknown flag", lambda d: forge.header(d, flags=1), "flags 0x1"),
    ("3 byte-swapped count", lambda d: forge.header(d, records=9 << 24), "records don't fit"),
    ("3 big-endian file", lambda d: struct.pack(">8sHHI", d[:8], 1, 0, 0) + d[16:], "checksum"),
    ("4 empty", lambda d: d[:0], "shorter"),
    ("4 shorter than a header", lambda d: d[:63], "shorter"),
    ("4 Git-LFS pointer", lambda d: b"version https://git-lfs.github.com/spec/v1\noid " + d[:90], "Git-LFS"),
    ("5 truncated", lambda d: d[:-4096], "truncated or appended"),
    ("5 trailing bytes", lambda d: d + b"\0", "truncated or appended"),
    ("6 header checksum", lambda d: d[:60] + b"\0\0\0\0" + d[64:], "header checksum"),
    ("7 index elsewhere", lambda d: forge.header(d, index_offset=8192), "index at 8192"),
    ("7 index overflows", lambda d: forge.header(d, index_length=2**64 - 1), "beyond"),
    ("7 index past the end", lambda d: forge.header(d, index_length=len(d)), "beyond"),
    ("7 other pages", lambda d: forge.header(d, page_shift=16), "pages"),
    ("8 2**32-1 records", lambda d: forge.header(d, records=2**32 - 1), "records don't fit"),
    ("9 index checksum", lambda d: d[:5000] + bytes([d[5000] ^ 1]) + d[5001:], "index checksum"),
    ("preamble record size", lambda d: forge.preamble(d, size=383), "contradicts"),
    ("preamble count", lambda d: forge.preamble(d, count=8), "contradicts"),
    ("preamble strings", lambda d: forge.preamble(d, strings=1), "contradicts"),
    ("preamble reserved", lambda d: forge.preamble(d, reserved=b"x" * 16), "contradicts"),
    ("preamble rank", lambda d: forge.preamble(d, rank=3), "impossible"),
    ("preamble chunk", lambda d: forge.preamble(d, shift=255), "impossible|too large"),
    ("preamble too many checksums", lambda d: forge.preamble(d, crcs=2**60), "impossible"),
    ("checksum table's checksum", lambda d: forge.preamble(d, table_crc=1), "checksum table"),
    ("checksum table elsewhere", lambda d: forge.preamble(d, table_offset=4096), "checksum table"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "match"), [c[1:] for c in HEADER_CASES], ids=[c[0] for c in HEADER_CASES])
def test_bad_headers_are_refused(tmp_path: Path, good: bytes, change: Callable[[bytes], bytes], match: str) -> None:
    refuse(tmp_path / "f", change(good), match)


def _nan(_: float) -> float:
    return float("nan")


RECORD_CASES: list[tuple[str, int, dict[str, Any], str]] = [
    ("10 name outside the table", RAW, {"name_length": 999}, "outside|consecutive"),
    ("10 name offset", RAW, {"name_offset": 2**32 - 1}, "outside"),
    ("10 empty name", BF16, {"name_length": 0}, "empty"),
    ("12 unknown dtype", RAW, {"dtype": 99}, "unknown kind"),
    ("12 unknown codec", RAW, {"codec": 99}, "unknown kind"),
    ("12 unknown codec version", RAW, {"version": 2}, "codec version"),
    ("12 unknown layout", RAW, {"layout": 7}, "unknown kind"),
    ("12 unknown kind", RAW, {"kind": 7}, "unknown kind"),
    ("12 reserved", RAW, {"reserved": 1}, "reserved"),
    ("12 reserved tail", RAW, {"reserved_tail": b"x" * 40}, "reserved"),
    ("13 nine dimensions", RAW, {"ndim": 9}, "9 dimensions"),
    ("13 size past the last dimension", RAW, {"shape5": 3}, "past the last"),
    ("13 negative (huge) dimension", RAW, {"shape0": 2**64 - 4, "global0": 2**64 - 4}, "beyond"),
    ("13 product overflows", RAW, {"shape0": 2**33, "shape1": 2**33, "global0": 2**33, "global1": 2**33}, "beyond"),
    ("13 zero with a huge other", RAW, {"shape0": 0, "shape1": 2**60, "global0": 0, "global1": 2**60}, "beyond"),
    ("13 global product", RAW, {"global0": 2**40, "global1": 2**40}, "beyond"),
    ("14 shape and length differ", RAW, {"shape0": 4, "global0": 4}, "bytes of codes"),
    ("14 decoded size beyond ratio", ZIP, {"shape0": 2**30, "global0": 2**30}, "beyond the limits"),
    ("15 in the header", RAW, {"offset": 0}, "overlaps"),
    ("15 in the index", RAW, {"offset": 4096}, "overlaps"),
    ("15 past the end", RAW, {"offset": 2**40}, "overlaps|gap"),
    ("15 not aligned", RAW, {"offset": lambda o: o + 8}, "misaligned"),
    ("15 overflow", RAW, {"offset": 2**64 - 64}, "overlaps|gap"),
    ("16 shared bytes", LOG, {"offset": lambda o: o + 64}, "overlaps"),
    ("offset without bytes", RAW, {"shape0": 0, "global0": 0, "codes": 0, "length": 0, "crc_main": 0}, "out|consec"),
    ("18 checksum count", RAW, {"crc_main": 2}, "consecutive|checksums"),
    ("18 checksum range", RAW, {"crc_first": 0}, "consecutive"),
    ("19 scale count", FP8, {"scales": 4}, "scales for"),
    ("21 bitmap size", MAP, {"structure": 1}, "extent of|bitmap"),
    ("22 CSR size", CSR, {"structure": lambda s: s - 2, "length": lambda s: s - 2}, "belong to nothing"),
    ("values beyond the codes", FP8, {"codes": 2**20}, "bytes of codes"),
    ("structure too large", MAP, {"structure": 2**40}, "extent of"),
    ("23 method of a plane", ZIP, {"structure": 8}, "extent of|damaged"),
    ("24 base without a delta", RAW, {"base": b"x" * 32}, "base"),
    ("24 delta without a base", DELTA, {"base": bytes(32)}, "base"),
    ("24 chain too long", DELTA, {"chain": 65}, "chain"),
    ("24 chain of none", DELTA, {"chain": 0}, "chain"),
    ("28 bound is NaN", FP8, {"bound": _nan}, "error bound"),
    ("28 bound is absent", FP8, {"bound": 0.0}, "error bound"),
    ("28 bound is infinite", LOG, {"bound": float("inf")}, "error bound"),
    ("28 bound of a lossless one", RAW, {"bound": 0.1}, "error bound"),
    ("30 range falls", LOG, {"low": 0x3F800000, "high": 0x3F000000}, "range"),
    ("30 range not finite", LOG, {"high": 0x7F800000}, "range"),
    ("30 range from zero", LOG, {"low": 0}, "range"),
    ("range where there is none", RAW, {"low": 1}, "range"),
    ("blocks of raw", RAW, {"height": 16}, "no blocks"),
    ("blocks of zero width", FP8, {"width": 0}, "blocks of"),
    ("sparse raw", RAW, {"layout": 1}, "sparse coding"),
    ("lossy integers", FP8, {"dtype": 9}, "codec|bytes"),
    ("raw blocks of raw", RAW, {"patch_count": 1}, "raw blocks"),
    ("too many raw blocks", FP8, {"patch_count": 2**32 - 1}, "raw blocks"),
    ("shard outside", RAW, {"start0": 1}, "outside the global"),
    ("literal with a shape", LITERAL, {"ndim": 0}, "past the last|literal"),
    ("literal of floats", LITERAL, {"dtype": 1}, "literal|bytes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "changes", "match"), [c[1:] for c in RECORD_CASES], ids=[c[0] for c in RECORD_CASES]
)
def test_bad_records_are_refused(tmp_path: Path, good: bytes, number: int, changes: dict[str, Any], match: str) -> None:
    refuse(tmp_path / "f", forge.record(good, number, **changes), match)


def _rename(data: bytes, old: bytes, new: bytes) -> bytes:
    strings = layout.INDEX_OFFSET + layout.PREAMBLE.size + 9 * layout.RECORD.size
    at = data.index(b"".join(n.encode() for n in NAMES), strings) + b"".join(n.encode() for n in NAMES).index(old)
    return forge.reseal(data[:at] + new + data[at + len(old) :])


@pytest.mark.parametrize(
    ("new", "match"),
    [
        (b"\xff\xfew", "UTF-8"), (b"r\0w", "control"), (b"/rw", "absolute"), (b"r\nw", "control"), (b"../", "parent"),
        (b"\xed\xa0\x80", "UTF-8"), (b"\xe2\x80\xae", "control"), (b"e\xcc\x81", "NFC"), (b"map", "repeated"),
        (b"aaa", "sorted"), (b"C:x", "absolute"),
    ],
)  # fmt: skip
def test_10_and_11_bad_names_are_refused(tmp_path: Path, good: bytes, new: bytes, match: str) -> None:
    refuse(tmp_path / "f", _rename(good, b"raw", new), match)


def _set(at: int, value: int) -> Callable[[np.ndarray], None]:
    def change(extent: np.ndarray) -> None:
        extent[at] = value

    return change


def _scale(value: float, number: int = 0) -> Callable[[np.ndarray], None]:
    def change(extent: np.ndarray) -> None:
        extent[5120 + 4 * number : 5124 + 4 * number] = np.frombuffer(struct.pack("<f", value), np.uint8)

    return change


CONTENT_CASES: list[tuple[str, str, Callable[[np.ndarray], None], str]] = [
    ("19 scale NaN", "fp8", _scale(float("nan")), "scale"),
    ("19 scale infinite", "fp8", _scale(float("inf")), "scale"),
    ("19 scale negative", "fp8", _scale(-1.0), "scale"),
    ("19 scale zero", "fp8", _scale(0.0), "scale"),
    ("19 scale subnormal", "fp8", _scale(1e-40), "scale"),
    ("20 FP8 code 0x7F", "fp8", _set(9, 0x7F), "NaN"),
    ("20 FP8 code 0xFF", "fp8", _set(9, 0xFF), "NaN"),
    ("21 bitmap and values differ", "map", lambda e: e.__setitem__(-1, e[-1] ^ 1), "bitmap"),
    ("22 CSR starts above zero", "csr", lambda e: e.__setitem__(192, 1), "CSR"),
    ("22 CSR falls", "csr", lambda e: e.__setitem__(192 + 16, 3), "CSR"),
    ("22 CSR column", "csr", lambda e: e.__setitem__(-6, 101), "CSR"),
    ("22 CSR columns repeated", "csr", lambda e: e.__setitem__(-6, e[-4]), "CSR"),
    ("22 CSR stored zero", "csr", _set(0, 0), "zero"),
    ("23 zstd frame", "zip", lambda e: e.__setitem__(0, 0), "planes"),
    ("23 plane method", "zip", lambda e: e.__setitem__(-36, 9), "method"),
    ("23 plane length", "zip", lambda e: e.__setitem__(-35, 255), "planes"),
    ("literal isn't JSON", "lit", _set(0, ord("{")), "JSON"),
    ("literal is a list", "lit", lambda e: e.__setitem__(slice(None), list(b"[[1]] ")), "JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "match"), [c[1:] for c in CONTENT_CASES], ids=[c[0] for c in CONTENT_CASES])
def test_bad_contents_with_right_checksums_are_refused(
    tmp_path: Path, good: bytes, name: str, change: Callable[[np.ndarray], None], match: str
) -> None:
    refuse(tmp_path / "f", forge.content(good, tmp_path / "f", name, change), match)


def test_raw_block_numbers_out_of_range_are_refused(tmp_path: Path, good: bytes) -> None:
    refuse(tmp_path / "f", forge.content(good, tmp_path / "f", "fp8", _set(0, 200), patch=True), "raw blocks")


def test_14_the_decoded_size_cap_is_the_callers(tmp_path: Path, good: bytes) -> None:
    refuse(tmp_path / "f", good, "beyond the limits", Limits(tensor_bytes=9999))
    refuse(tmp_path / "f", good, "limit", Limits(index_bytes=100))


def test_17_hidden_bytes_in_the_padding_are_refused(tmp_path: Path, good: bytes) -> None:
    for at in (64, 4095, len(good) - 1):
        refuse(tmp_path / "f", good[:at] + b"P" + good[at + 1 :], "belong to nothing")


def test_18_a_chunk_checksum_is_checked_on_reading(tmp_path: Path, good: bytes) -> None:
    with_raw = good.index(struct.pack("<3f", 1, 2, 3))
    refuse(tmp_path / "f", good[:with_raw] + b"\1" + good[with_raw + 1 :], "'raw' is damaged")


def test_24_a_missing_base_is_refused(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "f").write_bytes(good)
    with Container.open(tmp_path / "f") as file, pytest.raises(CheckpointError, match="missing"):
        file.tensor("delta")


def test_4_directories_and_fifos_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "absent"):
        with pytest.raises(CheckpointError):
            Container.open(path)


def test_27_a_symbolic_link_is_refused_when_asked(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "f").write_bytes(good)
    (tmp_path / "link").symlink_to(tmp_path / "f")
    Container.open(tmp_path / "link").close()
    with pytest.raises(CheckpointError):
        Container.open(tmp_path / "link", follow_symlinks=False)


def test_absent_names_and_wrong_kinds_are_the_same_error(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "f").write_bytes(good)
    with Container.open(tmp_path / "f") as file:
        for call in (lambda: file.tensor("nope"), lambda: file.value("nope"), lambda: file.tensor("lit")):
            with pytest.raises(CheckpointError):
                call()
    with pytest.raises(CheckpointError, match="closed"):
        file.tensor("raw")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The smallest file with one raw and one coded tensor."""
    path = tmp_path_factory.mktemp("small") / "f"
    writer = ContainerWriter(path, ["a", "b"])
    for name, choice in (("a", Choice()), ("b", Choice(Codec.FP8, (16, 16)))):
        found = encode(torch.ones(4, 4), choice)
        writer.add(entry_of(name, found), extent_bytes(found))
    writer.commit()
    return path.read_bytes()


def test_truncation_at_every_byte_is_refused(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "f"
    path.write_bytes(small)
    for size in range(len(small) - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(CheckpointError):
            Container.open(path)


def test_every_flipped_bit_is_refused(tmp_path: Path, small: bytes) -> None:
    """Header, index and all else: no bit of the file may change unseen."""
    path = tmp_path / "f"
    path.write_bytes(small)
    length = struct.unpack_from("<Q", small, 32)[0]
    everywhere = [*range(64), *range(4096, 4096 + length), *range(64, 4096, 97), *range(4096 + length, len(small), 7)]
    with Container.open(path) as file:
        everywhere += range(file.entries["a"].offset, file.entries["a"].offset + 64)
    with path.open("r+b", buffering=0) as out:
        for at in everywhere:
            for bit in range(8):
                os.pwrite(out.fileno(), bytes([small[at] ^ 1 << bit]), at)
                with pytest.raises(CheckpointError):
                    read_all(path)
            os.pwrite(out.fileno(), small[at : at + 1], at)
    assert set(read_all(path)) == {"a", "b"}


@settings(max_examples=300, deadline=None)
@given(
    record=st.integers(0, 8),
    fields=st.dictionaries(
        st.sampled_from([f for f in forge.FIELDS if f not in ("base", "bound", "reserved_tail")]),
        st.one_of(st.integers(0, 300), st.sampled_from([2**8 - 1, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
def test_random_index_fields_end_in_one_exception_or_a_tensor(
    tmp_path_factory: pytest.TempPathFactory, good: bytes, record: int, fields: dict[str, int]
) -> None:
    widths = dict(zip(forge.FIELDS, _field_maxima(), strict=True))
    data = forge.record(good, record, **{name: value & widths[name] for name, value in fields.items()})
    path = tmp_path_factory.getbasetemp() / "random"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read_all(path)
    except CheckpointError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 << 20


def _field_maxima() -> list[int]:
    codes = "IHBBBBBBHHIIIIdQ" + "Q" * 24 + "QQQ" + "QQQQ" + "QII" + "ss"
    size = {"B": 8, "H": 16, "I": 32, "Q": 64, "d": 0, "s": 0}
    return [2 ** size[c] - 1 for c in codes]


@settings(max_examples=150, deadline=None)
@given(start=st.integers(0, 4096 * 3), junk=st.binary(min_size=1, max_size=200))
def test_random_bytes_anywhere_in_header_and_index(
    tmp_path_factory: pytest.TempPathFactory, good: bytes, start: int, junk: bytes
) -> None:
    """With checksums mended, junk in the index is refused by its meaning or gives tensors of the declared shape."""
    data = good[:start] + junk + good[start + len(junk) :]
    path = tmp_path_factory.getbasetemp() / "junk"
    for candidate in (data, forge.reseal(data) if start >= 64 else data):
        path.write_bytes(candidate)
        try:
            for value in read_all(path).values():
                assert isinstance(value, torch.Tensor | str | bytes | int | float | bool | None)
        except CheckpointError:
            continue
