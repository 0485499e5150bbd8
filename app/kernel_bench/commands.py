"""`costlab bench kernels`: parse, call, print. Registered by the command line."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import typer

from costlab.app.command import Form, interrupt_on_signals, stop
from costlab.app.exit_codes import Exit
from costlab.app.text import plain
from costlab.probes.kernel_spec import KERNELS, KernelSpec


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
        stop(f"no kernel '{unknown[0]}'; there are: {', '.join(KERNELS)}", Exit.USAGE)
    if not 5 <= samples <= 10_000:
        stop("--samples must be 5 to 10000", Exit.USAGE)
    spec = KernelSpec(kernels=chosen, samples=samples, inductor=not no_inductor)
    interrupt_on_signals()
    try:
        result = run(spec, lambda name: typer.echo(f"costlab: {plain(name)}", err=True))
    except BenchFailed as error:
        stop(f"the benchmark failed: {error}", Exit.RUN_FAILED)
    except KeyboardInterrupt:
        stop("cancelled", Exit.CANCELLED)
    if result.unavailable:
        stop(f"nothing measured: {result.unavailable}", Exit.RUN_FAILED)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    sys.stdout.write(render(result, format.value, width))
