"""Opening and listing runs, whole and damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costlab.app.store import Run, StoreError, list_runs, open_run
from costlab.probes.records import Log, SpanRow, StepRow, encode_event
from tests.app.make_run import write_example_run


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store."""
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path))
    return tmp_path / "runs"


def example(store: Path, run_id: str = "20261129-1402-llama-x-a1b2", **options: Any) -> Path:
    return write_example_run(store / run_id, run_id=run_id, **options)


def edit_manifest(run: Path, **values: object) -> None:
    file = run / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_complete_run_has_no_notes(store: Path) -> None:
    run = Run(example(store))
    steps = run.table("steps", StepRow)
    assert run.notes == []
    assert run.status == "complete"
    assert run.title == "llama example · compiled FSDP2 · 2 x NVIDIA H200 · bf16"
    assert set(steps["rank"]) == {0, 1}
    assert list(steps.columns) == list(StepRow.__struct_fields__)
    assert run.table("steps", StepRow) is steps
    assert set(run.table("steps", StepRow, ranks=(1,))["rank"]) == {1}


def test_absent_strings_are_empty_and_absent_parents_are_not(store: Path) -> None:
    spans = Run(example(store)).table("spans", SpanRow)
    assert (spans.main_cause == "").any()
    assert spans.main_cause.notna().all()
    assert spans.parent_span_id[spans.kind == "step"].isna().all()


def test_events_come_in_order_and_damaged_lines_are_counted(store: Path) -> None:
    path = example(store)
    with (path / "events.jsonl").open("ab") as sink:
        sink.write(b'{"event":"log","t":99.0,"text":"cut o\n\xff\xfe\n{"event":"martian","t":1}\n')
        sink.write(encode_event(Log(t=99.0, text="last")))
        sink.write(b'{"event":"log","t":99')
    run = Run(path)
    events = list(run.events())
    assert isinstance(events[-1], Log)
    assert events[-1].text == "last"
    assert run.notes == ["events.jsonl: 4 lines could not be read"]


def test_without_merged_events_the_ranks_own_are_read_in_order_of_time(store: Path) -> None:
    path = example(store)
    (path / "events.jsonl").unlink()
    for rank, times in ((0, (1.0, 3.0)), (1, (2.0, 4.0))):
        lines = [encode_event(Log(t=t, rank=rank, text=str(t))) for t in times]
        (path / f"rank-{rank:05d}" / "events.jsonl").write_bytes(b"".join(lines))
    assert [e.t for e in Run(path).events()] == [1.0, 2.0, 3.0, 4.0]


def test_a_damaged_table_costs_that_table_of_that_rank(store: Path) -> None:
    path = example(store)
    (path / "rank-00001" / "steps.parquet").write_bytes(b"PAR1 no longer")
    (path / "rank-00001" / "spans.parquet").unlink()
    run = Run(path)
    assert set(run.table("steps", StepRow)["rank"]) == {0}
    assert set(run.table("spans", SpanRow)["rank"]) == {0}
    assert len(run.notes) == 2
    assert run.notes[0].startswith("steps: the table of rank 1 cannot be read")
    assert run.notes[1] == "spans: no table from rank 1"


def test_ranks_that_left_nothing_are_named(store: Path) -> None:
    path = example(store)
    edit_manifest(path, ranks=4)
    assert Run(path).notes == ["no tables from ranks 2, 3 of 4"]


