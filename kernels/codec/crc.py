"""CRC32C over raw memory, without holding the GIL where the library allows it.

The google-crc32c wheel ships the C library its extension is built on; called through ctypes the GIL is free
meanwhile, so that writer and loader threads run in parallel. Without that library the extension itself is used:
the same value, one thread at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 1 << 20


@cache
def _library() -> Callable[[int, int, int], int] | None:
    import google_crc32c

    beside = Path(google_crc32c.__file__).parent.with_name("google_crc32c.libs")
    for path in sorted(beside.glob("libcrc32c*")):
        try:
            function: Any = ctypes.CDLL(str(path)).crc32c_extend
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_uint32
        function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
        return function  # type: ignore[no-any-return]
    return None


def releases_gil() -> bool:
    """Whether `extend` lets other Python threads run meanwhile."""
    return _library() is not None


def extend(crc: int, data: NDArray[np.uint8]) -> int:
    """CRC32C of what `crc` covers followed by contiguous `data`."""
    function = _library()
    if function is not None:
        return function(crc, data.ctypes.data, data.size)
    import google_crc32c

    value: int = google_crc32c.extend(crc, data.tobytes())
    return value


def of_bytes(data: bytes) -> int:
    """CRC32C of a bytes object."""
    import google_crc32c

    value: int = google_crc32c.value(data)
    return value


def chunk_count(offset: int, length: int) -> int:
    """Chunks of an extent: the pieces into which multiples of 1 MiB in the file cut it."""
    return (offset + length - 1) // CHUNK - offset // CHUNK + 1 if length else 0


def chunk_start(offset: int, number: int) -> int:
    """Where in an extent at `offset` its chunk of this number starts."""
    return max(0, number * CHUNK - offset % CHUNK)


def chunk_seeds(seed: bytes, first: int, count: int) -> list[int]:
    """What the CRCs of chunks from number `first` start from: the CRC32C of `seed` and the number."""
    import google_crc32c

    value = google_crc32c.value
    return [value(seed + number.to_bytes(4, "little")) for number in range(first, first + count)]


def chunk_crcs(seed: bytes, data: NDArray[np.uint8], offset: int, first: int = 0) -> list[int]:
    """CRC32C of the chunks of contiguous `data`, which lies at `offset` in the file; `first` is its first
    chunk's number.

    Each starts from the CRC of `seed` (tensor name and extent) and the chunk's number, so that swapped chunks don't
    pass.
    """
    cuts = [chunk_start(offset, number) for number in range(chunk_count(offset, data.size))]
    seeds = chunk_seeds(seed, first, len(cuts))
    spans = zip(seeds, cuts, [*cuts, data.size][1:], strict=True)
    function = _library()
    if function is None:
        return [extend(start_crc, data[start:end]) for start_crc, start, end in spans]
    address = data.ctypes.data
    return [function(start_crc, address + start, end - start) for start_crc, start, end in spans]
