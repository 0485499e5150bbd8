"""`costlab import`: real and hostile trace files to a run directory."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from costlab.app.analysis.collectives import collectives_view, last_arrivals, with_transfer
from costlab.app.importers import ImportProblem, sources
from costlab.app.importers.identity import Claims, assign
from costlab.app.importers.kineto import import_traces
from costlab.app.store.run import Run
from costlab.probes.records import CollectiveRow, KernelRow, PartRow, StepRow
from tests.probes.trace.synthetic import Recording

DATA = Path(__file__).parent / "data"
GLOO = Path(__file__).resolve().parents[2] / "probes" / "trace" / "data"
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"


def trace(rank: int | None = 0, world: int = 2, **kernels: Any) -> bytes:
    recording = Recording(rank=rank, world=world)
    recording.note("ProfilerStep#7", 0, 100)
    recording.nccl("allreduce", 5, 20, 30, (8, 8), **kernels)
    recording.kernel("gemm", 10, 60, 20)
    return recording.json()


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def manifest(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "manifest.json").read_bytes())
    return result


@pytest.fixture(scope="module", params=["reduced", "original"])
def dlrm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = DATA / "dlrm_8rank_reduced.tar.gz"
    if request.param == "original":
        path = SHARED / "param_dlrm_8rank_kineto.tar.gz"
        if not path.exists():
            pytest.skip("the unreduced 8-rank trace is not beside this checkout")
    return Run(import_traces([path], tmp_path_factory.mktemp("dlrm") / "run"))


def test_eight_ranks_transfer_and_last_arrivals(dlrm: Run) -> None:
    rows = dlrm.table("collectives", CollectiveRow)
    calls, unmatched = with_transfer(rows)
    assert unmatched == 0
    per_call = calls.drop_duplicates(["step", "group", "seq"])
    assert per_call.transfer.sum() * 1000 == pytest.approx(217)
    assert calls[calls["rank"] == 1].ms.sum() * 1000 == pytest.approx(11336)
    assert Counter(last_arrivals(calls).values()) == {7: 5, 5: 2, 4: 1}
    view = collectives_view(rows, expected_bytes=None, formula="", steps=1)
    assert view.transfer_ms == pytest.approx(0.217)
    assert "rank 7 arrived last in 5 of 8" in view.straggler
    assert Counter(r.kind for r in view.rows) == {"all_to_all": 4, "all_reduce": 3}


def test_eight_ranks_device_time(dlrm: Run) -> None:
    totals = dlrm.manifest.extra["device_totals"]["0"]
    assert totals["span_ms"] == pytest.approx(13.009)
    assert totals["busy_ms"] == pytest.approx(6.590)
    assert totals["compute_ms"] == pytest.approx(1.034)
    assert sorted(dlrm.manifest.extra["device_totals"]) == [str(r) for r in range(8)]


def test_eight_ranks_parts_sum_to_their_step(dlrm: Run) -> None:
    parts, steps = dlrm.table("parts", PartRow), dlrm.table("steps", StepRow)
    summed = parts.groupby(["rank", "step"]).ms.sum()
    windows = steps.set_index(["rank", "step"]).ms
    pd.testing.assert_series_equal(summed.sort_index(), windows.sort_index(), check_names=False)
    assert set(steps.step) == {10}
    assert set(steps.role) == {"profiled"}


def test_eight_ranks_run_opens_complete(dlrm: Run) -> None:
    assert (dlrm.status, dlrm.manifest.ranks, sorted(dlrm.rank_directories)) == ("complete", 8, list(range(8)))
    assert dlrm.notes == []
    kernels = dlrm.table("kernels", KernelRow)
    assert set(kernels.category) == {"matmul", "memory", "communication", "copy"}
    assert any("no unprofiled steps" in n for n in dlrm.manifest.notes)
    assert any(n.startswith("rank 1: 64 of 326 device events have no launch call") for n in dlrm.manifest.notes)


def test_real_cpu_ranks_from_a_folder(tmp_path: Path) -> None:
    run = Run(import_traces([GLOO], tmp_path / "run"))
    view = collectives_view(run.table("collectives", CollectiveRow), expected_bytes=None, formula="", steps=1)
    assert run.manifest.environment is not None
    assert (run.manifest.environment.device, run.manifest.ranks) == ("cpu", 2)
    assert view.transfer_ms is not None and view.wait_ms is not None
    assert view.total_ms == pytest.approx(view.transfer_ms + view.wait_ms)
    assert any("analysed as training on the CPU" in n for n in run.manifest.notes)
    assert run.manifest.imported_from == "data"


def test_manifest_names_no_path_and_no_host(tmp_path: Path) -> None:
    text = json.loads(trace()) | {"host_name": "secret-host", "traceName": "/home/secret/x.json"}
    file = tmp_path / "rank0.json.gz"
    file.write_bytes(gzip.compress(json.dumps(text).encode()))
    run = import_traces([file], tmp_path / "run")
    written = b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
    assert b"secret" not in written
    assert str(tmp_path).encode() not in written
    assert manifest(run)["imported_from"] == "rank0.json.gz"


def test_step_times_and_start(tmp_path: Path) -> None:
    text = json.loads(trace()) | {"baseTimeNanoseconds": 10**18}
    file = tmp_path / "a.json"
    file.write_bytes(json.dumps(text).encode())
    steps = Run(import_traces([file], tmp_path / "run")).table("steps", StepRow)
    assert steps[["rank", "step", "ms", "start_ns"]].to_numpy().tolist() == [[0, 7, 0.1, 10**18]]


def test_missing_ranks_show(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(trace(rank=2, world=4))
    run = Run(import_traces([file], tmp_path / "run"))
    assert run.manifest.ranks == 4
    assert any("no tables from ranks 0, 1, 3" in n for n in run.notes)


def test_unreadable_trace_beside_readable_ones_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rank0.json").write_bytes(trace())
    (tmp_path / "in" / "rank1.json").write_bytes(trace(1)[:-40])
    (tmp_path / "in" / "notes.txt").write_text("no trace")
    run = import_traces([tmp_path / "in"], tmp_path / "run")
    assert any(n.startswith("left out: rank1.json: the file ends in the middle") for n in manifest(run)["notes"])
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == ["rank-00000"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"not json", "not valid JSON"),
        ("a.json", b'{"traceEvents": ', "ends in the middle"),
        ("a.json", b'{"other": 1}', "no traceEvents"),
        ("a.tar.gz", b"no archive at all", "damaged archive"),
        ("a.tar", b"", "damaged archive"),
    ],
)
def test_nothing_readable_is_one_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ImportProblem) as caught:
        import_traces([file], tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert words in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ImportProblem, match="does not exist"):
        import_traces([tmp_path / "none.json"], tmp_path / "run")
    with pytest.raises(ImportProblem, match=r"holds no \*\.json"):
        (tmp_path / "empty").mkdir()
        import_traces([tmp_path / "empty"], tmp_path / "run")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(trace())
    with pytest.raises(ImportProblem, match="not an empty folder"):
        import_traces([file], tmp_path)
    with pytest.raises(ImportProblem, match="not an empty folder"):
        import_traces([file], file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json"]


def test_archive_cannot_write_outside_or_follow_links(tmp_path: Path) -> None:
    archive = tmp_path / "in" / "evil.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("../../escaped_rank0.json", "/abs/rank1.json"):
            info = tarfile.TarInfo(name)
            info.size = len(trace(None))
            tar.addfile(info, io.BytesIO(trace(None)))
        link = tarfile.TarInfo("rank2.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        fifo = tarfile.TarInfo("rank3.json")
        fifo.type = tarfile.FIFOTYPE
        tar.addfile(fifo)
    run = import_traces([archive], tmp_path / "run")
    assert sorted(p.name for p in run.iterdir()) == ["manifest.json", "rank-00000", "rank-00001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "run"]


def test_archive_larger_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar_of(tmp_path / "a.tar.gz", {"rank0.json": trace(), "rank1.json": trace(1)})
    monkeypatch.setattr(sources, "MAX_ARCHIVE", len(trace()) + 10)
    with pytest.raises(ImportProblem, match=r"too large at rank1\.json"):
        import_traces([archive], tmp_path / "run")


def test_archive_without_traces_and_cut_archive(tmp_path: Path) -> None:
    with pytest.raises(ImportProblem, match="in the archive"):
        import_traces([tar_of(tmp_path / "a.tar.gz", {"readme.txt": b"x"})], tmp_path / "run")
    whole = tar_of(tmp_path / "b.tar.gz", {"rank0.json": trace(), "rank1.json": trace(1) * 400}).read_bytes()
    (tmp_path / "c.tgz").write_bytes(whole[:-30])
    with pytest.raises(ImportProblem, match="damaged archive"):
        import_traces([tmp_path / "c.tgz"], tmp_path / "run")


def claims(name: str, stated: int | None = None, *events: int) -> Claims:
    return Claims(name, stated, frozenset(events))


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),
        ("worker7_step_12.1694128201553.pt.trace.json", 7),
        ("rank0_trace.json", 0),
        ("llama.rank_12.json", 12),
        ("trace_r3.json", 3),
        ("host_1234.1690000000.pt.trace.json", None),
        ("frank2.json", None),
        ("order66.json", None),
    ],
)
def test_rank_in_a_file_name(name: str, rank: int | None) -> None:
    assert claims(name).in_name == rank


def test_metadata_counts_before_the_name_and_the_conflict_is_said() -> None:
    ranks, notes = assign([claims("rank-34.json", 70)])
    assert ranks == [70]
    assert notes == ["rank-34.json: its metadata says rank 70, its name says rank 34"]


def test_rank_claimed_twice_goes_by_the_name() -> None:
    ranks, notes = assign([claims("rank0.json", 0), claims("rank1.json", 0), claims("rank2.json", 0)])
    assert ranks == [0, 1, 2]
    assert "rank1.json: its metadata says rank 0, its name says rank 1" in notes


def test_rank_from_the_events() -> None:
    assert assign([claims("a.json", None, 3), claims("b.json", None, 1)]) == ([3, 1], [])
    ranks, notes = assign([claims("a.json", None, 3, 4)])
    assert ranks == [0]
    assert notes == [
        "a.json: its collectives come from several ranks (3, 4)",
        "a.json: it does not say its rank; stored as rank 0",
    ]


def test_unknown_and_repeated_ranks_get_free_numbers() -> None:
    ranks, notes = assign([claims("a.json", 1), claims("b.json"), claims("c.json", 5), claims("d.json", 5)])
    assert ranks == [1, 0, 2, 3]
    assert "b.json: it does not say its rank; stored as rank 0" in notes
    assert "c.json: its rank is claimed by another file; stored as rank 2" in notes


def test_event_ranks_reach_the_run(tmp_path: Path) -> None:
    for i in (0, 1):
        (tmp_path / f"part{i}.json").write_bytes(trace(None, Rank=1 - i))
    run = import_traces([tmp_path / "part0.json", tmp_path / "part1.json"], tmp_path / "run")
    assert not any("does not say its rank" in n for n in manifest(run)["notes"])
    assert manifest(run)["imported_from"] == "part0.json and 1 more"


@pytest.mark.parametrize("name", ["hta_large_integer_uint64.json.gz", "tracelens_torch_compile_triton_rocm.json.gz"])
def test_shared_single_files(tmp_path: Path, name: str) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    run = Run(import_traces([path], tmp_path / "run"))
    parts, steps = run.table("parts", PartRow), run.table("steps", StepRow)
    assert parts.ms.sum() == pytest.approx(steps.ms.sum())
    assert any("does not say its rank; stored as rank 0" in n for n in run.manifest.notes)
