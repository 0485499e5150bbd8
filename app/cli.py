"""The commands, thin: parse, call, print. stdout carries data, stderr narration. Heavy imports stay inside."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from costlab.app.codec.commands import codec
from costlab.app.command import cancel_on_signals, stop
from costlab.app.exit_codes import Exit
from costlab.app.export.cli import export as export_cli
from costlab.app.kernel_bench.commands import bench_kernels
from costlab.app.plan.cli import plan
from costlab.app.shapes.commands import shapes
from costlab.app.sweeps import recompute_cli
from costlab.app.sweeps.commands import sweep
from costlab.app.topology.commands import bench_collectives, topo
from costlab.app.tune import cli as tune_cli
from costlab.app.whatif import cli as whatif_cli

if TYPE_CHECKING:
    from costlab.app.analysis.views import RunReport
    from costlab.probes.spec import RunSpec

T = TypeVar("T")

app = typer.Typer(
    name="costlab",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure what a compiled, sharded PyTorch training step costs on your GPUs, and where it goes.",
    epilog="Exit codes: 0 ok, 1 a check failed, 2 usage, 3 run failed, 4 cancelled, 5 bad input.",
)


class Format(StrEnum):
    """Output formats of reports."""

    md = "md"
    text = "text"
    json = "json"


def version(show: bool) -> None:
    """Print the version and end."""
    if show:
        from importlib.metadata import version as installed

        typer.echo(f"costlab {installed('costlab')}")
        raise typer.Exit()


@app.callback()
def root(
    show_version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Measure what a training step costs."""


