"""`costlab shapes`: parse, run the job, keep and print. Registered by the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from costlab.app.command import Form, cancel_on_signals, narrate, stop
from costlab.app.exit_codes import Exit

if TYPE_CHECKING:
    from costlab.probes.shapes_spec import ShapesResult, ShapesSpec

MODULE = "costlab.probes.shapes"


def shapes(
    shapes: Annotated[
        str,
        typer.Option(
            "--shapes", "-s", help="Seen shapes, batch x sequence: 4x128,4x96*3,8x128; or your sampler, file.py:fn"
        ),
    ],
    workload: Annotated[
        str, typer.Option("--workload", "-w", help="llama, gpt2, resnet50, or path/to/file.py:make")
    ] = "llama",
    size: Annotated[str, typer.Option("--size", help="Size of a built-in workload")] = "tiny",
    device: Annotated[str, typer.Option("--device", help="auto, cuda or cpu")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="fp32 or bf16 (parameters stay fp32)")] = "bf16",
    compile: Annotated[str, typer.Option("--compile", help="block or model")] = "block",
    steps: Annotated[int, typer.Option("--steps", help="Timed steps of each shape and path")] = 10,
    run_steps: Annotated[
        int, typer.Option("--run-steps", help="Steps of the whole run that compiles are spread over")
    ] = 100_000,
    samples: Annotated[int, typer.Option("--samples", help="Pairs drawn from the sampler at most")] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights and data")] = 0,
    format: Annotated[Form, typer.Option("--format", "-f", help="text, md or json")] = Form.text,
) -> None:
    """Run seen shapes static, dynamic and eager: cost, recompiles with their guard, and the buckets to pad to."""
    from costlab.app.shapes.report import render_shapes

    if steps < 1 or run_steps < 1 or samples < 1:
        stop("--steps, --run-steps and --samples must be above zero", Exit.USAGE)
    spec = _spec(shapes, workload, size, device, dtype, compile, samples, steps, seed)
    result = _run(spec)
    _keep(result)
    sys.stdout.write(render_shapes(result, format.value, run_steps))


def _spec(
    shapes: str, workload: str, size: str, device: str, dtype: str, compile: str, samples: int, steps: int, seed: int
) -> ShapesSpec:
    """The job's options; a mistake ends the command."""
    from costlab.app.shapes.parse import ShapeProblem, is_sampler, parse_shapes
    from costlab.app.text import plain
    from costlab.probes.shapes_spec import Shape, ShapesSpec
    from costlab.probes.spec import WORKLOAD_SIZES, RunSpec, SpecError, validate

    for name, value, choices in (("dtype", dtype, ("fp32", "bf16")), ("compile", compile, ("block", "model"))):
        if value not in choices:
            stop(f"--{name}: no '{value}'; choose from {', '.join(choices)}", Exit.USAGE)
    found: tuple[Shape, ...] = ()
    try:
        validate(RunSpec(workload=workload))
        if size not in WORKLOAD_SIZES.get(workload, (size,)):
            raise SpecError(f"{workload} has no size '{size}'; there are: {', '.join(WORKLOAD_SIZES[workload])}")
        found = () if is_sampler(shapes) else parse_shapes(shapes)
        if not found and not Path(file := shapes.rpartition(":")[0]).expanduser().is_file():
            raise ShapeProblem(f"no such file: {plain(file)}; give your sampler as path/to/file.py:function")
    except (SpecError, ShapeProblem) as error:
        stop(str(error), Exit.USAGE)
    return ShapesSpec(
        workload=workload,
        size=size,
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        compile=compile,  # type: ignore[arg-type]
        shapes=found,
        sampler="" if found else shapes,
        samples=samples,
        steps=steps,
        seed=seed,
    )


def _run(spec: ShapesSpec) -> ShapesResult:
    from costlab.app.topology.calibration import JobFailed, run_job
    from costlab.probes.launch import LaunchError
    from costlab.probes.shapes_spec import RESULT_FILE, ShapesResult
    from costlab.probes.spec import SpecError

    try:
        return run_job(
            MODULE, spec, RESULT_FILE, ShapesResult, narrate, ranks=1, device=spec.device, started=cancel_on_signals
        )
    except JobFailed as error:
        stop(f"shapes: {error}", Exit.CANCELLED if error.cancelled else Exit.RUN_FAILED)
    except LaunchError as error:
        stop(str(error), Exit.RUN_FAILED)
    except SpecError as error:
        stop(str(error), Exit.USAGE)


def _keep(result: ShapesResult) -> None:
    """`shapes/<date>-<workload>.json` in the store, and a line on stderr that says where."""
    import msgspec

    from costlab.app.store import home
    from costlab.probes.tables import write_bytes

    stamp = "".join(c for c in result.date[:19] if c.isdigit())
    name = "".join(c if c.isalnum() else "-" for c in Path(result.spec.workload).name)[:40]
    path = home() / "shapes" / f"{stamp}-{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, msgspec.json.format(msgspec.json.encode(result), indent=1))
    except OSError as error:
        typer.echo(f"costlab: the result could not be kept ({error.strerror})", err=True)
        return
    typer.echo(f"kept in {path}", err=True)
