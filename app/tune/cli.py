"""The command `tune`: parsing only, light to import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costlab.app.command import cancelling, stop
from costlab.app.exit_codes import Exit
from costlab.app.whatif.cli import FORMS, Commands, finish, terminal_width

if TYPE_CHECKING:
    from costlab.app.whatif.cli import MakeSpec

RunArgument = Annotated[
    str | None, typer.Argument(help="Run to start from: path, id, prefix or 'last'; default: record one now")
]
PolicyOption = Annotated[str, typer.Option("--policy", help="Which candidates to try: roofline or seed")]
PlanOut = Annotated[Path, typer.Option("--out", help="Plan file to write; one that is there is replaced")]
Legs = Annotated[int, typer.Option("--legs", help="Legs of each arm, at least 2; 0: measure nothing")]
Budget = Annotated[float | None, typer.Option("--budget", help="Seconds for the legs; stops once all is decided")]
Together = Annotated[bool, typer.Option("--together", help="Measure all candidates as one change, not one by one")]
L2 = Annotated[str, typer.Option("--l2", help="L2 hit rates: auto, ncu or estimate")]
L2_WAYS, POLICIES = ("auto", "ncu", "estimate"), ("roofline", "seed")


def plan_file(path: str) -> Path:
    """The absolute path of a plan that can be read; else one line and exit code 5."""
    from costlab.kernels.fused.plan import PlanError, read

    try:
        read(path)
    except PlanError as error:
        stop(str(error), Exit.BAD_INPUT)
    return Path(path).expanduser().absolute()


def register(app: typer.Typer, run_command: Callable[..., None], make_spec: MakeSpec) -> None:
    """Add `tune` to `app`; it takes every option of a run."""
    commands = Commands(run_command, make_spec)

    def tune(
        context: typer.Context,
        run: RunArgument = None,
        policy: PolicyOption = "roofline",
        out: PlanOut = Path("fusion-plan.json"),
        legs: Legs = 3,
        budget: Budget = None,
        together: Together = False,
        l2: L2 = "auto",
        format: Annotated[str, typer.Option("--format", "-f", help="text, md or json")] = "text",
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr")] = False,
    ) -> None:
        """Find what fused kernels would save in a training step, try it, and write what won to a plan file."""
        from costlab.app.store import StoreError
        from costlab.app.tune.flow import TuneError, Tuning
        from costlab.app.tune.render import render
        from costlab.kernels.fused.plan import PlanError
        from costlab.probes.spec import SpecError

        _check(policy, l2, format, legs)
        try:
            tuning = Tuning(
                spec=None if run else commands.spec_of(context),
                run=run,
                policy=policy,  # type: ignore[arg-type]
                legs=legs,
                budget_s=budget,
                together=together,
                l2=l2,
                tell=_silent if quiet else _narrate,
            )
            with cancelling(tuning.cancel):
                result = tuning.run_all(out)
        except SpecError as error:
            stop(str(error), Exit.USAGE)
        except StoreError as error:
            stop(str(error), Exit.BAD_INPUT)
        except (TuneError, PlanError) as error:
            stop(str(error), Exit.CANCELLED if tuning.cancelled else Exit.RUN_FAILED)
        finish(render(result, format, terminal_width()), None, False, Exit.CANCELLED if tuning.cancelled else Exit.OK)

    app.command("tune")(commands.with_run_options(tune))


def _check(policy: str, l2: str, format: str, legs: int) -> None:
    for option, given, known in (("policy", policy, POLICIES), ("l2", l2, L2_WAYS), ("format", format, FORMS)):
        if given not in known:
            stop(f"--{option}: '{given}' is none of {', '.join(known)}", Exit.USAGE)
    if legs < 0 or legs == 1:
        stop(f"--legs must be 0 or at least 2, got {legs}: one leg says nothing of the noise", Exit.USAGE)


def _narrate(text: str) -> None:
    from costlab.app.text import plain

    print(plain(text), file=sys.stderr, flush=True)


def _silent(_text: str) -> None:
    return