@app.command(name="run")
def run_command(
    context: typer.Context,
    workload: Annotated[
        str, typer.Option("--workload", "-w", help="llama, gpt2, resnet50, or path/to/file.py:make")
    ] = "llama",
    size: Annotated[str, typer.Option(help="Size of a built-in workload: tiny, small, medium, 1b, full")] = "tiny",
    preset: Annotated[str | None, typer.Option("--preset", "-p", help="smoke, small, 1b, resnet50, gpt2")] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Ranks on this host; 0: one per GPU, or 2 on CPU")] = 0,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu")] = "auto",
    parallel: Annotated[str, typer.Option(help="ddp, fsdp (FSDP2) or hsdp")] = "fsdp",
    shard_size: Annotated[int, typer.Option(help="HSDP: ranks per shard group; 0: half of them")] = 0,
    compile: Annotated[str, typer.Option(help="none, block or model")] = "block",
    compile_mode: Annotated[str, typer.Option(help="default, reduce-overhead, max-autotune-no-cudagraphs")] = "default",
    dynamic: Annotated[str, typer.Option(help="Symbolic shapes in torch.compile: auto, off or on")] = "auto",
    cudagraphs: Annotated[bool, typer.Option("--cudagraphs", help="Capture compiled regions in CUDA graphs")] = False,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16 (parameters stay fp32)")] = "bf16",
    autocast: Annotated[bool, typer.Option("--autocast", help="torch.autocast around the step in FSDP2 too")] = False,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Samples per rank; 0: the size's default")] = 0,
    seq: Annotated[int, typer.Option(help="Tokens per sample; 0: the size's default")] = 0,
    recompute: Annotated[str, typer.Option(help="Recomputation: none, block, operator or budget:SHARE")] = "none",
    fused: Annotated[bool, typer.Option("--fused", help="Put in fused Triton kernels where they fit")] = False,
    plan: Annotated[str, typer.Option("--plan", help="Put in the rewrites of a plan that `costlab tune` wrote")] = "",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd")] = "adamw",
    grad_compression: Annotated[
        str, typer.Option("--grad-compression", help="DDP's gradient hook: none, bf16, fp16 or powersgd")
    ] = "none",
    schedule: Annotated[
        str, typer.Option("--schedule", help="All-reduce: stock, auto, ring, chain, two-level, hybrid or symmetric")
    ] = "stock",
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches of a step")] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate, reached after 100 steps")] = 3e-4,
    steps: Annotated[int, typer.Option(help="Timed steps")] = 20,
    warmup: Annotated[int, typer.Option(help="Steps after compiling and before timing")] = 5,
    profile_steps: Annotated[int, typer.Option(help="Profiled steps; 0: none, and no shares")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and data")] = 0,
    checkpoint: Annotated[bool, typer.Option(help="Save and load checkpoints while steps run")] = True,
    checkpoint_codec: Annotated[
        str, typer.Option("--checkpoint-codec", help="How training saves: dcp, or costlab's engine: exact, fp8")
    ] = "dcp",
    keep_raw: Annotated[bool, typer.Option("--raw/--no-raw", help="Keep the traces the tables were made from")] = True,
    price: Annotated[float | None, typer.Option(help="Price per GPU-hour, USD; default: the price table")] = None,
    run_steps: Annotated[int, typer.Option(help="Steps of the whole training run, for its price")] = 100_000,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints, for their share")] = 500,
    checkpoint_steps: Annotated[int, typer.Option(help="Steps around each measured save")] = 8,
    checkpoint_budget: Annotated[float, typer.Option(help="Seconds for checkpoints; 0: keep to two minutes")] = 0.0,
    threads: Annotated[int, typer.Option(help="CPU threads per rank; 0: the cores shared out")] = 0,
    check_in: Annotated[str, typer.Option(help="Bind ranks to their GPU's NUMA node: off, report or bind")] = "report",
    gc: Annotated[str, typer.Option(help="Objects from before the steps: default, or freeze them")] = "default",
    silence_timeout: Annotated[float, typer.Option(help="Give up after this many seconds without progress")] = 600.0,
    collective_timeout: Annotated[float, typer.Option(help="Seconds a collective may take")] = 180.0,
    nnodes: Annotated[int, typer.Option(help="Hosts; start the same command on each")] = 1,
    node_rank: Annotated[int, typer.Option(help="This host's number")] = 0,
    rdzv_endpoint: Annotated[str, typer.Option(help="HOST:PORT of the first host")] = "",
    out: Annotated[Path | None, typer.Option(help="Run directory; default: a new one in the run store")] = None,
    what_if: whatif_cli.Items = "",
    factorial: whatif_cli.Factorial = False,
    legs: whatif_cli.Legs = None,
    budget: whatif_cli.Budget = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr")] = False,
) -> None:
    """Run a real workload on this machine, measure it, and print the run directory."""
    from costlab.probes.spec import SpecError

    values = dict(context.params)
    for name in ("preset", "out", "quiet", "price", "silence_timeout", "collective_timeout", "checkpoint_budget"):
        values.pop(name)
    values |= {
        "checkpoint_budget_s": checkpoint_budget,
        "price_per_gpu_hour": price,
        "silence_timeout_s": silence_timeout,
        "collective_timeout_s": collective_timeout,
    }
    if plan:
        values["plan"] = str(tune_cli.plan_file(plan))
    given = frozenset(k for k in values if _given(context, k))
    try:
        spec = make_spec(values, preset, given)
    except SpecError as error:
        stop(str(error), Exit.USAGE)
    if what_if:
        whatif_cli.run_what_if(context, spec)
    raise typer.Exit(int(execute(spec, out, quiet=quiet)))


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def make_spec(values: dict[str, Any], preset: str | None, given: frozenset[str] = frozenset()) -> RunSpec:
    """A validated spec from option values; a preset fills in what was not given. Raises SpecError."""
    import msgspec

    from costlab.probes.spec import RunSpec, SpecError, apply_preset, validate

    try:
        spec = msgspec.convert(values, RunSpec)
    except msgspec.ValidationError as error:
        raise SpecError(_option_message(str(error))) from error
    if preset is not None:
        spec = apply_preset(spec, preset, given)
    validate(spec)
    return spec


