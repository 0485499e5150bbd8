"""Unpacking the recorded runs that come with the package, and refusing what is not one."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from costlab.app.store import StoreError, open_sample, sample_names, samples
from tests.app.make_run import write_example_run


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package's samples; the store is empty."""
    folder = tmp_path / "samples"
    folder.mkdir()
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(samples.resources, "files", lambda _: folder)
    return folder


def pack(folder: Path, name: str, *, root: str = "run", **options: object) -> Path:
    run = write_example_run(folder.parent / f"built-{name}", run_id=name, **options)
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
        tar.add(run, root)
    return run


def crafted(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    out.seek(0)
    return out


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize("root", ["run", "."])
def test_a_sample_opens_and_is_unpacked_once(archives: Path, root: str) -> None:
    pack(archives, "llama", root=root)
    pack(archives, "resnet", root=root)
    assert sample_names() == ["llama", "resnet"]
    first = open_sample("llama")
    assert first.id == "llama"
    assert first.path.is_relative_to(archives.parent / "home" / "cache")
    marker = first.path / "marker"
    marker.write_text("")
    assert open_sample("llama").path == first.path
    assert marker.exists()


def test_a_changed_archive_is_unpacked_anew(archives: Path) -> None:
    pack(archives, "llama")
    before = open_sample("llama").path
    pack(archives, "llama", layers=2)
    assert open_sample("llama").path != before


def test_an_unknown_sample_names_the_known(archives: Path) -> None:
    pack(archives, "llama")
    with pytest.raises(StoreError, match="no sample 'nope'; there are: llama"):
        open_sample("nope")
    with pytest.raises(StoreError, match="no sample"):
        open_sample("../llama")


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", "C:evil", "..", ".", "a/\x01/../../../evil"]
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "in" / "target"
    with pytest.raises(StoreError, match="unsafe name"):
        samples.extract(crafted((member(name), b"x")), target)
    assert not target.exists()
    assert not list(tmp_path.rglob("*evil*"))
    assert not list((tmp_path / "in").iterdir())


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE],
)
def test_only_plain_files_are_taken(tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(StoreError, match=r"no plain file|damaged"):
        samples.extract(crafted((member("x", kind, "/etc/passwd"), b"")), tmp_path / "target")
    assert not list(tmp_path.rglob("x"))


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(samples, "MAX_FILES", 3)
    with pytest.raises(StoreError, match="more than 1 MiB"):
        samples.extract(crafted((member("zeros"), bytes(4 << 20))), tmp_path / "a")
    with pytest.raises(StoreError, match="more than 3 files"):
        samples.extract(crafted(*((member(f"f{n}"), b"") for n in range(5))), tmp_path / "b")
    huge = member("name")
    huge.pax_headers = {"comment": "x" * (2 << 20)}
    with pytest.raises(StoreError, match="more than 1 MiB"):
        samples.extract(crafted((huge, b"")), tmp_path / "c")
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith(".")]


@pytest.mark.parametrize("cut", [0, 10, 200, -20])
def test_a_cut_archive_is_damaged(tmp_path: Path, cut: int) -> None:
    whole = crafted((member("manifest.json"), b"{}" * 500), (member("b"), bytes(range(256)) * 8)).getvalue()
    with pytest.raises(StoreError, match=r"damaged|no content"):
        samples.extract(io.BytesIO(whole[:cut]), tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_another_kind_of_file_is_damaged(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("manifest.json", "{}")
    with pytest.raises(StoreError, match="damaged"):
        samples.extract(io.BytesIO(out.getvalue()), tmp_path / "target")


def test_members_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot unpack"):
        samples.extract(crafted((member("a"), b"1"), (member("a"), b"2")), tmp_path / "target")
