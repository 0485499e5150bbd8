"""Reports of a run, as Markdown, terminal text and JSON, all from the same view models."""

from costlab.app.report.json import render_json
from costlab.app.report.markdown import render_markdown
from costlab.app.report.terminal import render_text

__all__ = ["render_json", "render_markdown", "render_text"]
