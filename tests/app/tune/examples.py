"""A scan and a tuning to test with: made up, nothing was measured."""

from __future__ import annotations

from costlab.app.analysis.views import BeforeAfter, CandidateView, TuneView
from costlab.probes.tune_records import Check, Scan, SiteRow

NAMES = ["add_norm@layers.*", "gated@layers.*.mlp", "linear_cross_entropy@model"]


def scan(unavailable: str = "", ok: bool = True) -> Scan:
    """Three places where a kernel fits and one that only looks like it."""
    sites = [
        SiteRow(kernel="add_norm", how="module", where="layers.*", places=2, bytes=1 << 20, inside=("layers.*.norm",)),
        SiteRow(kernel="gated", how="pattern", where="layers.*.mlp", places=2, dtype="bfloat16", bytes=1 << 20),
        SiteRow(kernel="linear_cross_entropy", how="loss", where="", bytes=1 << 20, inside=("loss",)),
        SiteRow(kernel="rope", how="pattern", where="layers.*", path="eager", reason="no second rotation"),
    ]
    checks = [Check(names=NAMES, ok=True, loss=5.0, loss_error=0.0, worst=1e-6, bound=1e-3, path="Triton kernels")]
    if not ok:
        checks.append(
            Check(names=[NAMES[1]], ok=False, loss=5.0, loss_error=0.5, worst=1.0, bound=1e-3, why="w differs")
        )
    return Scan(environment={"device": "x"}, unavailable=unavailable, sites=sites, checks=checks, cache_bytes=1 << 20)


def tuning() -> TuneView:
    """One kept, one dropped, one without a kernel, with a hostile name."""
    return TuneView(
        created="2026-11-29T14:00:00+00:00",
        policy="roofline",
        plan="fusion-plan.json",
        step_ms=100.0,
        candidates=[
            CandidateView(
                name="add_norm@layers.*", kernel="add_norm", how="module", where="layers.*", places=16, lost=1 << 30,
                predicted_ms=4.0, predicted_how="6 ms of kernels less 2 ms", roofline=True, seed=True,
                seed_why="L2 miss 60% > 15 %, latency ratio 0.40 < 0.6", miss_how="measured by ncu", checked=True,
                check="loss off by 0.0e+00", change=-0.035, change_low=-0.04, change_high=-0.03, measured_ms=3.5,
                decision="kept", why="faster beyond the noise (-3.5 %)",
            ),
            CandidateView(
                name="rope@layers.*.attention", kernel="rope", how="pattern", where="layers.*.attention", places=16,
                predicted_ms=1.0, roofline=True, change=0.001, change_low=-0.002, change_high=0.004, measured_ms=-0.1,
                decision="dropped", why="no difference beyond the noise (+0.1 %)",
            ),
            CandidateView(
                name="layout_copy@[red]layers.*", kernel="", how="none", where="layers.*", lost=1 << 20,
                decision="dropped", why="no fused kernel computes this",
            ),
        ],
        layers=[
            BeforeAfter(path="", label="model", depth=0, rate=0.6, rate_after=0.9, ms=100.0, ms_after=96.5),
            BeforeAfter(path="layers.0-15", label="layers 0-15", depth=1, rate=0.5, rate_after=0.4, ms=90.0),
        ],
        together=-0.034,
        together_low=-0.04,
        together_high=-0.028,
        notes=["L2 hit rates are estimated"],
    )  # fmt: skip
