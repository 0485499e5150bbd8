"""Writes docs/benchmarks.md from the committed results: `python tests/benchmarks/page.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "tests" / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Generated from `tests/benchmarks/results/` by `python tests/benchmarks/page.py`; do not edit. A ratio is to a peer or a
ceiling measured in the same run on the same machine; n is the number of samples behind the value.
"""


def significant(value: float | None) -> str:
    """Four significant digits, "–" for what was not measured."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def machine(environment: dict[str, Any]) -> str:
    """One line on what it ran on."""
    gpus = environment.get("gpus") or []
    device = f"{len(gpus)} x {gpus[0]['name']}" if gpus else environment.get("gpu") or environment.get("cpu", "CPU")
    parts = [device, f"torch {environment.get('torch')}"]
    for key in ("triton", "cuda", "nccl", "driver", "python"):
        if environment.get(key):
            parts.append(f"{key} {environment[key]}")
    return ", ".join(parts)


def section(path: Path) -> str:
    """One subject's table."""
    data = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"\n## {path.stem}\n", f"{machine(data['environment'])}\n"]
    lines += [f"{note}\n" for note in data["environment"].get("notes", [])]
    lines.append("| metric | value | peer or ceiling | its value | ratio | n |")
    lines.append("|---|---:|---|---:|---:|---:|")
    for r in data["results"]:
        value = f"{significant(r['value'])} {r['unit']}".strip()
        peer_value = "–" if r["peer_value"] is None else f"{significant(r['peer_value'])} {r['unit']}".strip()
        lines.append(
            f"| {r['metric']} | {value} | {r['peer'] or '–'} | {peer_value} | {significant(r['ratio'])} | {r['n']} |"
        )
    commands = list(dict.fromkeys(r["command"] for r in data["results"]))
    return "\n".join([*lines, "", *(f"`{command}`" for command in commands), ""])


def page() -> str:
    """The whole page."""
    return HEAD + "".join(section(path) for path in sorted(RESULTS.glob("*.json")))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