def test_a_table_of_another_version_is_read_as_far_as_it_goes(store: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = example(store)
    file = path / "rank-00000" / "steps.parquet"
    table = pq.read_table(file)
    newer = table.drop_columns(["host_ms"]).append_column("joules", pa.array([1.0] * len(table)))
    metadata = {b"costlab.schema": b"3", b"costlab.table": b"steps"}
    pq.write_table(newer.replace_schema_metadata(metadata), file)
    run = Run(path)
    steps = run.table("steps", StepRow)
    assert "joules" not in steps.columns
    assert steps.host_ms[steps["rank"] == 0].isna().all()
    assert steps.ms.notna().all()
    assert run.notes == ["steps: written by a newer costlab (schema 3 > 1): what it added is not shown"]


def test_a_table_without_a_required_column_is_left_out(store: Path) -> None:
    import pyarrow.parquet as pq

    path = example(store)
    file = path / "rank-00000" / "steps.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["ms"]), file)
    run = Run(path)
    assert set(run.table("steps", StepRow)["rank"]) == {1}
    assert run.notes == ["steps: the table of rank 0 has no column 'ms' and is left out"]


def test_a_column_of_the_wrong_type_is_empty(store: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = example(store)
    file = path / "rank-00000" / "steps.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index("loss"), "loss", pa.array(["?"] * len(table))), file)
    run = Run(path)
    assert run.table("steps", StepRow).loss.isna().any()
    assert "column 'loss' of rank 0 cannot be read" in run.notes[0]


def test_a_newer_manifest_says_so_and_is_read(store: Path) -> None:
    path = example(store)
    edit_manifest(path, schema_version=3, status="paused", workload={"name": 7}, surprise=[1])
    run = Run(path)
    assert run.notes[0] == "written by a newer costlab (schema 3 > 1): what it added is not shown"
    assert any("'status' could not be read" in n for n in run.notes)
    assert any("'workload' could not be read" in n for n in run.notes)
    assert run.status == "incomplete"
    assert run.manifest.ranks == 2


def test_a_run_left_running_by_a_dead_process_is_incomplete(store: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    example(store, "20261129-1402-a-0001", status="running", pid=dead.pid, pid_started=1.0)
    example(store, "20261129-1403-b-0002", status="running")
    me = psutil.Process()
    example(store, "20261129-1404-c-0003", status="running", pid=me.pid, pid_started=me.create_time())
    example(store, "20261129-1405-d-0004", status="running", pid=me.pid, pid_started=me.create_time() - 100)
    status = {s.id[14]: s.status for s in list_runs()}
    assert status == {"a": "incomplete", "b": "incomplete", "c": "running", "d": "incomplete"}


def test_the_list_is_newest_first_and_shows_damage(store: Path) -> None:
    example(store, "20261129-1402-a-0001", created="2026-11-29T14:02:00Z")
    example(store, "20261129-1500-b-0002", created="2026-11-29T15:00:00Z", status="failed")
    broken = example(store, "20261130-0900-c-0003")
    (broken / "manifest.json").write_text('{"run_id": ')
    (store / "20261130-1000-empty").mkdir()
    (store / ".hidden").mkdir()
    listed = list_runs()
    assert [(s.id[:13], s.status) for s in listed] == [
        ("20261130-1000", "damaged"),
        ("20261130-0900", "damaged"),
        ("20261129-1500", "failed"),
        ("20261129-1402", "complete"),
    ]
    assert "no readable manifest.json" in listed[0].problem
    assert "damaged" in listed[1].problem
    assert listed[2].problem == "rank 1 ran out of GPU memory"
    assert (listed[3].problem, listed[3].hardware, listed[3].duration_s) == ("", "2 x NVIDIA H200", 71.5)


def test_listing_reads_no_tables_and_imports_no_pandas(store: Path) -> None:
    for n in range(3):
        example(store, f"20261129-140{n}-a-000{n}")
    code = (
        "import sys; from costlab.app.store import list_runs; runs = list_runs(); assert len(runs) == 3, runs;"
        "print([m for m in ('pandas', 'pyarrow', 'torch', 'textual', 'numpy') if m in sys.modules])"
    )
    env = os.environ | {"COSTLAB_HOME": str(store.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_empty_store_lists_nothing_and_last_says_what_to_do(store: Path) -> None:
    assert list_runs() == []
    with pytest.raises(StoreError, match="'costlab run' records one"):
        open_run("last")


def test_runs_open_by_id_prefix_path_and_last(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = example(store, "20261129-1402-llama-0001", created="2026-11-29T14:02:00Z")
    second = example(store, "20261129-1500-llama-0002", created="2026-11-29T15:00:00Z")
    assert open_run("20261129-1402-llama-0001").path == first
    assert open_run("20261129-14").path == first
    assert open_run("last").path == second
    assert open_run(str(first)).path == first
    assert open_run(first / "manifest.json").path == first
    monkeypatch.chdir(store)
    assert open_run("./20261129-1402-llama-0001").path.samefile(first)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("2026", "begins 2 runs: .*type more of the id"),
        ("nothing", "no run 'nothing'.*'costlab runs' lists them"),
        ("", "no run ''"),
        ("a\x1b[2J\nb", "no run 'a b'"),
        ("x" * 5000, "no run 'xxx"),
        ("a\0b", "no run 'ab'"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(store: Path, which: str, message: str) -> None:
    example(store, "20261129-1402-llama-0001")
    example(store, "20261129-1500-llama-0002")
    with pytest.raises(StoreError, match=message) as caught:
        open_run(which)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_path_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no readable manifest"):
        open_run(tmp_path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=300))
def test_no_manifest_crashes_the_list(store: Path, data: bytes) -> None:
    path = store / "20261129-1402-x-0001"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_bytes(data)
    assert len(list_runs()) == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["run_id", "created", "status", "spec", "ranks", "environment", "workload", "pid", "failure"]),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=3),
    )
)
def test_any_json_object_is_a_readable_manifest(store: Path, fields: dict[str, Any]) -> None:
    path = store / "20261129-1402-x-0001"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(json.dumps(fields))
    (summary,) = list_runs()
    assert summary.status != "damaged"
    assert Run(path).manifest.run_id == summary.id
