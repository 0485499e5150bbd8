"""What was run and how it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from costlab.app.analysis.views import RunInfo
from costlab.app.store.manifest import title_of
from costlab.probes.records import Environment, Manifest, RunStatus, WorkloadFacts

_ENDED = {
    "running": "the run is still going: what is here so far is shown",
    "incomplete": "the run ended without writing its last results: what it left is shown",
    "cancelled": "the run was cancelled: what it left is shown",
    "failed": "the run failed: what it left is shown",
}


def device_kind(environment: Environment) -> str:
    """The recorded device by kind: cpu, cuda (torch's name for every GPU), or "" where nothing is recorded."""
    if environment.device == "cpu":
        return "cpu"
    return "cuda" if environment.gpus or environment.device else ""


def run_info(manifest: Manifest, status: RunStatus, notes: Sequence[str]) -> RunInfo:
    """The run's identity. `notes` are the store's; the manifest's own notes and the machine's limits follow them."""
    spec, failure = manifest.spec, manifest.failure
    facts = manifest.workload or WorkloadFacts()
    environment = manifest.environment or Environment()
    ended = [_ENDED[status]] if status in _ENDED else []
    return RunInfo(
        id=manifest.run_id,
        title=title_of(manifest),
        status=status,
        created=manifest.created,
        duration_s=manifest.duration_s,
        workload=facts.name or str(spec.get("workload", "")),
        size=str(spec.get("size", "")),
        ranks=manifest.ranks,
        device=device_kind(environment),
        parallel=str(spec.get("parallel", "")),
        compile=str(spec.get("compile", "")),
        dtype=str(spec.get("dtype", "")),
        unit=facts.unit,
        units_per_step=facts.units_per_step,
        parameters=facts.parameters,
        spec=spec,
        passed_over=dict(facts.passed_over),
        fused=dict(Counter(place.partition(":")[0] for place in facts.fused).most_common()),
        failure=failure.message if failure else "",
        failure_advice=failure.advice if failure else "",
        log_tail=list(failure.log_tail) if failure else [],
        notes=list(dict.fromkeys([*ended, *notes, *manifest.notes, *facts.fused_notes, *environment.limits])),
    )
