"""`--schedule`: the planned all-reduce inside DDP and HSDP on four real ranks, and where it is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from costlab.probes.spec import RunSpec, SpecError, validate

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels" / "schedule")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

cases = import_module("schedule_ranks")  # under this name, the ranks find it on their path
RankPool = import_module("rank_pool").RankPool


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("parallel", "schedule"),
    [("ddp", "auto"), ("ddp", "hybrid"), ("ddp", "chain"), ("hsdp", "auto"), ("hsdp", "ring")],
)
def test_gradients_are_those_of_the_stock_path(four: Any, parallel: str, schedule: str) -> None:
    for difference, same, said in four.run(cases.against_stock, 4, parallel, schedule):
        assert difference <= 1
        assert same
        assert any(f"all-reduce {schedule} over" in text and "measured" in text for text in said)
        assert any("nothing between hosts" in text for text in said) == (schedule == "hybrid")


def test_choices_are_kept_for_measured_sizes_and_for_each_message_of_the_step(four: Any) -> None:
    parameters = 33 * 64 + 64 + 64 * 64 + 64 + 64 * 17 + 17
    for rows in four.run(cases.choices, 4):
        assert [(r["nbytes"], r["used"]) for r in rows if r["before"]] == [
            (s, False) for s in (64 << 10, 1 << 20, 8 << 20)
        ]
        used = [r for r in rows if not r["before"]]
        assert [(r["nbytes"], r["used"]) for r in used] == [(4 * parameters, True)]
        for row in rows:
            assert row["schedule"] in row["seconds"]
            assert "backend" in row["seconds"]
            assert (row["asked"], row["ranks"], row["hosts"], row["library"]) == ("auto", 4, 1, "gloo")


@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_arms_of_a_whatif_take_the_times_of_the_first_that_measured(four: Any, parallel: str, tmp_path: Path) -> None:
    for said, again, measured in four.run(cases.repeated, 4, parallel, str(tmp_path), ""):
        assert any("measured" in text for text in said)
        assert again == said
        assert measured == 0
    assert len(list(tmp_path.glob("costlab-curves-*"))) == (1 if parallel == "ddp" else 2)


PLAN = '[{"schedule":"by-carrier-pigeon"},[]]'


@pytest.mark.parametrize("spoil", ["", "{", "{}", f'{{"alone":[{PLAN}],"beside":[],"noise":[],"refused":[]}}'])
def test_times_that_cannot_be_read_are_measured_again(four: Any, tmp_path: Path, spoil: str) -> None:
    results = four.run(cases.repeated, 4, "ddp", str(tmp_path), spoil or " ")
    assert [measured for _, _, measured in results] == [1] * 4


LAYERS = [33 * 64 + 64, 64 * 64 + 64, 64 * 17 + 17]
HALVES = [4 * n // 2 for n in (*LAYERS[:2], 64 * 18 + 18)]  # FSDP pads 17 rows for its two ranks


@pytest.mark.parametrize("schedule", ["auto", "hybrid", "chain"])
@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_the_trace_holds_every_planned_all_reduce_with_its_bytes(four: Any, parallel: str, schedule: str) -> None:
    sizes = sorted(HALVES) if parallel == "hsdp" else [4 * sum(LAYERS)]
    for rank, (calls, problems) in enumerate(four.run(cases.traced, 4, parallel, schedule)):
        own = [c for c in calls if c[1]]
        group = f"{rank % 2},{rank % 2 + 2}" if parallel == "hsdp" else "0,1,2,3"
        assert sorted(c[3] for c in own) == sizes
        assert all(c[0] == "all_reduce" and c[2] == group and c[3] == c[4] for c in own)
        assert schedule == "auto" or {c[1] for c in own} == {schedule}
        others = {c[0] for c in calls if not c[1]} - {"broadcast"}  # DDP's, as it orders its buckets anew
        assert others == ({"all_gather", "reduce_scatter"} if parallel == "hsdp" else set()), "no part of a schedule"
        assert not any("no c10d operator" in p or "missing" in p for p in problems)


def test_symmetric_memory_is_refused_on_cpus(four: Any) -> None:
    assert all("needs CUDA tensors" in text for text in four.run(cases.refused, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parallel": "fsdp"}, "FSDP2 over all ranks has no all-reduce; add --parallel ddp, or hsdp"),
        ({"parallel": "ddp", "grad_compression": "fp16"}, "one communication hook"),
    ],
)
def test_what_has_no_all_reduce_to_plan_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        validate(RunSpec(schedule="auto", **options))  # type: ignore[arg-type]
    validate(RunSpec(**options))  # type: ignore[arg-type]
