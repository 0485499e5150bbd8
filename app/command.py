"""What all commands share: how they end with an error, and the forms of their output."""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn

import typer

from costlab.app.exit_codes import Exit
from costlab.app.text import plain


class Form(StrEnum):
    """Output formats."""

    text = "text"
    md = "md"
    json = "json"


def stop(message: str, code: Exit) -> NoReturn:
    """One clear line on stderr, without control characters, then the documented exit code."""
    typer.echo(f"costlab: {plain(message)}", err=True)
    raise typer.Exit(int(code))
