"""How every command ends with an error: one line, no control characters, whatever the name it was given holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from costlab.app.cli import app
from costlab.app.exit_codes import Exit

HOSTILE = "no\x1b[31msuch\nfile\x07"


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", HOSTILE],
        ["compare", HOSTILE, HOSTILE],
        ["import", HOSTILE],
        ["topo", "--import", HOSTILE],
        ["plan", "--topology", HOSTILE, "--size", "1GiB", "--ranks", "8"],
        ["plan", "--run", HOSTILE, "--size", "1GiB", "--ranks", "8"],
        ["export", "otlp", HOSTILE],
        ["export", "perfetto", HOSTILE, "-o", "out.json"],
        ["codec", HOSTILE],
        ["tune", HOSTILE],
    ],
    ids=lambda arguments: "-".join(a for a in arguments[:2] if a.isascii() and a.isprintable()),
)
def test_a_hostile_name_is_one_plain_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSTLAB_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in {Exit.USAGE, Exit.BAD_INPUT}, result.output
    assert result.stderr.startswith("costlab: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.rstrip("\n").isprintable()


# The same option has the same short form in every command that has it.
SHORT = {"--format": "-f", "--output": "-o", "--ranks": "-n", "--workload": "-w", "--preset": "-p", "--what-if": "-W"}


def options(command: click.Command, path: str = "costlab") -> Iterator[tuple[str, list[str]]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, f"{path} {name}")
    for parameter in command.params:
        yield path, [*parameter.opts, *parameter.secondary_opts]


def test_options_have_their_short_form_everywhere() -> None:
    found = list(options(typer.main.get_command(app)))
    assert len({path for path, _ in found}) > 15
    lacking = [
        (path, long) for path, names in found for long, short in SHORT.items() if long in names and short not in names
    ]
    assert not lacking
