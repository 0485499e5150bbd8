"""Every pane, driven by keys on a real run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from textual.widgets import Input

from costlab.app.tui.panes.fusion_detail import LayerDetail
from costlab.app.tui.panes.log import LogPane
from costlab.app.tui.panes.registry import PANES, key_of
from costlab.app.tui.session import Session
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.strip import FigureStrip
from costlab.app.tui.widgets.table import Table
from tests.app.make_run import write_example_run
from tests.app.tui.driving import column, dialog_text, find, make_app, opened, settle, shown


@pytest.mark.parametrize("spec", PANES, ids=lambda p: p.id)
def test_every_entry_of_the_registry_can_be_built(spec: object) -> None:
    pane = spec.load(Session())  # type: ignore[attr-defined]
    assert pane.id == spec.id  # type: ignore[attr-defined]
    assert pane.TITLE
    assert pane.HELP


def test_keys_of_panes_are_digits_without_repeats() -> None:
    keys = [key_of(index) for index in range(10)]
    assert keys == list("1234567890")


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 10)])
async def test_every_pane_draws_at_every_size(example: Path, size: tuple[int, int]) -> None:
    app = make_app(example)
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        for index, spec in enumerate(PANES):
            await pilot.press(key_of(index))
            await settle(pilot)
            assert app.pane.id == spec.id
            assert shown(app).strip()


async def test_overview_shows_the_answer_first(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        report = app.session.report
        assert report is not None
        assert report.waterfall is not None
        strip = find(app, "#headline", FigureStrip)
        assert [n.name for n in strip.items][:3] == ["step", "tokens/s", "MFU"]
        names = column(find(app, "#parts", Table), "name")
        assert names[0] == "matrix math"
        assert names[-1] == "step"
        parts = [row for row in find(app, "#parts", Table).rows if row.level == 0]
        assert sum(row.ms for row in parts) == pytest.approx(report.waterfall.step_ms, rel=0.01)
        assert len(find(app, "#findings", Table).rows) == len(report.findings)
        await pilot.press("enter")
        assert report.findings[0].title in dialog_text(app)


async def test_a_finding_leads_to_the_layer_it_is_about(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        table = find(app, "#findings", Table)
        table.cursor = next(i for i, f in enumerate(table.rows) if f.id == "broken-fusion")
        await pilot.press("g")
        await settle(pilot, lambda: app.pane.id == "fusion")
        assert find(app, "#layers", Table).row.path == "loss"


async def test_fusion_opens_closes_filters_searches_and_groups(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("2")
        await settle(pilot)
        table = find(app, "#layers", Table)
        assert column(table, "status")[0] == "◐ P"
        everything = len(table.rows)
        await pilot.press("left")
        assert len(table.rows) == 1
        await pilot.press("right")
        assert len(table.rows) == everything
        await pilot.press("f")
        assert {row.status for row in table.rows} == {"partial"}
        assert "partial" in find(app, "#filter", Lines).plain
        await pilot.press("escape", "slash", *"attn")
        assert find(app, "#search", Input).has_focus
        await pilot.press("enter")
        await settle(pilot)
        assert not find(app, "#search", Input).has_focus
        await pilot.press("escape", "g")
        assert {row.label for row in table.rows} >= {"Attention", "FeedForward"}
        await pilot.press("g", "s")
        saves = [row.saves_ms or 0.0 for row in table.rows]
        assert saves == sorted(saves, reverse=True)


async def test_fusion_detail_shows_reason_source_and_kernels(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await pilot.press("2")
        await settle(pilot)
        detail = find(app, "#detail", LayerDetail)
        assert not detail.display
        await pilot.press("enter")
        await settle(pilot)
        assert detail.display
        assert find(app, "#misses", Table).rows
        assert find(app, "#kernels", Table).rows
        text = find(app, "#miss-text", Lines).plain
        assert "llama.py:" in text
        assert "mend" in text
        await pilot.press("escape")
        assert not detail.display
        assert find(app, "#layers", Table).has_focus


@pytest.mark.parametrize("omit", [frozenset(), frozenset({"collectives", "parts"})])
async def test_comms_says_which_all_reduce_each_message_got(tmp_path: Path, omit: frozenset[str]) -> None:
    path = write_example_run(tmp_path / "run", omit=omit)
    manifest = json.loads((path / "manifest.json").read_bytes())
    row = {"asked": "auto", "ranks": 2, "hosts": 1, "library": "nccl", "used": True}
    rows = [
        {**row, "nbytes": 1 << 20, "schedule": "one-shot", "seconds": {"one-shot": 2e-5, "backend": 5e-5}},
        {**row, "nbytes": 25 << 20, "schedule": "backend", "seconds": {"backend": 1e-4}},
    ]
    manifest["extra"] = {"schedules": rows}
    (path / "manifest.json").write_text(json.dumps(manifest))
    app = make_app(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await pilot.press("3")
        await settle(pilot)
        lines = find(app, "#schedules", Lines)
        assert lines.display
        said = " ".join(lines.plain.split())
        assert "1.05 MB: one-shot 20.0 µs, own 50.0 µs; 26.2 MB: NCCL's own 0.100 ms" in said
        assert "one-shot" in shown(app)


async def test_comms_names_the_schedule_of_each_collective_where_some_were_planned(tmp_path: Path) -> None:
    path = write_example_run(tmp_path / "run")
    for file in path.glob("rank-*/collectives.parquet"):
        frame = pd.read_parquet(file)
        frame["schedule"] = ["hybrid" if kind == "reduce_scatter" else "" for kind in frame.kind]
        frame.to_parquet(file)
    app = make_app(path)
    async with app.run_test(size=(140, 40)) as pilot:
        await opened(pilot)
        await pilot.press("3")
        await settle(pilot)
        table = find(app, "#collectives", Table)
        said = dict(zip(column(table, "call"), column(table, "plan"), strict=True))
        assert said == {"reduce_scatter": "hybrid", "all_gather": "–"}


async def test_comms_shows_wait_and_transfer_and_sorts(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("3")
        await settle(pilot)
        table = find(app, "#collectives", Table)
        times = [row.ms for row in table.rows]
        assert times == sorted(times, reverse=True)
        assert "█" in column(table, "split")[0]
        assert "▒" in column(table, "split")[0]
        await pilot.press("s")
        sizes = [row.bytes_step for row in table.rows]
        assert sizes == sorted(sizes, reverse=True)
        assert "nccl-tests" in find(app, "#convention", Lines).plain
        await settle(pilot, lambda: "busbw" in shown(app))


async def test_checkpoint_says_whether_the_restored_state_is_the_same(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("4")
        await settle(pilot)
        assert "● bit-equal" in column(find(app, "#saves", Table), "identical")
        assert any("stall" in n.name for n in app.pane.figures())


async def test_checkpoint_shows_the_engine_beside_the_others(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("4")
        await settle(pilot)
        saves, stages = find(app, "#saves", Table), find(app, "#stages", Table)
        assert column(saves, "mode") == ["sync", "async:pinned", "costlab:exact", "costlab:fp8"]
        assert column(saves, "identical")[-2:] == ["● bit-equal", "◐ in bound"]
        assert column(saves, "load")[1] == "–"
        assert column(stages, "stage").count("to disk") == 2
        assert column(stages, "bar")[column(stages, "stage").index("encode")] == "measured apart"
        assert any("% of 2.40" in cell for cell in column(stages, "ceiling"))
        assert column(find(app, "#codecs", Table), "codec") == ["fp8 16x16", "fp8 16x16", "log8"]
        resumed = find(app, "#resumed", Table)
        assert column(resumed, "after40") == ["same", "+0.0012"]
        stages.focus()
        await settle(pilot)
        assert app.pane.pointed() is not None


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_checkpoint_without_the_engine_has_no_empty_tables(tmp_path: Path, size: tuple[int, int]) -> None:
    """Runs recorded before there was an engine."""
    tables = frozenset({"checkpoint_stages", "checkpoint_codecs", "resume"})
    app = make_app(write_example_run(tmp_path / "old", omit=tables))
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        await pilot.press("4")
        await settle(pilot)
        assert [find(app, f"#{n}", Table).display for n in ("saves", "stages", "codecs", "resumed")] == [
            True, False, False, False,
        ]  # fmt: skip


async def test_compile_shows_breaks_recompiles_and_caches(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("5")
        await settle(pilot)
        assert column(find(app, "#breaks", Table), "reason") == ["call to print()"]
        assert column(find(app, "#recompiles", Table), "source") == ["llama.py:33"]
        assert find(app, "#caches", Table).rows
        assert find(app, "#breaks", Table).has_focus


async def test_money_parts_sum_to_the_whole(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("6")
        await settle(pilot)
        rows = find(app, "#money", Table).rows
        assert sum(row.per_million for row in rows[:-1]) == pytest.approx(rows[-1].per_million)
        assert all(text.startswith("$") for text in column(find(app, "#money", Table), "run"))


async def test_log_filters_by_rank_level_and_text(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(100, 30)) as pilot:
        await opened(pilot)
        await pilot.press("8")
        await settle(pilot)
        pane = app.pane
        assert isinstance(pane, LogPane)
        table = find(app, "#events", Table)
        everything = len(table.rows)
        await pilot.press("v")
        assert column(table, "text") == ["no GPUDirect Storage driver"]
        await pilot.press("x", "w")
        assert {event.rank for event in table.rows} == {-1}
        await pilot.press("x", "slash", *"direct", "enter")
        assert len(table.rows) == 1
        await pilot.press("enter")
        assert "GPUDirect" in dialog_text(app)
        await pilot.press("escape", "x")
        assert len(table.rows) == everything


@pytest.mark.parametrize(
    ("key", "pane", "words"),
    [
        ("2", "fusion", "compile = block"),
        ("3", "comms", "two ranks or more"),
        ("4", "checkpoint", "no-checkpoint"),
        ("5", "compile", "compile = block"),
    ],
)
async def test_a_run_without_a_section_says_what_to_press(tmp_path: Path, key: str, pane: str, words: str) -> None:
    tables = frozenset({"spans", "misses", "kernels", "collectives", "checkpoint", "compile"})
    path = write_example_run(tmp_path / "bare", compile="none", omit=tables)
    app = make_app(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await pilot.press(key)
        await settle(pilot)
        assert app.pane.id == pane
        empty = find(app, "#pane-empty", Lines)
        assert empty.display
        assert words in empty.plain


@pytest.mark.parametrize("status", ["failed", "cancelled", "incomplete"])
async def test_a_run_that_did_not_complete_says_so_first(tmp_path: Path, status: str) -> None:
    path = write_example_run(tmp_path / "bad", status=status, omit=frozenset({"steps", "parts"}))
    app = make_app(path)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        assert status in find(app, "#outcome", Lines).plain
        assert status in shown(app).splitlines()[0]


async def test_nothing_that_was_not_measured_is_shown_as_zero(tmp_path: Path) -> None:
    path = write_example_run(tmp_path / "cpu", device="cpu", omit=frozenset({"power"}))
    app = make_app(path)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        names = [n.name for n in find(app, "#headline", FigureStrip).items]
        assert "energy/step" not in names
        await pilot.press("6")
        await settle(pilot)
        assert "$0" not in shown(app)


async def test_hostile_names_reach_the_terminal_as_text(tmp_path: Path) -> None:
    path = write_example_run(tmp_path / "hostile", hostile=True)
    app = make_app(path)
    async with app.run_test(size=(160, 50)) as pilot:
        await opened(pilot)
        seen = ""
        for index in range(len(PANES)):
            await pilot.press(key_of(index))
            await settle(pilot)
            seen += shown(app)
            assert "\x1b" not in app.pane.markdown()
        await pilot.press("2", "enter", "question_mark", "escape", "i")
        seen += shown(app)
        assert "\x1b" not in seen
        assert "\u202e" not in seen
        assert "[bold red]" in seen
