"""`costlab codec`: parse, call, print. Registered by the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from costlab.app.command import interrupt_on_signals, stop
from costlab.app.exit_codes import Exit
from costlab.app.whatif.cli import FORMS, Force, Output, check_writable, finish, terminal_width


def codec(
    file: Annotated[
        Path | None,
        typer.Argument(help="safetensors file, costlab checkpoint, DCP folder, or torch file of plain tensors"),
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Built-in model trained here: llama, gpt2:small")] = "",
    steps: Annotated[int, typer.Option("--steps", help="With --model: training steps before measuring")] = 20,
    device: Annotated[str, typer.Option("--device", help="auto, cuda or cpu")] = "auto",
    limit: Annotated[
        float, typer.Option("--limit", help="MiB of each class of tensors; 0: 2 on CPU, 256 on GPU")
    ] = 0.0,
    timing: Annotated[bool, typer.Option("--timing/--no-timing", help="Measure encode and decode speed")] = True,
    format: Annotated[str, typer.Option("--format", "-f", help="text, md or json")] = "text",
    output: Output = None,
    force: Force = False,
) -> None:
    """What each checkpoint codec does to given tensors: bits a value, error, first resumed update, speed."""
    from costlab.app.codec.render import render
    from costlab.app.codec.work import CodecProblem, measure
    from costlab.probes.codec_spec import CodecRequest, check
    from costlab.probes.spec import SpecError

    if format not in FORMS:
        stop(f"--format: choose from {', '.join(FORMS)}", Exit.USAGE)
    if device not in ("auto", "cuda", "cpu"):
        stop(f"--device: choose from auto, cuda, cpu, not '{device}'", Exit.USAGE)
    path = str(file.expanduser().absolute()) if file is not None else ""
    request = CodecRequest(path=path, model=model, steps=steps, device=device, limit_mb=limit, timing=timing)
    check_writable(output, force)
    interrupt_on_signals()
    try:
        check(request)
        result = measure(request)
    except SpecError as error:
        stop(str(error), Exit.USAGE)
    except CodecProblem as error:
        stop(str(error), Exit.BAD_INPUT if error.bad_input else Exit.RUN_FAILED)
    except KeyboardInterrupt:
        stop("cancelled", Exit.CANCELLED)
    finish(render(result, format, terminal_width()), output, force, Exit.OK)