def _option_message(text: str) -> str:
    """msgspec's "Invalid enum value 'x' - at `$.dtype`", with the option's name and its choices."""
    import re
    import typing

    from costlab.probes.spec import RunSpec

    match = re.search(r"\$\.(\w+)", text)
    if match is None:
        return text
    choices = typing.get_args(typing.get_type_hints(RunSpec)[match[1]])
    problem = text.partition(" - ")[0]
    return f"--{match[1].replace('_', '-')}: {problem}" + (
        f"; choose from {', '.join(map(str, choices))}" if choices else ""
    )


def execute(spec: RunSpec, out: Path | None, *, quiet: bool = False) -> Exit:
    """Launch, narrate on stderr, print the run directory last on stdout."""
    from costlab.app.narrate import Narrator
    from costlab.app.store import new_run_directory
    from costlab.probes.launch import Launcher, LaunchError

    run_dir = out or _guard(lambda: new_run_directory(spec.workload, spec.size))
    launcher = Launcher(spec, run_dir)
    cancel_on_signals(launcher.cancel)
    narrator = Narrator(sys.stderr, ranks=launcher.ranks, quiet=quiet)
    try:
        manifest = launcher.run(narrator.tell)
    except LaunchError as error:
        stop(str(error), Exit.RUN_FAILED)
    finally:
        narrator.close()
    narrator.conclude(manifest)
    typer.echo(str(run_dir))
    codes = {"complete": Exit.OK, "cancelled": Exit.CANCELLED}
    return codes.get(manifest.status, Exit.RUN_FAILED)


@app.command()
def tui(
    runs: Annotated[list[str] | None, typer.Argument(help="Runs to open: path, id, unique prefix, or 'last'")] = None,
    sample: Annotated[str | None, typer.Option(help="Open a run recorded elsewhere; 'list' names them")] = None,
    theme: Annotated[str | None, typer.Option(help="Theme by name")] = None,
) -> None:
    """Open the terminal interface. Without a terminal, print the run's text report instead."""
    if sample == "list":
        from costlab.app.store import sample_names

        typer.echo("\n".join(sample_names()))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on stderr
        headless(runs or [], sample)
        return
    from costlab.app.guard import guarded

    paths = [_resolve(name) for name in runs or []]

    def interface() -> int:
        from costlab.app.tui.app import run_tui

        return run_tui(paths, sample=sample, theme=theme)

    raise typer.Exit(guarded(interface))


def headless(runs: list[str], sample: str | None) -> None:
    """The text report of each run given, or a sentence on how to get one."""
    from costlab.app.report import render_text

    if not runs and sample is None:
        stop(
            "no terminal to draw on (stdin, stdout or stderr is redirected); name a run to get its text report:"
            " costlab tui last, or costlab report last --format text",
            Exit.USAGE,
        )
    if sample is not None:
        typer.echo(render_text(_guard(lambda: _sample_report(sample))))
    for name in runs:
        typer.echo(render_text(load_report(name)))


def _sample_report(name: str) -> RunReport:
    from costlab.app.analysis.build import build_report
    from costlab.app.store import open_sample

    return build_report(open_sample(name))


def _resolve(name: str) -> Path:
    from costlab.app.store import open_run

    return _guard(lambda: open_run(name)).path


def load_report(name: str) -> RunReport:
    """Open a run and build its report, or end with one line and code 5."""
    from costlab.app.analysis.build import build_report
    from costlab.app.store import open_run

    return _guard(lambda: build_report(open_run(name)))


def _guard(work: Callable[[], T]) -> T:
    from costlab.app.store import StoreError

    try:
        return work()
    except StoreError as error:
        stop(str(error), Exit.BAD_INPUT)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Path, id, unique prefix, or 'last'")] = "last",
    format: Annotated[Format, typer.Option("--format", "-f", help="md, text or json")] = Format.md,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: stdout")] = None,
    targets: Annotated[Path | None, typer.Option("--targets", help="Fusion targets by layer class, TOML")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file")] = False,
) -> None:
    """Write a run's report as Markdown, text or JSON."""
    with judged_by(targets):
        text = _render(load_report(run), format)
    write_output(text, output, force=force)


