"""Reads by the C library's own threads (POSIX AIO), so that one thread of Python can drive a load.

Python's readers each take the interpreter after every read, and waking sixteen threads for it costs more than the
copies. glibc reads requests of one descriptor one after the other, hence a descriptor for each lane.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any


class _Event(ctypes.Structure):  # struct sigevent of glibc, 64 bytes
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("pad", ctypes.c_int * 12),
    ]


class _Request(ctypes.Structure):  # struct aiocb of glibc on 64-bit machines
    _fields_ = [
        ("descriptor", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("event", _Event),
        ("next", ctypes.c_void_p),
        ("absolute_priority", ctypes.c_int),
        ("policy", ctypes.c_int),
        ("error", ctypes.c_int),
        ("result", ctypes.c_ssize_t),
        ("offset", ctypes.c_long),
        ("reserved", ctypes.c_char * 32),
    ]


class _Settings(ctypes.Structure):  # struct aioinit
    _fields_ = [
        (name, ctypes.c_int) for name in ("threads", "num", "locks", "usedba", "debug", "numusers", "idle", "pad")
    ]


NO_SIGNAL = 1  # SIGEV_NONE
IN_PROGRESS = 115  # EINPROGRESS
_libc: Any = ctypes.CDLL(None, use_errno=True)
_kept: Any = ctypes.PyDLL(None, use_errno=True)  # calls that return at once keep the interpreter


class Reads:
    """Requests under way on `lanes` descriptors of one file; used by one thread."""

    def __init__(self, descriptor: int, lanes: int, depth: int) -> None:
        settings = _Settings(threads=lanes, num=lanes * depth, idle=1)
        _libc.aio_init(ctypes.byref(settings))
        self._descriptors = [os.dup(descriptor) for _ in range(lanes)]
        self._requests = [_Request() for _ in range(lanes * depth)]
        self._free = list(range(lanes * depth))
        self._flying: dict[int, object] = {}
        self._list = (ctypes.c_void_p * (lanes * depth))()

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def full(self) -> bool:
        """Whether no request can be made before another is done."""
        return not self._free

    def begin(self, address: int, length: int, offset: int, what: object) -> None:
        """Begin to read; `what` comes back when it is done."""
        number = self._free.pop()
        request = self._requests[number]
        ctypes.memset(ctypes.byref(request), 0, ctypes.sizeof(request))
        request.descriptor = self._descriptors[number % len(self._descriptors)]
        request.buffer, request.length, request.offset = address, length, offset
        request.event.notify = NO_SIGNAL
        if _kept.aio_read(ctypes.byref(request)):
            raise OSError(ctypes.get_errno(), "aio_read")
        self._flying[number] = what
        self._list[number] = ctypes.addressof(request)

    def done(self) -> Sequence[object]:
        """What is done, at least one; waits without the interpreter. Raises OSError for a short or failed read."""
        while True:
            found = [n for n in self._flying if _kept.aio_error(ctypes.byref(self._requests[n])) != IN_PROGRESS]
            if found:
                return [self._end(n) for n in found]
            _libc.aio_suspend(self._list, len(self._list), None)

    def _end(self, number: int) -> object:
        request = self._requests[number]
        code = _kept.aio_error(ctypes.byref(request))
        count = _kept.aio_return(ctypes.byref(request))
        self._list[number] = None
        self._free.append(number)
        what = self._flying.pop(number)
        if code or count != request.length:
            raise OSError(code, f"read {count} of {request.length} bytes at {request.offset}")
        return what

    def close(self) -> None:
        """Wait for all that is under way and give the descriptors back."""
        while self._flying:
            self.done()
        for descriptor in self._descriptors:
            os.close(descriptor)
