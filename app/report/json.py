"""The machine form of a report. docs/report-schema.md documents every key."""

from __future__ import annotations

import msgspec

from costlab.app.analysis.views import RunReport


def render_json(report: RunReport) -> bytes:
    """UTF-8 JSON, indented, keys in the documented order; a figure that is missing is null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
