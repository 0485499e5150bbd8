"""What may not be loaded: torch in the app, Textual outside the TUI, pandas before it is needed."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "triton", "pandas", "textual", "pyarrow", "plotext", "networkx")


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def modules(package: str) -> list[str]:
    root = import_module(package)
    return [m.name for m in pkgutil.walk_packages(root.__path__, f"{package}.") if not m.name.endswith("__main__")]


def test_app_never_imports_torch() -> None:
    everything = "\n".join(f"import {name}" for name in modules("costlab.app"))
    assert not {"torch", "triton"} & loaded_by(everything)


def test_command_line_starts_light() -> None:
    assert not set(HEAVY) & loaded_by("import costlab.app.cli")


def test_tui_starts_without_tables() -> None:
    assert not {"torch", "pandas", "pyarrow", "plotext", "networkx"} & loaded_by("import costlab.app.tui.app")


@pytest.mark.parametrize("package", ["analysis", "diagnosis", "report", "store", "importers"])
def test_core_knows_no_textual(package: str) -> None:
    names = [f"costlab.app.{package}", *modules(f"costlab.app.{package}")]
    assert "textual" not in loaded_by("\n".join(f"import {name}" for name in names))


@pytest.mark.parametrize("module", ["launch", "records", "spec", "tables", "failures"])
def test_launcher_side_is_torch_free(module: str) -> None:
    assert "torch" not in loaded_by(f"import costlab.probes.{module}")
