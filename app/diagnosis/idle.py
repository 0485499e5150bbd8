"""Time in which the device has nothing to do: it waits for launches, for a host that waits for it or collects garbage,
or for data."""

from __future__ import annotations

from costlab.app.analysis.views import Finding
from costlab.app.diagnosis.rule import Context, severity_of
from costlab.app.figures import ms, share

LAUNCH_SHARE, SYNC_SHARE, DATA_SHARE, COLLECTOR_SHARE = 0.03, 0.02, 0.02, 0.01


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


def garbage_collection(context: Context) -> list[Finding]:
    """Steps with collections lost at least 1 % of the step, spread over all timed steps."""
    steps = context.report.steps
    view = steps.collector if steps else None
    if steps is None or view is None or (context.share_of(view.lost_ms) or 0.0) < COLLECTOR_SHARE:
        return []
    action, proves = _fewer_collections(context)
    at_most = "at most " if view.bound else ""
    return [
        context.finding(
            "garbage-collection",
            f"Python's garbage collector costs the steps {at_most}{ms(view.lost_ms)} on average",
            [
                f"it held {view.paused} of {len(steps.series_ms)} timed steps, longest step {view.step} on rank "
                f"{view.rank}: {ms(view.longest_ms)}",
                f"{_compared(view.bound)}, spread over all: {context.of_step(view.lost_ms)}",
                "seen in one step only: --steps 200 tells how often it comes" if view.paused == 1 else "",
            ],
            action,
            severity="low" if view.paused == 1 else severity_of(context.share_of(view.lost_ms)),
            source="measured",
            proves=proves,
        )
    ]


def _compared(bound: bool) -> str:
    return "at most, if the device waits for the host" if bound else "these took longer than the others by"


def _fewer_collections(context: Context) -> tuple[str, str]:
    if context.option("gc") == "freeze":
        return (
            "What was there before the steps is left out already: look for what the steps themselves keep, such as "
            "losses with their graphs, or for reference cycles (gc.set_debug(gc.DEBUG_STATS)).",
            "",
        )
    steps = context.report.steps
    called = steps is not None and steps.collector is not None and 2 * steps.collector.paused > len(steps.series_ms)
    return (
        ("Nearly every step collects: if the code of a step calls gc.collect(), leave that out. " if called else "")
        + "Call gc.collect() and gc.freeze() after the first steps: later collections then pass over the model and "
        "what was compiled. With many ranks also gc.disable(), and gc.collect(1) every N-th step on all of them at "
        "once, or they wait for one another in turn."
        + ("" if called else " The median step hides rare ones: compare garbage collection per step."),
        "--gc freeze",
    )
