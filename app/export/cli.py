"""`costlab export otlp` and `costlab export perfetto`: parse, call, say what was written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from costlab.app.command import stop
from costlab.app.exit_codes import Exit

if TYPE_CHECKING:
    from costlab.app.store import Run

T = TypeVar("T")
export = typer.Typer(no_args_is_help=True, help="A run for other tools: OTLP span trees, Perfetto timelines.")

RunName = Annotated[str, typer.Argument(help="Path, id, unique prefix, or 'last'")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file")]


@export.command()
def otlp(
    run: RunName = "last",
    endpoint: Annotated[str, typer.Option("--endpoint", help="Collector to send to, as http://HOST:4318")] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; '-' for stdout")] = None,
    force: Force = False,
) -> None:
    """Send a run's span trees to an OpenTelemetry collector, or write them as OTLP JSON."""
    from costlab.app.export.otlp import OtlpError, document, send

    if bool(endpoint) == (output is not None):
        stop("give --endpoint URL to send the spans, or --output FILE to write them", Exit.USAGE)
    if output is not None:
        _write(_made(run, document), output, force=force)
        return
    try:
        count = _made(run, lambda opened: send(opened, endpoint))
    except OtlpError as error:
        stop(str(error), Exit.RUN_FAILED)
    typer.echo(f"sent {count:,} spans", err=True)


@export.command()
def perfetto(
    run: RunName = "last",
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; '-' for stdout")] = Path("-"),
    force: Force = False,
) -> None:
    """Write a run's span trees as a Chrome trace for ui.perfetto.dev, with fusion status as tracks."""
    from costlab.app.export.perfetto import document

    _write(_made(run, document), output, force=force)


def _made(name: str, make: Callable[[Run], T]) -> T:
    from costlab.app.store import StoreError, open_run

    try:
        return make(open_run(name))
    except StoreError as error:
        stop(str(error), Exit.BAD_INPUT)


def _write(data: bytes, output: Path, *, force: bool) -> None:
    """Whole or not at all."""
    from costlab.probes.tables import write_bytes

    if str(output) == "-":
        typer.echo(_bare(data.decode()))
        return
    if output.is_dir():
        stop(f"{output} is a folder; name a file in it", Exit.USAGE)
    if output.exists() and not force:
        stop(f"{output} exists; add --force to overwrite it", Exit.USAGE)
    try:
        write_bytes(output, data)
    except OSError as error:
        stop(f"cannot write {output}: {error.strerror}", Exit.USAGE)
    typer.echo(f"wrote {output}", err=True)


def _bare(text: str) -> str:
    """JSON that no terminal takes for commands: DEL and the C1 controls as escapes, the C0 ones are already."""
    return re.sub(r"[\x7f-\x9f]", lambda m: f"\\u{ord(m[0]):04x}", text)
