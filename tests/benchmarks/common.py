"""The common form of benchmark results: `{"environment": ..., "results": [{metric, value, unit, peer, ...}]}`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def result(
    metric: str, value: float, unit: str, *, peer: str = "", peer_value: float | None = None, n: int, **more: Any
) -> dict[str, Any]:
    """One line of a result file; `ratio` is value / peer_value unless given."""
    ratio = more.pop("ratio", value / peer_value if peer_value else None)
    command = more.pop("command", " ".join(["python", f"tests/benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]))
    return {
        "metric": metric,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "n": n,
        "command": command,
        **more,
    }


def save(subject: str, environment: dict[str, Any], results: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write `<folder>/<subject>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{subject}.json"
    path.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n", encoding="utf-8")
    return path
