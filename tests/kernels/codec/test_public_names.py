"""The package's public names exist, and importing the package imports no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from costlab.kernels import codec


def test_every_public_name_can_be_imported() -> None:
    for name in codec.__all__:
        assert getattr(codec, name).__name__ if callable(getattr(codec, name)) else getattr(codec, name)
    assert set(codec.__all__) == set(codec._MODULE_OF)
    with pytest.raises(AttributeError):
        codec.nothing  # noqa: B018


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, costlab.kernels.codec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
