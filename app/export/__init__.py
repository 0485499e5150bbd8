"""Runs for other tools: span trees as OTLP, timelines as Chrome/Perfetto JSON."""
