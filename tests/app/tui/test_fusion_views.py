"""What the Fusion pane shows beside the tree: generated code, anti-patterns, classes with their gap, one cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import Input

from costlab.app.analysis.build import build_report
from costlab.app.store import Run
from costlab.app.tui.app import CostlabApp
from costlab.app.tui.cells import text_of
from costlab.app.tui.panes.fusion_code import CodePanel, KernelKey, keys_of, read_code
from costlab.app.tui.widgets.code import Code, highlighted
from costlab.app.tui.widgets.lines import Lines
from costlab.app.tui.widgets.table import Table
from costlab.probes.records import KernelSourceRow, PatternRow
from costlab.probes.tables import write_rows
from tests.app.make_run import write_example_run
from tests.app.tui.driving import column, dialog_text, find, make_app, opened, settle, shown

TRITON = """\
@triton.jit
def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    # one block of the tensor
    xoffset = tl.program_id(0) * XBLOCK
    tl.store(out_ptr0 + xoffset, 2.0, None)
"""


def pattern(kind: str, layer: str, size: int, source: str = "my_model.py:7") -> PatternRow:
    return PatternRow(
        rank=0, kind=kind, layer=layer, phase="forward", source=source, text=f"[bold]{kind}\x1b[31m happens here",
        mend=f"take the {kind} out", bytes=size, count=2, ops="aten.clone.default",
    )  # fmt: skip


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example run with generated sources of all kernels that Triton made, and two anti-patterns."""
    path = write_example_run(tmp_path_factory.mktemp("deep") / "20261129-1402-llama-deep-0001")
    fusion = build_report(Run(path)).fusion
    assert fusion is not None
    names = dict.fromkeys((k.name, k.phase) for k in fusion.kernels if k.name.startswith("triton"))
    assert len(names) > 2
    rows = [source_row(name, phase, TRITON.format(name=name)) for name, phase in names]
    write_rows(path / "rank-00000", KernelSourceRow, rows)
    patterns = [pattern("hidden_copy", "layers.0.attention", 1 << 26), pattern("print", "layers.1.feed_forward", 0)]
    write_rows(path / "rank-00000", PatternRow, patterns)
    return path


def source_row(name: str, phase: str, source: str, language: str = "triton", cut: bool = False) -> KernelSourceRow:
    return KernelSourceRow(rank=0, name=name, phase=phase, compile_id="0/0", language=language, source=source, cut=cut)


async def at_fusion(pilot: object, *keys: str) -> CostlabApp:
    app = await opened(pilot)  # type: ignore[arg-type]
    for key in ("2", *keys):
        await pilot.press(key)  # type: ignore[attr-defined]
        await settle(pilot)  # type: ignore[arg-type]
    return app


def test_code_keeps_every_character_and_tells_its_parts() -> None:
    lines = highlighted(TRITON.format(name="k"), "triton")
    assert "\n".join(text_of(one) for one in lines) == TRITON.format(name="k").rstrip("\n")
    tones = {text: tone for one in lines for text, tone in one}
    assert (tones["def"], tones["# one block of the tensor"], tones["2.0"]) == ("accent", "muted", "warn")


@pytest.mark.parametrize("language", ["triton", "cpp", "no such language", ""])
@pytest.mark.parametrize(
    "source",
    [
        "", "\n\n", "\tif (a)\r\n\t\tb;\r\n", "x = '''\nnever closed", "\x1b]0;title\x07a\x1b[2Jb", "a\u202eb\u200bc",
        "[bold red]a[/]", "\ufeffk = 1\x0c2\x85three\u2028four", "名前 = '値'  # 注", "}}}) (((\\", "a" * 70_000,
    ],
)  # fmt: skip
def test_any_text_is_shown_and_none_of_it_is_obeyed(source: str, language: str) -> None:
    lines = highlighted(source, language)
    text = "\n".join(text_of(one) for one in lines)
    assert not any((ord(c) < 32 and c != "\n") or c in "\x7f\x9b\u202e\u200b\ufeff" for c in text)
    letters = "".join(c for c in source if c.isalpha())
    assert "".join(c for c in text if c.isalpha()) in (letters, letters.replace("title", "").replace("J", ""))


