"""Recorded runs that come with the package, unpacked on first use."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from costlab.app.store.errors import StoreError
from costlab.app.store.home import home
from costlab.app.store.manifest import NAME
from costlab.app.store.run import Run

SUFFIX = ".tar.gz"
MAX_BYTES = 256 << 20  # unpacked, headers included
MAX_FILES = 5000


def _archives() -> dict[str, Traversable]:
    try:
        folder = resources.files("costlab.sample_traces")
    except ModuleNotFoundError:
        return {}
    return {f.name.removesuffix(SUFFIX): f for f in folder.iterdir() if f.name.endswith(SUFFIX)}


def sample_names() -> list[str]:
    """Names of the recorded runs that come with costlab, sorted."""
    return sorted(_archives())


def open_sample(name: str) -> Run:
    """Open the sample `name`, unpacking it into the store's cache the first time; raise StoreError if there is none."""
    archive = _archives().get(name)
    if archive is None:
        known = ", ".join(sample_names()) or "none in this installation"
        raise StoreError(f"no sample '{name}'; there are: {known}")
    data = archive.read_bytes()
    target = home() / "cache" / "samples" / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    if not target.is_dir():
        extract(io.BytesIO(data), target)
    return Run(_root(target))


def _root(directory: Path) -> Path:
    """The run directory inside an unpacked archive: itself or its only folder."""
    folders = [p for p in directory.iterdir() if (p / NAME).is_file()]
    if (directory / NAME).is_file() or len(folders) != 1:
        return directory
    return folders[0]


def extract(archive: BinaryIO, target: Path) -> None:
    """Unpack a gzipped tar of a run into `target`, which appears whole or not at all.

    Only plain files with relative names inside `target` are taken; links, devices, absolute or climbing names, more
    than MAX_FILES members or MAX_BYTES bytes raise StoreError.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    except OSError as error:
        raise StoreError(f"cannot unpack into {target.parent}: {error.strerror}; set COSTLAB_HOME") from error
    try:
        _unpack(archive, partial)
        _publish(partial, target)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise StoreError(f"the sample archive is damaged: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot unpack into {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # another process was faster: its copy is as good
            raise


def _unpack(archive: BinaryIO, target: Path) -> None:
    with gzip.GzipFile(fileobj=archive) as raw, tarfile.open(fileobj=_Bounded(raw), mode="r|") as tar:
        for member in _plain_files(tar):
            source = tar.extractfile(member)
            if source is None:
                raise StoreError(f"the sample archive holds '{member.name}', which has no content")
            path = target / _inside(member.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as sink:
                shutil.copyfileobj(source, sink)


def _plain_files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for n, member in enumerate(tar):
        if n >= MAX_FILES:
            raise StoreError(f"the sample archive holds more than {MAX_FILES} files")
        if member.isdir():
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            raise StoreError(f"the sample archive holds '{member.name}', which is no plain file")
        yield member


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or not path.parts or any(c in name for c in "\\:\0")
    if bad:
        raise StoreError(f"the sample archive holds the unsafe name '{name}'")
    return path


class _Bounded(io.RawIOBase):
    """A stream that refuses to yield more than MAX_BYTES, so that no header or member can fill disk or memory."""

    def __init__(self, source: gzip.GzipFile) -> None:
        self._source, self._left = source, MAX_BYTES

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size if 0 <= size <= self._left else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise StoreError(f"the sample archive unpacks to more than {MAX_BYTES >> 20} MiB")
        return data
