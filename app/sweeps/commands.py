"""`costlab sweep ...`: parse, call, print. Registered by the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from costlab.app.command import Form, cancel_on_signals, narrate, stop
from costlab.app.exit_codes import Exit
from costlab.probes.bucket_spec import DTYPES

if TYPE_CHECKING:
    from costlab.probes.bucket_spec import BucketResult, BucketSpec

sweep = typer.Typer(no_args_is_help=True, help="Measure one choice of a training step over its values.")


@sweep.callback()
def sweep_group() -> None:
    """Measure one choice of a training step over its values, with a recommendation."""


@sweep.command(name="buckets")
def buckets(
    gradients: Annotated[str, typer.Option("--gradients", "-g", help="How many: 16M, 124M, 1B")] = "16M",
    bucket: Annotated[
        list[str] | None, typer.Option("--bucket", "-b", help="Bucket in MiB, or 'tensor'; repeatable")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)}; repeatable")] = None,
    every: Annotated[
        list[int] | None, typer.Option("--every", help="Micro-batches to one reduction; repeatable")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="For one case, over three rounds")] = 1.0,
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Ranks; 0: one per GPU, or 2 on CPU")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cuda or cpu")] = "auto",
    last: Annotated[bool, typer.Option("--last", help="Show the last stored sweep, measure nothing")] = False,
    format: Annotated[Form, typer.Option("--format", "-f", help="text, md or json")] = Form.text,
) -> None:
    """Gradient layouts with real ranks: bucket size, dtype, contiguity and frequency against achieved bandwidth."""
    from costlab.app.store import home
    from costlab.app.sweeps.buckets import last_kept, render_buckets

    if last:
        found = last_kept(home())
        if found is None:
            stop("no sweep of buckets is stored: leave --last out to measure one", Exit.BAD_INPUT)
    else:
        found = _measure(_bucket_spec(gradients, bucket, dtype, every, seconds), ranks, device)
    sys.stdout.write(render_buckets(found, format.value))


def _bucket_spec(
    gradients: str, bucket: list[str] | None, dtype: list[str] | None, every: list[int] | None, seconds: float
) -> BucketSpec:
    """The options as a spec; ends the command where they make no sense."""
    from costlab.probes.bucket_spec import BucketSpec

    unit = {"K": 10**3, "M": 10**6, "B": 10**9}.get(gradients[-1:].upper(), 1)
    digits = gradients[:-1] if unit > 1 else gradients
    elements = int(digits) * unit if digits.isascii() and digits.isdigit() and len(digits) <= 12 else 0
    if not 1000 <= elements <= 10**11:
        stop(f"--gradients '{gradients[:40]}': give a number from 1K to 100B, as 16M", Exit.USAGE)
    sizes = [_mib(text) for text in bucket or []]
    unknown = [d for d in dtype or [] if d not in DTYPES]
    if unknown:
        stop(f"no dtype '{unknown[0]}'; there are: {', '.join(DTYPES)}", Exit.USAGE)
    if any(not 1 <= n <= 1024 for n in every or []):
        stop("--every must be between 1 and 1024", Exit.USAGE)
    if not 0.05 <= seconds <= 600:
        stop(f"--seconds must be between 0.05 and 600, got {seconds:g}", Exit.USAGE)
    default = BucketSpec()
    return BucketSpec(
        elements=elements,
        buckets=tuple(dict.fromkeys(sizes)) or default.buckets,
        dtypes=tuple(dict.fromkeys(dtype or default.dtypes)),
        every=tuple(dict.fromkeys(every or default.every)),
        seconds=seconds,
    )


def _mib(text: str) -> int:
    """Bytes of "25" or "0.5" MiB; 0 for "tensor"."""
    if text == "tensor":
        return 0
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value <= 1 << 20:
        stop(f"--bucket '{text}': give MiB above 0.001, or 'tensor'", Exit.USAGE)
    return int(value * (1 << 20))


def _measure(spec: BucketSpec, ranks: int, device: str) -> BucketResult:
    from costlab.app.store import home
    from costlab.app.sweeps.buckets import keep, run_buckets
    from costlab.app.topology.calibration import JobFailed
    from costlab.probes.launch import LaunchError
    from costlab.probes.spec import SpecError

    if ranks == 1:
        stop("one rank reduces nothing: --ranks must be 2 or more, or 0 for one per GPU", Exit.USAGE)
    try:
        found = run_buckets(spec, narrate, ranks=ranks, device=device, started=cancel_on_signals)
    except JobFailed as error:
        stop(str(error), Exit.CANCELLED if error.cancelled else Exit.RUN_FAILED)
    except LaunchError as error:
        stop(str(error), Exit.RUN_FAILED)
    except SpecError as error:
        stop(str(error), Exit.USAGE)
    try:
        keep(found, home())
    except OSError as error:
        typer.echo(f"costlab: the sweep could not be kept ({error.strerror})", err=True)
    return found
