"""What compilation leaves undone or costs too much: eager runs, graph breaks, recompiles, cold caches."""

from __future__ import annotations

import re

from costlab.app.analysis.views import BreakView, CacheView, Finding
from costlab.app.diagnosis.rule import Context
from costlab.app.figures import ms, seconds
from costlab.probes.sources import OWN_BUCKETS, OWN_HOOKS

MOST = 3  # findings of one rule
AMORTISED_SHARE = 0.02


def uncompiled(context: Context) -> list[Finding]:
    """The run was eager."""
    if context.compiled or not context.report.run.compile:
        return []
    memory, launch = context.parts.get("memory-bound kernels", 0.0), context.parts.get("idle: launch", 0.0)
    per_block = "torch.compile on each block before sharding (block.compile())"
    return [
        context.finding(
            "uncompiled",
            "The model runs eager: nothing is fused",
            [
                f"memory-bound kernels: {context.of_step(memory)}" if memory else "",
                f"idle waiting for launches: {context.of_step(launch)}" if launch else "",
            ],
            f"Compile it: {per_block}; with FSDP2 the whole model cannot be one graph, blocks can.",
            severity="high" if (context.share_of(memory + launch) or 1.0) >= 0.1 else "medium",
            how="no model predicts what fusion brings here: the re-run measures it",
            proves="--compile block",
        )
    ]


def passed_over(context: Context) -> list[Finding]:
    """Blocks of torch's own classes, which costlab compiles and a plain `block.compile()` does not."""
    names = context.report.run.passed_over
    if not names:
        return []
    return [
        context.finding(
            "passed-over",
            f"In a script of your own, block.compile() would leave {', '.join(names)} eager",
            [
                "Module.compile() passes over the frames of torch's own classes, without a word",
                f"costlab put a frame of its own around {sum(names.values())} of them: the figures are of compiled "
                "blocks",
            ],
            "Compile such a block with torch.compile(block), or give it a class of your own whose forward calls it. A "
            "profile of your script shows whether Inductor's kernels run.",
            severity="info",
            source="derived",
        )
    ]


def graph_breaks(context: Context) -> list[Finding]:
    """Each graph break with its source line."""
    view = context.report.compile
    if view is None:
        return []
    return [_graph_break(context, b, len(view.breaks)) for b in view.breaks[:MOST]]


def _graph_break(context: Context, item: BreakView, count: int) -> Finding:
    if OWN_BUCKETS in item.reason:
        return _bucket_cuts(context, item)
    sharded_inside = OWN_HOOKS in item.reason
    return context.finding(
        "graph-break",
        f"The graph breaks{f' at {item.source}' if item.source else ''}: {item.reason or 'no reason recorded'}",
        [
            f"seen {item.count} time{'s' if item.count > 1 else ''}"
            + (f" in frame {item.compile_id}" if item.compile_id else ""),
            f"{count} different breaks in all, the first {MOST} are shown" if count > MOST else "",
        ],
        "Compile the blocks before they are sharded instead of the whole model: the hooks then lie between graphs."
        if sharded_inside
        else "Move that call out of the compiled function, or replace it by one that can be traced: no print, .item(), "
        "data-dependent branch or unsupported library call inside a block.",
        severity="medium",
        proves="--compile block" if sharded_inside else "",
        how="not modelled: tensors that cross the break are counted with the fusion losses",
        where=item.source,
    )


def _bucket_cuts(context: Context, item: BreakView) -> Finding:
    return context.finding(
        "graph-break",
        OWN_BUCKETS,
        [f"seen {item.count} time{'s' if item.count > 1 else ''}"],
        "Intended: while one bucket is reduced, the backward of the next graph runs. Compile the blocks instead of the "
        "whole model and they share one graph, which compiles faster and is cut nowhere; larger buckets "
        "(bucket_cap_mb) make fewer cuts.",
        severity="info",
        source="measured",
        proves="--compile block" if context.option("compile") == "model" else "",
    )


def recompiles(context: Context) -> list[Finding]:
    """Each guard that made a frame compile again."""
    view = context.report.compile
    if view is None:
        return []
    return [_recompile(context, r) for r in view.recompiles[:MOST]]


