"""No price table of the user's in these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_price_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The store's root is an empty folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSTLAB_HOME", str(home))
        yield home
