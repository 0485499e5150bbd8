"""The JSON report's documentation is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from costlab.app.analysis.views import Figure, LayerRow, Part, RunReport
from costlab.app.report import schema

DOC = Path(__file__).parents[3] / "docs" / "report-schema.md"


def test_the_document_is_current() -> None:
    assert DOC.read_text(encoding="utf-8") == schema.schema_markdown(), "python -m costlab.app.report.schema > docs/…"


def test_every_key_of_every_struct_has_a_type_and_a_meaning() -> None:
    text = schema.schema_markdown()
    rows = re.findall(r"(?m)^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", text)
    assert len(rows) > 180
    assert [name for name, kind, _, meaning in rows if not kind or not meaning] == []


def test_numbers_with_a_dimension_have_a_unit() -> None:
    assert schema.unit_of("ms", float) == "ms"
    assert schema.unit_of("p10_ms", float | None) == "ms"
    assert schema.unit_of("bytes", int | None) == "B"
    assert schema.unit_of("busbw_gbps", float | None) == "GB/s"
    assert schema.unit_of("step_ms", Figure) == "in it"
    assert schema.unit_of("cause", str) == ""


def test_types_read_as_json() -> None:
    assert schema.type_words(float | None) == "number or null"
    assert schema.type_words(list[Part]) == "list of [Part](#part)"
    assert schema.type_words(dict[str, int]) == "object of integer"
    assert schema.type_words(LayerRow.__annotations__ and bool) == "true or false"


def test_all_structs_are_reached() -> None:
    names = {s.__name__ for s in schema._structs(RunReport)}
    assert {"RunReport", "Figure", "Part", "Finding", "Environment", "Gpu", "CacheView", "KernelView"} <= names
