"""Time in which the device has nothing to do: it waits for launches, for a host that waits for it, or for data."""

from __future__ import annotations

from costlab.app.analysis.views import Finding
from costlab.app.diagnosis.rule import Context
from costlab.app.figures import ms, share

LAUNCH_SHARE, SYNC_SHARE, DATA_SHARE = 0.03, 0.02, 0.02


def launch_bound(context: Context) -> list[Finding]:
    """The device waits for the host to launch kernels for at least 3 % of the step."""
    idle = context.parts.get("idle: launch", 0.0)
    if (context.share_of(idle) or 0.0) < LAUNCH_SHARE:
        return []
    action, proves = _fewer_launches(context)
    return [
        context.finding(
            "launch-bound",
            f"The device waits {ms(idle)} a step for kernel launches",
            [f"idle while the next kernel is being launched: {context.of_step(idle)}", _host(context)],
            action,
            saves_ms=idle,
            how="upper bound: all launch idle time of the step",
            proves=proves,
        )
    ]


def _fewer_launches(context: Context) -> tuple[str, str]:
    if not context.report.run.compile:
        return "Compile the model, or give each launch more work: a larger batch, fewer and larger operators.", ""
    if not context.compiled:
        return "Compile the blocks: fused kernels are fewer launches (--compile block).", "--compile block"
    if context.on_gpu and not context.option("cudagraphs"):
        return (
            'Replay the compiled graphs as CUDA graphs (--cudagraphs; in code torch.compile(mode="reduce-overhead")). '
            "Shapes must not change and inputs must stay at their addresses.",
            "--cudagraphs",
        )
    batch = int(context.option("batch", 0) or 0)
    proves = f"--batch {2 * batch}" if batch else ""
    return "Give each launch more work: a larger batch per rank, or fewer and larger blocks.", proves


def _host(context: Context) -> str:
    steps = context.report.steps
    if steps is None or steps.host_ms is None or not context.step_ms:
        return ""
    return f"the host had enqueued the step after {ms(steps.host_ms)}, {share(steps.host_ms / context.step_ms)} of it"


def host_sync(context: Context) -> list[Finding]:
    """The device is idle around a host that waited for it for at least 2 % of the step."""
    idle = context.parts.get("idle: sync", 0.0)
    if (context.share_of(idle) or 0.0) < SYNC_SHARE:
        return []
    return [
        context.finding(
            "host-sync",
            f"Synchronising with the host leaves the device idle for {ms(idle)} a step",
            [f"idle after the host waited for the device: {context.of_step(idle)}"],
            "Remove what waits for the device inside a step: .item(), .cpu(), print of a tensor, boolean tests on "
            "tensors, torch.cuda.synchronize, clipping that returns a Python number. Log every N-th step.",
            saves_ms=idle,
            how="upper bound: all idle time after a synchronisation",
        )
    ]


def data_loading(context: Context) -> list[Finding]:
    """The device waits for the next batch for at least 2 % of the step."""
    idle = context.parts.get("idle: data", 0.0)
    if (context.share_of(idle) or 0.0) < DATA_SHARE:
        return []
    copies = context.parts.get("host-device copies", 0.0)
    return [
        context.finding(
            "data-loading",
            f"The device waits {ms(idle)} a step for data",
            [
                f"idle while the next batch was being made ready: {context.of_step(idle)}",
                f"copies between host and device: {ms(copies)} a step" if copies else "",
            ],
            "Prepare batches ahead: DataLoader with more num_workers, prefetch_factor above 2 and pin_memory=True, "
            "and copy with non_blocking=True on a stream of its own.",
            saves_ms=idle,
            how="upper bound: all idle time while waiting for data",
        )
    ]
