"""Where runs live and what they are called."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costlab.app.store import StoreError, home, new_run_directory, new_run_id, runs_directory


def test_the_home_is_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.delenv("COSTLAB_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert home() == tmp_path / "me" / ".local" / "share" / "costlab"
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    assert home() == tmp_path / "me" / ".local" / "share" / "costlab"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert home() == tmp_path / "data" / "costlab"
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path / "own"))
    assert home() == tmp_path / "own"
    assert runs_directory() == tmp_path / "own" / "runs"
    assert not (tmp_path / "own").exists()


NOON = datetime(2026, 11, 29, 14, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("workload", "size", "start"),
    [
        ("llama", "1b", "20261129-1402-llama-1b-"),
        ("my/dir/Train_Step.py:make", "tiny", "20261129-1402-train-step-tiny-"),
        ("../../etc/passwd:x", "", "20261129-1402-passwd-"),
        ("", "", "20261129-1402-run-"),
    ],
)
def test_ids_name_the_workload(workload: str, size: str, start: str) -> None:
    assert re.fullmatch(re.escape(start) + "[0-9a-f]{4}", new_run_id(workload, size, NOON))


@given(st.text(), st.text())
def test_ids_are_always_one_plain_folder_name(workload: str, size: str) -> None:
    assert re.fullmatch(r"[0-9]{8}-[0-9]{4}(-[a-z0-9]+)+", new_run_id(workload, size))
    assert len(new_run_id(workload, size)) < 80


def test_ids_sort_by_time() -> None:
    later = NOON.replace(hour=15)
    assert new_run_id("a", "z", later) > new_run_id("z", "z", NOON)


def test_a_new_directory_is_empty_and_unique(tmp_path: Path) -> None:
    made = {new_run_directory("llama", "tiny", tmp_path) for _ in range(5)}
    assert len(made) == 5
    assert all(p.is_dir() and not any(p.iterdir()) for p in made)


def test_a_store_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="COSTLAB_HOME"):
        new_run_directory("llama", "", tmp_path / "file" / "runs")
