"""Renderers of a run report: Markdown, plain text and JSON."""