ONCE = "Nothing to mend: each of the two is compiled once, and starts with a warm cache hardly pay for it."
# What a failed guard says, in Dynamo's words, and what to do; the first that fits. The last fits all.
GUARDS = (
    (r"requires_grad mismatch", f"The same code meets inputs with and without gradient, as a first block does. {ONCE}"),
    (
        r"GLOBAL_STATE changed",
        f"The same code runs in two modes, as a teacher without gradients or under another autocast. {ONCE}",
    ),
    (
        r"size mismatch|rank mismatch|\.size\(\)|\.shape|stride\(\)",
        "If the shape really varies, mark the dimension dynamic (torch._dynamo.mark_dynamic(x, dim)) or pad to a few "
        "fixed sizes; `costlab shapes` measures which.",
    ),
    (r"stride mismatch", "Bring the tensor into one memory layout before the call (contiguous(), or channels_last)."),
    (
        r"dtype mismatch|device.* mismatch|dispatch key",
        "Bring the input to one element type and one device.",
    ),
    (
        "",
        "If a Python number, flag or object varies from step to step, make it a tensor or keep it constant; the guard "
        "names it.",
    ),
)


def _recompile(context: Context, item: BreakView) -> Finding:
    cost = f", {seconds(item.seconds)} of compiling" if item.seconds else ""
    advice = next(text for pattern, text in GUARDS if re.search(pattern, item.reason))
    harmless = advice.endswith(ONCE) and item.count == 1
    return context.finding(
        "recompiles",
        f"{item.source or 'A frame'} was compiled again because a guard failed",
        [f"guard: {item.reason}", f"{item.count} time{'s' if item.count > 1 else ''} in the recorded steps{cost}"],
        advice,
        severity="info" if harmless else "medium" if item.count > 1 else "low",
        how="not modelled: how often the guard fails later in the run is not known",
        where=item.source,
    )


def cost(context: Context) -> list[Finding]:
    """Compiling, spread over the planned run, is at least 2 % of a step."""
    view, steps = context.report.compile, int(context.option("run_steps", 0) or 0)
    if view is None or view.amortised_ms is None or view.cold_s is None or not steps:
        return []
    if (context.share_of(view.amortised_ms) or 0.0) < AMORTISED_SHARE:
        return []
    warm = (view.warm_s.value or 0.0) * 1e3 / steps if view.warm_s else 0.0
    return [
        context.finding(
            "compile-cost",
            f"Compiling takes {seconds(view.cold_s.value)}, too long for a run of {steps:,} steps",
            [
                f"spread over the run: {context.of_step(view.amortised_ms)}",
                f"with warm caches: {seconds(view.warm_s.value)}" if view.warm_s else "",
            ],
            "Keep the compile caches between runs: TORCHINDUCTOR_CACHE_DIR on storage that survives, or "
            "torch.compiler.save_cache_artifacts / load_cache_artifacts in the image.",
            saves_ms=view.amortised_ms - warm,
            how="(cold - warm compile time) / steps of the run",
        )
    ]


def cold_cache(context: Context) -> list[Finding]:
    """A cache that never hits in the warm run."""
    view = context.report.compile
    if view is None:
        return []
    return [_cold(context, name, rows) for name, rows in _never(view.caches).items()]


def _never(caches: list[CacheView]) -> dict[str, list[CacheView]]:
    """Cache -> its rows of the ranks on which the warm run asked it and never hit."""
    out: dict[str, list[CacheView]] = {}
    for row in caches:
        if row.run == "warm" and not row.hit and row.miss + row.bypass:
            out.setdefault(row.cache, []).append(row)
    return out


def _cold(context: Context, name: str, rows: list[CacheView]) -> Finding:
    view, steps = context.report.compile, int(context.option("run_steps", 0) or 0)
    lost = view.warm_s.value if view and view.warm_s else None
    bypassed = sum(r.bypass for r in rows) > sum(r.miss for r in rows)
    return context.finding(
        "cache-misses",
        f"The {name} cache never hits, so every start compiles again",
        [
            *(f"rank {r.rank}: {r.hit} hits, {r.miss} misses, {r.bypass} bypasses" for r in rows[:MOST]),
            f"the warm start still compiles for {seconds(lost)}" if lost else "",
        ],
        "The graph cannot be cached: custom operators without a cache key, or a pass given as a plain function; "
        "give it a uuid (CustomGraphPass)."
        if bypassed
        else "Something in the graph's key changes from start to start: constants captured from Python, rank numbers, "
        "paths, time stamps; or the cache folder (TORCHINDUCTOR_CACHE_DIR) is not kept.",
        saves_ms=lost * 1e3 / steps if lost and steps else None,
        how=f"upper bound: warm compile time / steps of the run ({ms(lost * 1e3)})" if lost and steps else "",
        severity="low",
    )
