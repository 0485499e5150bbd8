"""Sweeps that need no GPU: a TCP stream over loopback, and a disk. Torch-free."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from costlab.probes.links import BLOCK_SIZES, Sweep, sweep
from costlab.probes.timing import Agree, Timed, points, wall

_WAIT_S = 30.0
_ALIGN = 4096
FILE_BYTES = 128 << 20  # written through before it is read: blocks never written are not read from the disk


@contextmanager
def listener() -> Iterator[socket.socket]:
    """A listening socket on a free loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_WAIT_S)
        yield server


@contextmanager
def nothing() -> Iterator[None]:
    """No socket."""
    yield None


@contextmanager
def connection(server: socket.socket | None, port: int) -> Iterator[socket.socket]:
    """The connected socket: accepted by `server`, or made to `port`."""
    if server is not None:
        link, _ = server.accept()
    else:
        link = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
    with link:
        link.settimeout(_WAIT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield link


def receive(link: socket.socket, into: memoryview) -> None:
    """Fill `into`; ConnectionError if the other end is gone."""
    done = 0
    while done < len(into):
        got = link.recv_into(into[done:])
        if got == 0:
            raise ConnectionError("the other rank closed the connection")
        done += got


def ping(link: socket.socket, *, first: bool) -> Callable[[int], Timed]:
    """For a size: the message there and back, half of the time."""

    def make(size: int) -> Timed:
        out, back = memoryview(bytearray(b"\1" * size)), memoryview(bytearray(size))

        def work() -> None:
            if first:
                link.sendall(out)
                receive(link, back)
            else:
                receive(link, back)
                link.sendall(out)

        return lambda: wall(work) / 2

    return make


def agreement(link: socket.socket, first: bool) -> Agree:
    """The larger of both ends' values."""

    def agree(value: float) -> float:
        theirs = memoryview(bytearray(8))
        if first:
            link.sendall(struct.pack("d", value))
        receive(link, theirs)
        if not first:
            link.sendall(struct.pack("d", value))
        other: float = struct.unpack("d", theirs)[0]
        return max(value, other)

    return agree


def disk(folder: Path, seconds: float, skip: Callable[[str], None]) -> list[Sweep]:
    """Writes and reads past the page cache by block size; where the file system refuses that, `skip` says so."""
    if not hasattr(os, "O_DIRECT"):
        skip("disk: this platform has no O_DIRECT")
        return []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="costlab-disk-") as file:
            return _disk(Path(file.name), seconds)
    except OSError as error:
        skip(f"disk: {folder.name or folder} cannot be measured past the page cache ({error.strerror})")
        return []


def _disk(path: Path, seconds: float) -> list[Sweep]:
    sweeps = []
    with _descriptor(path, os.O_RDWR | os.O_DIRECT) as file:
        whole = _block(file, BLOCK_SIZES[-1], os.pwritev)
        for _ in range(FILE_BYTES // BLOCK_SIZES[-1]):
            whole()
        for what, move in (("direct write", os.pwritev), ("direct read", os.preadv)):
            found = points(BLOCK_SIZES, lambda size, move=move: _block(file, size, move), seconds)  # type: ignore[misc]
            src, dst = ("host", "disk") if what == "direct write" else ("disk", "host")
            sweeps.append(sweep(what, "one", src, dst, found, f"one {what} of a block, queue depth 1"))
    return sweeps


@contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def _block(file: int, size: int, move: Callable[..., int]) -> Timed:
    """One block at the next offset, durable when written."""
    buffer = mmap.mmap(-1, max(size, _ALIGN))  # page-aligned, as O_DIRECT asks
    buffer[:] = os.urandom(len(buffer))  # a drive may compress what repeats
    state = {"at": 0}

    def work() -> None:
        done = move(file, [buffer], state["at"])
        if done != size:
            raise OSError(5, "a block was cut short")
        if move is os.pwritev:
            os.fdatasync(file)
        state["at"] = (state["at"] + size) % (FILE_BYTES - size + 1) // size * size

    return lambda: wall(work)
