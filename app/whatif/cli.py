"""Commands whatif, static-vs-dynamic, check and predictions: parsing only, light to import."""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costlab.app.command import stop
from costlab.app.exit_codes import Exit

if TYPE_CHECKING:
    from costlab.app.whatif.commands import Answer
    from costlab.app.whatif.spec import WhatIfSpec
    from costlab.probes.spec import RunSpec

MakeSpec = Callable[[dict[str, Any], str | None, frozenset[str]], "RunSpec"]
Items = Annotated[str, typer.Option("--what-if", "-W", help="Toggles or KEY=VALUE, by commas; a+b is one variant")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; all of them are one variant")]
Factorial = Annotated[bool, typer.Option("--factorial", help="All combinations, main effects and interactions")]
Legs = Annotated[int | None, typer.Option(help="Legs of each arm; default 4, or at most 12 with --budget")]
Budget = Annotated[float | None, typer.Option(help="Seconds; stops as soon as every interval is decided")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before")]
Form = Annotated[str, typer.Option("--format", "-f", help="text, md or json")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: stdout")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file")]
Graphs = Annotated[bool, typer.Option("--with-cudagraphs", help="Also compiled FSDP2 with CUDA graphs")]

FORMS = ("text", "md", "json")
_SKIPPED = frozenset(("out", "quiet", "nnodes", "node_rank", "rdzv_endpoint", "keep_raw"))
_OF_RUN = frozenset(("what_if", "factorial", "legs", "budget"))  # which `run` may have for itself


class Commands:
    """The commands, with what they need of the command line they are added to."""

    def __init__(self, run_command: Callable[..., None], make_spec: MakeSpec) -> None:
        self.make_spec = make_spec
        self.run_parameters = inspect.signature(run_command).parameters
        self.run_hints = typing.get_type_hints(run_command, include_extras=True)

    def spec_of(self, context: typer.Context) -> RunSpec:
        """The run's options of a command line; raises SpecError."""
        import msgspec

        from costlab.probes.spec import RunSpec

        known = {f.name for f in msgspec.structs.fields(RunSpec)}
        named = {k: field_name(k, known) for k in context.params}
        values = {named[k]: v for k, v in context.params.items() if named[k] in known and k != "preset"}
        given = frozenset(named[k] for k in context.params if _given(context, k))
        return self.make_spec(values, context.params.get("preset"), given)

    def with_run_options(self, function: Callable[..., None]) -> Callable[..., None]:
        """`function(context, **options)` with the options of `run` before its own."""
        own = dict(inspect.signature(function).parameters)
        hints = typing.get_type_hints(function, include_extras=True)

        def command(**options: Any) -> None:
            function(options["context"], **{k: v for k, v in options.items() if k in own and k != "context"})

        shared = {k: p for k, p in self.run_parameters.items() if k not in own and k not in _SKIPPED | _OF_RUN}
        merged = [own["context"], *shared.values(), *(p for k, p in own.items() if k != "context")]
        annotations = {k: (hints | self.run_hints)[k] if k in shared else hints[k] for k in (*shared, *own)}
        keyword = [p.replace(kind=p.KEYWORD_ONLY, annotation=annotations[p.name]) for p in merged]
        command.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        command.__annotations__ = annotations
        command.__doc__ = function.__doc__
        return command


def register(app: typer.Typer, run_command: Callable[..., None], make_spec: MakeSpec) -> None:
    """Add the commands to `app`; whatif and static-vs-dynamic take every option that `run_command` takes."""
    commands = Commands(run_command, make_spec)

    def whatif(
        context: typer.Context,
        what_if: Items = "",
        set_: Settings = None,
        factorial: Factorial = False,
        legs: Legs = None,
        budget: Budget = None,
        fresh: Fresh = False,
        format: Form = "text",
        output: Output = None,
        force: Force = False,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr")] = False,
    ) -> None:
        """Re-run a workload with options changed, alternating with the baseline, and say what the change is worth."""
        from costlab.app.whatif.commands import ask

        def make() -> WhatIfSpec:
            return ask(
                commands.spec_of(context),
                what_if.split(","),
                set_ or (),
                factorial=factorial,
                legs=legs,
                budget_s=budget,
                checkpoint=wants_checkpoints(context),
            )

        found = answered(make, format, fresh=fresh, quiet=quiet)
        finish(rendered(found, format), output, force, found.exit)

    def static_vs_dynamic(
        context: typer.Context,
        with_cudagraphs: Graphs = False,
        legs: Annotated[int, typer.Option(help="Legs of each arm")] = 3,
        fresh: Fresh = False,
        format: Form = "text",
        output: Output = None,
        force: Force = False,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr")] = False,
    ) -> None:
        """Measure the same model as eager DDP, eager FSDP2 and compiled FSDP2, side by side."""
        from costlab.app.report.whatif import render_static_dynamic
        from costlab.app.whatif.static_dynamic import static_dynamic, static_dynamic_spec

        def make() -> WhatIfSpec:
            return static_dynamic_spec(commands.spec_of(context), legs=legs, cudagraphs=with_cudagraphs)

        found = answered(make, format, fresh=fresh, quiet=quiet)
        text = render_static_dynamic(static_dynamic(found.result), format, terminal_width())
        finish(text, output, force, found.exit)

    app.command("whatif")(commands.with_run_options(whatif))
    app.command("static-vs-dynamic")(commands.with_run_options(static_vs_dynamic))
    app.command("check")(check_command)
    app.command("predictions")(predictions_command)


def field_name(option: str, known: set[str]) -> str:
    """The spec's field of an option: seconds have their unit in the field's name only, and so has the price."""
    unit = {"price": "price_per_gpu_hour"}.get(option, f"{option}_s")
    return unit if option not in known and unit in known else option


def wants_checkpoints(context: typer.Context) -> bool:
    """Whether checkpoints were asked for by name: `run` saves them by default, a what-if does not."""
    return bool(context.params.get("checkpoint")) and _given(context, "checkpoint")


def run_what_if(context: typer.Context, spec: RunSpec) -> typing.NoReturn:
    """`costlab run ... --what-if`: the same as `costlab whatif` with the run's options; ends the command."""
    from costlab.app.whatif.commands import ask

    options = context.params

    def make() -> WhatIfSpec:
        return ask(
            spec,
            str(options["what_if"]).split(","),
            factorial=bool(options["factorial"]),
            legs=options["legs"],
            budget_s=options["budget"],
            checkpoint=wants_checkpoints(context),
        )

    found = answered(make, "text", fresh=False, quiet=bool(options["quiet"]))
    finish(rendered(found, "text"), None, False, found.exit)


def check_command(
    base: Annotated[str, typer.Argument(help="Baseline run")],
    run: Annotated[str, typer.Argument(help="Run to check against it")],
    max_step_regression: Annotated[str, typer.Option(help="Allowed growth of the step time: 5% or 0.05")] = "5%",
    max_memory_regression: Annotated[str | None, typer.Option(help="Allowed growth of the peak memory")] = None,
    max_traffic_regression: Annotated[str | None, typer.Option(help="Allowed growth of the communicated bytes")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text on stdout")] = False,
) -> None:
    """Fail when a run is worse than a baseline. Exit codes: 0 within the limits, 1 not, 5 not comparable."""
    from costlab.app.analysis.build import build_report
    from costlab.app.store import StoreError, open_run
    from costlab.app.whatif import check as gate
    from costlab.probes.spec import SpecError

    try:
        limits = gate.Limits(
            step=gate.parse_share(max_step_regression),
            memory=None if max_memory_regression is None else gate.parse_share(max_memory_regression),
            traffic=None if max_traffic_regression is None else gate.parse_share(max_traffic_regression),
        )
        result = gate.check(build_report(open_run(base)), build_report(open_run(run)), limits)
    except SpecError as error:
        stop(str(error), Exit.USAGE)
    except StoreError as error:
        stop(str(error), Exit.BAD_INPUT)
    if junit is not None:
        write(gate.to_junit(result), junit, force=True)
    typer.echo(gate.to_json(result) if as_json else gate.to_text(result), nl=False)
    codes = {"failed": gate.REGRESSION, "error": int(Exit.BAD_INPUT)}
    raise typer.Exit(codes.get(result.outcome, 0))


def predictions_command() -> None:
    """Say how good the predictions of earlier what-ifs have been, toggle by toggle."""
    from costlab.app.report.whatif import render_accuracy
    from costlab.app.whatif.store import accuracy

    typer.echo(render_accuracy(accuracy()), nl=False)


def answered(make: Callable[[], WhatIfSpec], format: str, *, fresh: bool, quiet: bool) -> Answer:
    """Build the question and answer it, or end with one line and the documented code."""
    from costlab.app.store import StoreError
    from costlab.app.whatif.commands import answer
    from costlab.probes.spec import SpecError

    try:
        if format not in FORMS:
            raise SpecError(f"--format: choose from {', '.join(FORMS)}")
        return answer(make(), fresh=fresh, quiet=quiet)
    except SpecError as error:
        stop(str(error), Exit.USAGE)
    except StoreError as error:
        stop(str(error), Exit.BAD_INPUT)


def rendered(found: Answer, format: str) -> str:
    """The result in one of FORMS."""
    from costlab.app.report.whatif import render_whatif

    return render_whatif(found.result, format, terminal_width())


def terminal_width() -> int:
    """Columns of the terminal, 100 where there is none."""
    import shutil

    return shutil.get_terminal_size((100, 24)).columns


def finish(text: str, output: Path | None, force: bool, code: Exit) -> typing.NoReturn:
    """Print or write, then end with `code`."""
    if output is None:
        typer.echo(text, nl=False)
    else:
        write(text, output, force=force)
        typer.echo(f"wrote {output}", err=True)
    raise typer.Exit(int(code))


def check_writable(output: Path | None, force: bool) -> None:
    """Stop before the work, not after it, where `write` could not write."""
    if output is None:
        return
    try:
        folder = output.absolute().parent
        if output.is_dir() or not folder.is_dir():
            stop(f"cannot write {output}: {'it is a folder' if output.is_dir() else 'no such folder'}", Exit.USAGE)
        if output.exists() and not force:
            stop(f"{output} exists; add --force to overwrite it", Exit.USAGE)
    except OSError as error:
        stop(f"cannot write {output}: {error.strerror}", Exit.USAGE)
    if not os.access(output if output.exists() else folder, os.W_OK):
        stop(f"cannot write {output}: permission denied", Exit.USAGE)


def write(text: str, path: Path, *, force: bool) -> None:
    """Write a file; an existing one is kept unless `force`."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as sink:
            sink.write(text)
    except FileExistsError:
        stop(f"{path} exists; add --force to overwrite it", Exit.USAGE)
    except OSError as error:
        stop(f"cannot write {path}: {error.strerror}", Exit.USAGE)


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
