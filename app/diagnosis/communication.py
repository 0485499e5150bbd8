"""Communication that compute does not hide, and ranks that arrive late."""

from __future__ import annotations

from costlab.app.analysis.frames import largest
from costlab.app.analysis.views import CollectivesView, Finding
from costlab.app.analysis.waterfall import COMMUNICATION
from costlab.app.diagnosis.memory import larger_batch
from costlab.app.diagnosis.rule import Context
from costlab.app.figures import ms, share, size

EXPOSED_SHARE, WAIT_SHARE, BYTES_OFF = 0.03, 0.02, 0.05


def _wait_ms(context: Context) -> float | None:
    """Exposed waiting for peers in the unprofiled step, None where it is unknown."""
    waterfall = context.report.waterfall
    return waterfall.wait_ms if waterfall else None


def exposed(context: Context) -> list[Finding]:
    """Transfers that no compute hides for at least 3 % of the step; waiting for peers is `straggler`'s."""
    outside, collectives = context.parts.get(COMMUNICATION, 0.0), context.report.collectives
    transfer = outside - (_wait_ms(context) or 0.0)
    if (context.share_of(transfer) or 0.0) < EXPOSED_SHARE:
        return []
    action, proves = _hide(context)
    return [
        context.finding(
            "exposed-communication",
            f"{ms(transfer)} a step of communication is not hidden behind compute",
            [
                f"exposed communication: {context.of_step(outside)}, of it transfer {ms(transfer)}",
                _largest(collectives),
                f"{share(collectives.overlapped)} of communication time is hidden"
                if collectives and collectives.overlapped is not None
                else "",
            ],
            action,
            saves_ms=transfer,
            how="upper bound: all exposed transfer hidden",
            proves=proves,
        )
    ]


def _largest(collectives: CollectivesView | None) -> str:
    if collectives is None or not collectives.rows:
        return ""
    row = max(collectives.rows, key=lambda r: r.exposed_ms)
    return f"most of it in {row.kind}: {row.calls:g} calls of {size(largest((row.bytes_in, row.bytes_out)))} a step"


def _hide(context: Context) -> tuple[str, str]:
    batch = larger_batch(context)
    if context.report.run.parallel == "ddp":
        action = "Use larger gradient buckets (bucket_cap_mb), or accumulate gradients over several batches (no_sync)."
    else:
        action = (
            "Prefetch further ahead: FSDPModule.set_modules_to_forward_prefetch and set_modules_to_backward_prefetch "
            "with the next two blocks, and keep parameters gathered after forward where memory allows "
            "(reshard_after_forward=False)."
        )
    if batch:
        return f"{action} Memory allows --batch {batch}: the same bytes for more work.", f"--batch {batch}"
    if int(context.option("nnodes", 1)) > 1 and context.report.run.parallel == "fsdp":
        return f"{action} Across hosts, shard inside a host only (--parallel hsdp).", "--parallel hsdp"
    if context.report.run.parallel == "ddp" and context.option("grad_compression", "none") == "none":
        smaller = "bf16" if context.on_gpu else "fp16"
        return f"{action} In {smaller} the gradients are half as large.", f"--grad-compression {smaller}"
    return action, ""


def straggler(context: Context) -> list[Finding]:
    """Ranks wait for a late one for at least 2 % of the step."""
    collectives = context.report.collectives
    wait = _wait_ms(context)
    if collectives is None or wait is None:
        return []
    if (context.share_of(wait) or 0.0) < WAIT_SHARE:
        return []
    late = [r.last_rank for r in collectives.rows if r.last_rank is not None]
    who = max(set(late), key=late.count) if late and collectives.straggler else None
    once = context.option("profile_steps") == 1
    return [
        context.finding(
            "straggler",
            f"Ranks wait {ms(wait)} a step for {'a late one' if who is None else f'rank {who}'}",
            [
                f"exposed: {context.of_step(context.parts.get(COMMUNICATION, 0.0))}, of it {ms(wait)} waiting",
                collectives.straggler,
                _spread(context),
                "seen in one profiled step: --profile-steps 10 tells whether it is the same rank always"
                if once
                else "",
            ],
            "Find what the late rank does before its collectives: uneven batches or sequence lengths, logging or "
            "saving on one rank, a slower or hotter GPU, CPU binding. Only balance helps; a faster network does not.",
            saves_ms=wait,
            how="upper bound: all exposed waiting, brought from the profiled steps to the unprofiled step",
        )
    ]


def _spread(context: Context) -> str:
    steps = context.report.steps
    if steps is None or len(steps.per_rank_ms) < 2:
        return ""
    return f"median step by rank: {ms(min(steps.per_rank_ms))} to {ms(max(steps.per_rank_ms))}"


def unexpected_bytes(context: Context) -> list[Finding]:
    """Measured bytes differ from the formula of the parameter sizes by more than 5 %."""
    collectives = context.report.collectives
    if collectives is None or collectives.bytes_per_step is None or collectives.expected_bytes is None:
        return []
    have, want = collectives.bytes_per_step.value, collectives.expected_bytes.value
    if not have or not want or abs(have / want - 1) <= BYTES_OFF:
        return []
    more, off = have > want, share(abs(have / want - 1))
    return [
        context.finding(
            "communicated-bytes",
            f"A rank communicates {off} {'more' if more else 'less'} than the parameters ask for",
            [
                f"recorded: {size(have)} a step; from parameter sizes: {size(want)} ({collectives.expected_bytes.how})",
            ],
            "Look for collectives outside the sharding: metrics reduced each step, extra gathers in the loss, "
            "parameters gathered twice."
            if more
            else "Some collectives are not in the trace: do not trust the bandwidths before they are.",
            severity="low",
            source="measured",
        )
    ]
