"""`costlab bench kernels`: parse, call, print. Registered by the command line."""

from __future__ import annotations

import shutil
import sys
from enum import StrEnum
from typing import Annotated, NoReturn

import typer

from costlab.app.exit_codes import Exit
from costlab.probes.kernel_spec import KERNELS, KernelSpec


class Form(StrEnum):
    """Output formats."""

    text = "text"
    md = "md"
    json = "json"


def bench_kernels(
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", "-k", help=f"{', '.join(KERNELS)}; repeatable; default: all")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Calls timed for each figure")] = 50,
    no_inductor: Annotated[bool, typer.Option("--no-inductor", help="Leave Inductor (and its compiling) out")] = False,
    format: Annotated[Form, typer.Option("--format", "-f", help="text, md or json")] = Form.text,
) -> None:
    """Time each fused kernel against eager, Inductor and the copy or matrix ceiling of this machine's GPU."""
    from costlab.app.kernel_bench.process import BenchFailed, run
    from costlab.app.kernel_bench.render import render

    chosen = tuple(kernel or KERNELS)
    unknown = [name for name in chosen if name not in KERNELS]
    if unknown:
        _stop(f"no kernel '{unknown[0]}'; there are: {', '.join(KERNELS)}", Exit.USAGE)
    if not 5 <= samples <= 10_000:
        _stop("--samples must be 5 to 10000", Exit.USAGE)
    spec = KernelSpec(kernels=chosen, samples=samples, inductor=not no_inductor)
    try:
        result = run(spec, lambda name: typer.echo(f"costlab: {name}", err=True))
    except BenchFailed as error:
        _stop(f"the benchmark failed: {error}", Exit.RUN_FAILED)
    except KeyboardInterrupt:
        _stop("cancelled", Exit.CANCELLED)
    if result.unavailable:
        _stop(f"nothing measured: {result.unavailable}", Exit.RUN_FAILED)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    sys.stdout.write(render(result, format.value, width))


def _stop(message: str, code: Exit) -> NoReturn:
    from costlab.app.text import plain

    typer.echo(f"costlab: {plain(message)}", err=True)
    raise typer.Exit(int(code))
