"""Generated pages are current, and what the README promises exists."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_benchmark_page_is_current() -> None:
    page = load(ROOT / "tests" / "benchmarks" / "page.py")
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page.page()


def test_results_have_the_common_form_and_nothing_private() -> None:
    for path in (ROOT / "tests" / "benchmarks" / "results").glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        assert set(data) == {"environment", "results"}, path.name
        for result in data["results"]:
            missing = {"metric", "value", "unit", "peer", "peer_value", "ratio", "n", "command"} - set(result)
            assert not missing, (path.name, missing)
        assert not re.search(r"/(home|root|work|tmp|mnt)/", path.read_text()), path.name


def test_readme_links_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / target).exists(), target


def test_readme_commands_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command = [sys.executable, "-P", "-m", "costlab.app", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fenced = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.S))
    for command in set(re.findall(r"^costlab ([a-z]+)", fenced, re.M)):
        assert re.search(rf"\b{command}\b", known), command


def test_history_speaks_of_the_project_alone() -> None:
    """No path of a machine in what is tracked."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in tracked:
        if name.endswith((".py", ".md", ".toml", ".sh")) and name not in ("tests/test_docs.py",):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not re.search(r"(?<![\w.])/work/", text), name
