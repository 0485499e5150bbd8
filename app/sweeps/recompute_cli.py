"""`costlab sweep recompute`: parsing only, light to import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costlab.app.command import cancel_on_signals, stop
from costlab.app.exit_codes import Exit
from costlab.app.whatif.cli import (
    FORMS,
    Commands,
    Force,
    MakeSpec,
    Output,
    check_writable,
    finish,
    terminal_width,
)

if TYPE_CHECKING:
    from costlab.probes.records import AnyEvent

Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", "-P", help="none, block, operator or budget:SHARE; repeatable; default: six of them"),
]
Rounds = Annotated[int, typer.Option("--rounds", help="Runs of each policy")]


def register(sweep: typer.Typer, run_command: Callable[..., None], make_spec: MakeSpec) -> None:
    """Add the command to the group; it takes every option of a run."""
    commands = Commands(run_command, make_spec)

    def recompute(
        context: typer.Context,
        policy: Policies = None,
        rounds: Rounds = 2,
        keep: Annotated[Path | None, typer.Option("--keep", help="Folder to keep the runs in")] = None,
        format: Annotated[str, typer.Option("--format", "-f", help="text, md or json")] = "text",
        output: Output = None,
        force: Force = False,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr")] = False,
    ) -> None:
        """Real runs under each policy of activation recomputation: time against peak memory, with the Pareto set."""
        from tempfile import TemporaryDirectory

        from costlab.app.sweeps.recompute import Sweep, default_policies, render
        from costlab.probes.spec import SpecError

        if format not in FORMS:
            stop(f"--format: choose from {', '.join(FORMS)}", Exit.USAGE)
        if not 1 <= rounds <= 20:
            stop(f"--rounds must be 1 to 20, got {rounds}", Exit.USAGE)
        check_writable(output, force)
        try:
            spec = commands.spec_of(context)
            work = Sweep(spec, policy or default_policies(spec), rounds)
        except SpecError as error:
            stop(str(error), Exit.USAGE)
        cancel_on_signals(work.cancel)
        with TemporaryDirectory(prefix="costlab-sweep-") as folder:
            found = work.run(keep or Path(folder), _silent if quiet else _say, _nothing)
        measured = any(p.step_ms is not None for p in found.points)
        code = Exit.CANCELLED if found.cancelled else Exit.OK if measured else Exit.RUN_FAILED
        finish(render(found, format, terminal_width()), output, force, code)

    sweep.command("recompute")(commands.with_run_options(recompute))


def _say(text: str) -> None:
    typer.echo(f"  {text}", err=True)


def _silent(_text: str) -> None:
    """Nothing is said."""


def _nothing(_event: AnyEvent) -> None:
    """Legs are told one line each; their own progress would drown that."""
