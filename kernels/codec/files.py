"""Durable files: written under a temporary name in the same directory, fsynced, renamed, and the directory fsynced."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.layout import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that says what was being done."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


def sync_directory(path: Path) -> None:
    """Make the directory's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def aligned_buffer(size: int) -> NDArray[np.uint8]:
    """Zeroed memory that starts on a page, as O_DIRECT asks; `size` is rounded up to a page."""
    pages = -(-max(size, 1) // PAGE) * PAGE
    return np.frombuffer(mmap.mmap(-1, pages), np.uint8)


def pwrite_all(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    """Write all of `data` at `offset`; a disk that takes nothing raises `ENOSPC`."""
    view = memoryview(data.data)
    while view:
        written = os.pwrite(fd, view, offset)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[written:], offset + written


class AtomicFile:
    """A file that appears under its name whole and durable, or not at all. Raises `OSError`.

    `direct` asks for O_DIRECT, for writes of page-aligned memory, offset and size; `self.direct` says whether the
    filesystem gave it.
    """

    def __init__(self, path: Path, direct: bool = False) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.tmp.{os.getpid()}")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self.direct = direct
        if direct:
            try:
                self.fd = os.open(self.partial, flags | os.O_DIRECT, 0o644)
                return
            except OSError as error:
                # tmpfs, FUSE and some network filesystems refuse the flag (and may leave the file behind).
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self.partial.unlink(missing_ok=True)
                self.direct = False
        self.fd = os.open(self.partial, flags, 0o644)

    def allocate(self, size: int, start: int = 0) -> None:
        """Reserve bytes `start` to `size` now, so that a full disk shows before the data; no-op where unsupported.

        Nothing may be written to them meanwhile.
        """
        if size > start:
            try:
                os.posix_fallocate(self.fd, start, size - start)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise

    def write(self, data: NDArray[np.uint8], offset: int) -> None:
        """Write at an offset; callable from several threads. What O_DIRECT can't take goes through the page cache."""
        if not self.direct or not (offset % PAGE or data.size % PAGE or data.ctypes.data % PAGE):
            pwrite_all(self.fd, data, offset)
            return
        fd = os.open(self.partial, os.O_WRONLY | os.O_CLOEXEC)
        try:
            pwrite_all(fd, data, offset)
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Make the data written so far durable."""
        os.fsync(self.fd)

    def commit(self, size: int) -> None:
        """Cut to `size`, sync, rename, sync the directory. A name that is already taken is an error."""
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)
        os.close(self.fd)
        self.fd = -1
        if os.path.lexists(self.path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        self.partial.rename(self.path)
        sync_directory(self.path.parent)

    def abort(self) -> None:
        """Close and remove what was written; safe to call at any time, also after `commit`."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(OSError):
            self.partial.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """A small file, whole and durable or not at all. Raises `OSError`."""
    file = AtomicFile(path)
    try:
        file.write(np.frombuffer(data, np.uint8), 0)
        file.commit(len(data))
    finally:
        file.abort()
