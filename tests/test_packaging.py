"""The wheel and the package list: everything that should ship does, and nothing generic leaks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.xdist_group("packaging")
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())


def found_packages() -> set[str]:
    packages = set()
    for name, folder in CONFIG["tool"]["setuptools"]["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            packages.add(".".join((name, *inner)))
    return packages


def test_package_list_is_complete() -> None:
    assert set(CONFIG["tool"]["setuptools"]["packages"]) == found_packages()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: a build folder left in the tree would put modules into the wheel that no longer exist."""
    out, tree = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("tree")
    for folder in CONFIG["tool"]["setuptools"]["package-dir"].values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_wheel_holds_only_costlab(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"costlab"}


def test_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    shipped = set(wheel.namelist())
    for name, folder in CONFIG["tool"]["setuptools"]["package-dir"].items():
        prefix = name.replace(".", "/")
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".tcss", ".toml", ".gz", ".j2") or path.name == "py.typed":
                assert f"{prefix}/{path.relative_to(ROOT / folder)}" in shipped
