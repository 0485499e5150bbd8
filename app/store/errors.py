"""The store's one error."""

from __future__ import annotations

from costlab.app.text import plain


class StoreError(Exception):
    """A run, sample or store that cannot be used; the message is one safe line and says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))