def judged_by(path: Path | None) -> AbstractContextManager[None]:
    """Judge fusion inside by a user's targets, or end with one line and code 5."""
    if path is None:
        return nullcontext()
    from costlab.app.analysis.fusion_targets import TargetsError, read, using

    try:
        return using(read(path))
    except TargetsError as error:
        stop(str(error), Exit.BAD_INPUT)


def _render(view: RunReport, format: Format) -> str:
    from costlab.app.report import render_json, render_markdown, render_text

    if format is Format.json:
        return render_json(view).decode()
    return render_markdown(view) if format is Format.md else render_text(view)


def write_output(text: str, output: Path | None, *, force: bool) -> None:
    """Print, or write to a new file; an existing one is kept unless `force`."""
    if output is None:
        typer.echo(text)
        return
    try:
        with output.open("w" if force else "x", encoding="utf-8") as sink:
            sink.write(text if text.endswith("\n") else text + "\n")
    except FileExistsError:
        stop(f"{output} exists; add --force to overwrite it", Exit.USAGE)
    except OSError as error:
        stop(f"cannot write {output}: {error.strerror}", Exit.USAGE)
    typer.echo(f"wrote {output}", err=True)


@app.command()
def runs(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Only the ids, one a line")] = False,
) -> None:
    """List the stored runs, newest first."""
    from costlab.app.report.runs import runs_json, runs_text
    from costlab.app.store import list_runs

    summaries = list_runs()
    if ids:
        sys.stdout.writelines(f"{s.id}\n" for s in summaries)
    elif as_json:
        typer.echo(runs_json(summaries))
    elif summaries:
        typer.echo(runs_text(summaries, shutil.get_terminal_size((120, 24)).columns))
    else:
        typer.echo(
            "no runs yet; `costlab run --preset smoke` records one, `costlab tui --sample list` names samples", err=True
        )


@app.command()
def compare(
    base: Annotated[str, typer.Argument(help="Baseline run")],
    other: Annotated[str, typer.Argument(help="Run to compare with it")],
    format: Annotated[Format, typer.Option("--format", "-f", help="md, text or json")] = Format.text,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: stdout")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file")] = False,
) -> None:
    """Compare two runs: what moved, and by how much of the total."""
    from costlab.app.analysis.compare import compare as compare_reports
    from costlab.app.report.compare import render_comparison

    text = render_comparison(compare_reports(load_report(base), load_report(other)), format.value)
    write_output(text, output, force=force)


@app.command(name="import")
def import_command(
    paths: Annotated[list[Path], typer.Argument(help="Kineto/Chrome traces, a folder, or a tar of ranks")],
    out: Annotated[Path | None, typer.Option(help="Run directory; default: a new one in the run store")] = None,
) -> None:
    """Turn traces recorded elsewhere into a run that the TUI and reports open."""
    from costlab.app.importers import ImportProblem
    from costlab.app.importers.kineto import import_traces
    from costlab.app.store import new_run_directory

    try:
        run_dir = import_traces(paths, out or _guard(lambda: new_run_directory("imported")))
    except ImportProblem as error:
        stop(str(error), Exit.BAD_INPUT)
    typer.echo(str(run_dir))


@app.command()
def doctor() -> None:
    """Say what this machine has, what is missing, and what that means for a run."""
    from costlab.app.report.doctor import render_doctor
    from costlab.probes.doctor import doctor_lines

    typer.echo(render_doctor(doctor_lines()))


app.command()(topo)
app.command()(plan)
app.command()(codec)
app.command()(shapes)
whatif_cli.register(app, run_command, make_spec)
tune_cli.register(app, run_command, make_spec)
bench = typer.Typer(no_args_is_help=True, help="Measure parts of this machine by themselves.")
bench.command(name="collectives")(bench_collectives)
bench.command(name="kernels")(bench_kernels)
app.add_typer(bench, name="bench")
app.add_typer(export_cli, name="export")
recompute_cli.register(sweep, run_command, make_spec)
app.add_typer(sweep, name="sweep")


@bench.callback()
def bench_group() -> None:
    """Measure parts of this machine by themselves."""


def main() -> None:
    """Entry point of the `costlab` script."""
    app()
