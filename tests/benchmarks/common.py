"""The common form of benchmark results: `{"environment": ..., "results": [{metric, value, unit, peer, ...}]}`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PLACE = "PLACE"  # stands for a path in a recorded command
RESULTS = Path(__file__).resolve().parent / "results"


def command_line() -> str:
    """How this script was called, without the places that this machine's paths name."""
    words = [PLACE if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python", f"tests/benchmarks/{Path(sys.argv[0]).name}", *words])


def result(
    metric: str, value: float, unit: str, *, peer: str = "", peer_value: float | None = None, n: int, **more: Any
) -> dict[str, Any]:
    """One line of a result file; `ratio` is value / peer_value unless given."""
    ratio = more.pop("ratio", value / peer_value if peer_value else None)
    command = more.pop("command", None) or command_line()
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