async def test_v_shows_the_code_of_the_slowest_kernel_and_brackets_go_on(deep: Path) -> None:
    app = make_app(deep)
    async with app.run_test(size=(120, 40)) as pilot:
        await at_fusion(pilot, "v")
        code, panel = find(app, "#code", Code), find(app, "#generated", CodePanel)
        assert code.has_focus
        first = panel.current
        assert first is not None
        assert first.key.ms == max(one.key.ms for one in panel.found)
        assert f"def {first.key.name}(" in code.plain
        assert "@triton.jit" in shown(app)
        assert f"1 of {len(panel.found)}" in find(app, "#code-head", Lines).plain
        await pilot.press("right_square_bracket")
        assert panel.current is panel.found[1]
        await pilot.press("left_square_bracket", "left_square_bracket")
        assert panel.current is panel.found[-1]
        assert "```python" in app.pane.markdown()
        await pilot.press("f", "g")
        assert not find(app, "#layers", Table).row.layer_class or app.pane.has_class("-code"), "the tree rests"
        assert not find(app, "#filter", Lines).has_class("-on")
        await pilot.press("escape")
        assert find(app, "#layers", Table).has_focus


async def test_the_kernel_under_the_cursor_is_the_one_shown(deep: Path) -> None:
    app = make_app(deep)
    async with app.run_test(size=(80, 24)) as pilot:
        await at_fusion(pilot, "enter")
        kernels = find(app, "#kernels", Table)
        kernels.focus()
        kernels.cursor = next(i for i, k in enumerate(kernels.rows) if k.name.startswith("triton") and i)
        wanted = kernels.row
        await pilot.press("enter")
        await settle(pilot, lambda: find(app, "#generated", CodePanel).current is not None)
        current = find(app, "#generated", CodePanel).current
        assert current is not None
        assert (current.key.name, current.key.phase) == (wanted.name, wanted.phase)
        await pilot.press("v")
        assert app.pane.has_class("-detail")
        kernels.cursor = next(i for i, k in enumerate(kernels.rows) if not k.name.startswith("triton"))
        kernels.focus()
        await pilot.press("v")
        await settle(pilot, lambda: find(app, "#generated", CodePanel).current is not None)
        assert "No generated code." in shown(app)
        await pilot.press("right_square_bracket")
        assert find(app, "#code", Code).display


async def test_code_scrolls_both_ways_at_80x24(deep: Path, tmp_path: Path) -> None:
    long = write_example_run(tmp_path / "long")
    fusion = build_report(Run(long)).fusion
    assert fusion is not None
    slow = next(k for k in fusion.kernels if k.name.startswith("triton"))
    source = "\n".join(f"x{n} = {'a + ' * 60}END{n}" for n in range(300))
    write_rows(long / "rank-00000", KernelSourceRow, [source_row(slow.name, slow.phase, source, cut=True)])
    app = make_app(long)
    async with app.run_test(size=(80, 24)) as pilot:
        await at_fusion(pilot, "v")
        assert "the end is missing" in shown(app)
        assert "END0" not in shown(app)
        await pilot.press("G")
        await settle(pilot)
        assert "300  x299" in shown(app)
        code = find(app, "#code", Code)
        code.scroll_to(x=code.max_scroll_x, animate=False)
        await settle(pilot)
        assert "END299" in shown(app)
        assert "300  " in shown(app), "line numbers stay"


async def test_a_run_without_sources_says_so(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(80, 24)) as pilot:
        await at_fusion(pilot, "v")
        assert "No generated code of this layer was kept" in shown(app)
        await pilot.press("v")
        assert not app.pane.has_class("-code")


async def test_a_hostile_source_reaches_the_terminal_as_text(tmp_path: Path) -> None:
    path = write_example_run(tmp_path / "hostile", hostile=True)
    fusion = build_report(Run(path)).fusion
    assert fusion is not None
    bad = "\x1b]0;owned\x07\x1b[2J```\n[bold red]x[/] \u202e = 1 # \x1b[31mred\n"
    names = dict.fromkeys((k.name, k.phase) for k in fusion.kernels)
    rows = [source_row(name, phase, bad, language="\x1b[31m") for name, phase in names]
    write_rows(path / "rank-00000", KernelSourceRow, rows)
    app = make_app(path)
    async with app.run_test(size=(120, 40)) as pilot:
        await at_fusion(pilot, "v")
        seen = shown(app) + app.pane.markdown()
        assert "[bold red]x[/]" in seen
        assert not {"\x1b", "\x07", "\u202e"} & set(seen)
        assert "````" in app.pane.markdown(), "its own fence does not end the block"


def test_only_kernels_with_a_source_are_listed_and_the_wanted_one(deep: Path) -> None:
    fusion = build_report(Run(deep)).fusion
    assert fusion is not None
    keys = keys_of(fusion.kernels)
    assert [k.ms for k in keys] == sorted((k.ms for k in keys), reverse=True)
    assert all(one.view is not None for one in read_code(deep, keys, None))
    other = next(k for k in keys if not k.name.startswith("triton"))
    assert [one.key for one in read_code(deep, keys, other) if one.view is None] == [other]
    assert read_code(deep, [KernelKey("no such", "forward")], None) == []


