"""Reports of a run or of two, as Markdown, terminal text and JSON, all from the same view models."""

from costlab.app.report.compare import render_comparison_json, render_comparison_markdown, render_comparison_text
from costlab.app.report.json import render_json
from costlab.app.report.markdown import render_markdown
from costlab.app.report.terminal import render_text

__all__ = [
    "render_comparison_json",
    "render_comparison_markdown",
    "render_comparison_text",
    "render_json",
    "render_markdown",
    "render_text",
]
