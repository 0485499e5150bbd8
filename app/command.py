"""What all commands share: how they end with an error, follow a job, and the forms of their output."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

import typer

from costlab.app.exit_codes import Exit
from costlab.app.text import plain

if TYPE_CHECKING:
    from costlab.probes.records import AnyEvent


class Form(StrEnum):
    """Output formats."""

    text = "text"
    md = "md"
    json = "json"


def stop(message: str, code: Exit) -> NoReturn:
    """One clear line on stderr, without control characters, then the documented exit code."""
    typer.echo(f"costlab: {plain(message)}", err=True)
    raise typer.Exit(int(code))


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def cancel_on_signals(cancel: Callable[[], None]) -> None:
    """Ctrl-C, SIGTERM and a lost terminal end a job's ranks in order."""
    for number in _ENDING:
        signal.signal(number, lambda *_: cancel())


@contextmanager
def cancelling(cancel: Callable[[], None]) -> Iterator[None]:
    """As `cancel_on_signals`, for the block alone: afterwards the signals do what they did before."""
    before = [(number, signal.signal(number, lambda *_: cancel())) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def interrupt_on_signals() -> None:
    """SIGTERM and a lost terminal raise KeyboardInterrupt as Ctrl-C does."""
    for number in _ENDING:
        signal.signal(number, signal.default_int_handler)


def narrate(event: AnyEvent) -> None:
    """One line on stderr for each step of a job and for what went wrong."""
    from costlab.probes.records import Log, Progress

    if isinstance(event, Progress) and event.done < event.total:
        typer.echo(f"  {event.done + 1}/{event.total}  {plain(event.detail)}", err=True)
    elif isinstance(event, Log) and event.level != "info":
        typer.echo(f"  {plain(event.text)}", err=True)