async def test_d_lists_anti_patterns_with_cost_and_mend_and_goes_to_the_layer(deep: Path) -> None:
    app = make_app(deep)
    async with app.run_test(size=(80, 24)) as pilot:
        await at_fusion(pilot, "d")
        table = find(app, "#patterns", Table)
        assert table.has_focus
        assert column(table, "kind") == ["hidden copy", "print"]
        assert column(table, "cost")[1] == "–", "an unknown cost is not zero"
        text = find(app, "#pattern-text", Lines).plain
        assert "my_model.py:7" in text
        assert "take the hidden_copy out" in text
        assert table.row.cost_kind in text
        assert "\x1b" not in shown(app)
        await pilot.press("i")
        assert "hidden_copy" in dialog_text(app)
        await pilot.press("escape", "down")
        assert "no cost is known" in find(app, "#pattern-text", Lines).plain
        await pilot.press("enter")
        await settle(pilot)
        assert not app.pane.has_class("-patterns")
        assert find(app, "#layers", Table).has_focus
        assert find(app, "#layers", Table).row.path == "layers.*.feed_forward"


async def test_a_run_without_anti_patterns_says_so(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(80, 24)) as pilot:
        await at_fusion(pilot, "d")
        assert "No anti-pattern was found" in shown(app)
        await pilot.press("escape")
        assert find(app, "#layers", Table).has_focus


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_classes_show_the_gap_in_time_and_money_and_lead_to_their_layers(
    example: Path, size: tuple[int, int]
) -> None:
    app = make_app(example)
    async with app.run_test(size=size) as pilot:
        await at_fusion(pilot, "g")
        table = find(app, "#layers", Table)
        assert app.session.report is not None and app.session.report.fusion is not None
        classes = {c.layer_class: c for c in app.session.report.fusion.classes}
        gaps = dict(zip((r.label for r in table.rows), column(table, "gap"), strict=True))
        paid = dict(zip((r.label for r in table.rows), column(table, "money"), strict=True))
        worst = max(classes.values(), key=lambda c: c.gap_ms or 0.0)
        assert worst.gap_ms and worst.gap_run_money
        assert gaps[worst.layer_class].endswith("s")
        assert paid[worst.layer_class].startswith("$")
        assert {paid[name] for name, c in classes.items() if c.gap_run_money is None} <= {"–"}
        assert "gap, run" in shown(app)
        table.cursor = next(i for i, r in enumerate(table.rows) if r.label == worst.layer_class)
        await pilot.press("i")
        assert "gap" in dialog_text(app)
        await pilot.press("escape", "enter")
        await settle(pilot)
        assert {r.layer_class for r in table.rows} == {worst.layer_class}
        assert "gap, run" not in shown(app)
        await pilot.press("escape")
        assert len({r.layer_class for r in table.rows}) > 1


async def test_c_goes_through_the_causes_and_x_shows_all(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(120, 40)) as pilot:
        await at_fusion(pilot)
        table = find(app, "#layers", Table)
        assert app.session.report is not None and app.session.report.fusion is not None
        expected = {r.main_cause for r in app.session.report.fusion.layers if r.main_cause}
        seen: list[str] = []
        for _ in expected:
            await pilot.press("c")
            causes = {row.cause for row in table.rows}
            assert len(causes) == 1
            seen += causes
            assert seen[-1].replace("_", " ") in find(app, "#filter", Lines).plain
        assert sorted(seen) == sorted(expected)
        await pilot.press("a")
        assert all(row.lost for row in table.rows)
        await pilot.press("x")
        assert not find(app, "#filter", Lines).has_class("-on")


async def test_enter_on_a_missed_fusion_tells_all_of_it(example: Path) -> None:
    app = make_app(example)
    async with app.run_test(size=(80, 24)) as pilot:
        await at_fusion(pilot, "enter", "enter")
        miss = find(app, "#misses", Table).row
        text = dialog_text(app)
        for part in (miss.producer_source, miss.consumer_source, "mend", "reason"):
            assert part in " ".join(text.split()), part


async def test_search_is_still_text_in_the_search_line(deep: Path) -> None:
    app = make_app(deep)
    async with app.run_test(size=(80, 24)) as pilot:
        await at_fusion(pilot, "slash", "v", "d", "p")
        assert find(app, "#search", Input).value == "vdp"
        assert not app.pane.covered  # type: ignore[attr-defined]
