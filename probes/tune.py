"""Looks at a workload for places where fused kernels fit, and checks one rewritten step against the plain one.

Run by `costlab tune` as `-m costlab.probes.tune SPEC.json OUT.json`: one process, one device, no process group. The
model is compiled as the run compiles it, but only as far as the captured graph, in which the rules look.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from costlab.probes.compile_internals import compile_module
from costlab.probes.session import die_with_launcher
from costlab.probes.spec import RunSpec
from costlab.probes.tables import write_bytes
from costlab.probes.tune_records import Check, Scan, SiteRow

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from costlab.kernels.fused.patterns.engine import Site
    from costlab.kernels.fused.plan import Rewrite
    from costlab.probes.workloads.base import Workload

BOUND = 1e-3  # of a gradient in fp32, relative to its norm: a few roundings
TIMES = 2.0  # how much farther from the step in fp32 a rewritten 16-bit step may be than the plain one
LOSS_BOUNDS = {"fp32": 1e-5, "bf16": 1e-2}
LOSS_LAYER = "loss"  # under which the trace has what runs between the model's output and the backward pass
SMALL = 1e-3  # a gradient with less than this share of the largest norm is compared with that share
# Which module rewrites cover what the pattern rules would also find inside the same module.
COVERED_BY = {
    "add_rms_norm": ("add_norm", "norm_linear", "rms_norm"),
    "add_layer_norm": ("add_norm", "ffn_layer_norm"),
    "rms_norm": ("rms_norm", "norm_linear"),
    "layer_norm": (),
    "gated": ("gated_linear",),
    "rope": ("rope",),
    "linear_cross_entropy": ("linear_cross_entropy",),
}


def main(argv: list[str]) -> int:
    """Scan the workload of a spec file; the exit code is 1 with one line on stderr where that is impossible."""
    die_with_launcher()
    spec = msgspec.json.decode(Path(argv[1]).read_bytes(), type=RunSpec)
    try:
        found = scan(spec)
    except Exception as error:  # a user's model may fail in any way
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    write_bytes(Path(argv[2]), msgspec.json.encode(found))
    return 0


def scan(spec: RunSpec) -> Scan:
    """All places, and the check of all rewrites together, then one by one if that fails."""
    import torch

    from costlab.kernels.fused import registry
    from costlab.kernels.fused.planned import environment

    on_gpu = spec.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    unavailable = "" if registry.available(device) else f"Triton kernels are not available on {device.type}"
    workload = make(spec, device)
    findings: list[str] = []
    modules = module_sites(workload, findings)
    graph = pattern_sites(workload, spec, findings)
    loss = loss_site(workload, findings)
    modules += [(loss.kernel, loss.how, loss.where)] if loss else []
    sites = merged(modules, graph, {name: type(m).__name__ for name, m in workload.model.named_modules()})
    sites = [loss if loss and s.how == "loss" else s for s in sites]
    size, name = cache_of(device)
    checks = verify(workload, spec, [s for s in sites if s.path != "eager"], findings)
    return Scan(
        environment=environment(device),
        unavailable=unavailable,
        sites=sites,
        checks=checks,
        findings=findings,
        cache_bytes=size,
        cache=name,
    )


def make(spec: RunSpec, device: torch.device) -> Workload:
    """The workload of one rank, unsharded, with its parameters in the dtype in which they are computed with."""
    import torch

    from costlab.probes.materialise import on_device
    from costlab.probes.workloads.base import WorkloadContext, find_blocks, seed_all
    from costlab.probes.workloads.batches import to_device
    from costlab.probes.workloads.loader import load

    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    seed_all(spec.seed)
    context = WorkloadContext(device, dtype, spec.size, spec.batch, spec.seq, spec.seed, 0, 1)
    workload = load(spec.workload, context)
    on_device(workload.model, device, spec.seed)
    workload.model.train()
    own = workload.batch
    workload.batch = lambda step: to_device(own(step), device)
    workload.blocks = workload.blocks or find_blocks(workload.model)
    if spec.dtype == "bf16" and spec.parallel != "ddp":  # what FSDP2's mixed precision does to parameters
        for parameter in workload.model.parameters():
            parameter.data = parameter.data.to(dtype)
    return workload


@contextmanager
def casting(workload: Workload, spec: RunSpec) -> Iterator[None]:
    """Autocast where a run would use it."""
    import torch

    device = next(workload.model.parameters()).device.type
    enabled = spec.dtype == "bf16" and (spec.parallel == "ddp" or spec.autocast)
    with torch.autocast(device, torch.bfloat16, enabled=enabled):
        yield


def module_sites(workload: Workload, findings: list[str]) -> list[tuple[str, str, str]]:
    """(kernel, how, module FQN) of every module that can be swapped, and the loss; the model is restored."""
    from costlab.kernels.fused import registry

    model = workload.model
    found = [(*entry.split(": ", 1), "module") for entry in registry.apply(model, findings=findings)]
    sites = [(kernel, how, "" if fqn == type(model).__name__ else fqn) for kernel, fqn, how in found]
    registry.restore(model)
    return sites


def loss_site(workload: Workload, findings: list[str]) -> SiteRow | None:
    """The last Linear and the loss, where they can be one op; the model is restored. Its traffic is the softmax's."""
    import torch

    from costlab.kernels.fused import registry
    from costlab.kernels.fused.patterns.engine import PASSES

    batch = workload.batch(0)
    if registry.fused_loss(workload.model, workload.loss, batch, findings) is None:
        return None
    head = next(m for m in workload.model.modules() if hasattr(m, registry._MARK) and isinstance(m, torch.nn.Linear))
    registry.restore(workload.model)
    kernel, tokens = "linear_cross_entropy", int(batch[1].numel())
    return SiteRow(
        kernel=kernel,
        how="loss",
        where="",
        dtype=str(head.weight.dtype).removeprefix("torch."),
        rows=tokens,
        columns=int(head.in_features),
        bytes=PASSES[kernel] * tokens * int(head.out_features) * head.weight.element_size(),
        inside=(LOSS_LAYER,),
    )


def pattern_sites(workload: Workload, spec: RunSpec, findings: list[str]) -> list[tuple[Site, list[str]]]:
    """What the rules see in the graphs that the run would compile, each with the modules it may be in."""
    from costlab.kernels.fused.patterns.capture import looking
    from costlab.kernels.fused.patterns.engine import Record
    from costlab.kernels.fused.patterns.guards import Limits
    from costlab.kernels.fused.planned import Owners

    record = Record()
    try:
        with compiled(workload, spec, looking(lambda _m, _s: Limits(reference=True), record)), casting(workload, spec):
            workload.loss(workload.model, workload.batch(0))
    except Exception as error:  # a user's model may not compile like this; the module rewrites remain
        findings.append(f"the model's graphs could not be captured: {type(error).__name__}: {first_line(error)}")
    findings += record.findings
    owners = Owners(workload.model)
    return [(site, owners.of(site) or []) for site in record.sites]


@contextmanager
def compiled(workload: Workload, spec: RunSpec, backend: Any) -> Iterator[None]:
    """The model compiled as the spec says, by a backend of ours; as before on exit."""
    import torch

    from costlab.probes.parallel import compiled_modules

    modules = dict(workload.model.named_modules())
    chosen = [modules[name] for name in compiled_modules(spec.compile, workload.blocks)]
    dynamic = {"auto": workload.dynamic, "off": False, "on": True}[spec.dynamic]
    torch._dynamo.reset()
    undo = [compile_module(module, backend=backend, dynamic=dynamic) for module in chosen]
    try:
        yield
    finally:
        for restore in undo:
            restore()
        torch._dynamo.reset()


def merged(
    modules: Sequence[tuple[str, str, str]], graph: Sequence[tuple[Site, list[str]]], classes: dict[str, str]
) -> list[SiteRow]:
    """Alike places on one line. What a swapped module covers is no pattern's; its sizes are taken from the pattern."""
    from costlab.kernels.fused.plan import any_index

    swaps: dict[tuple[str, str, str], int] = {}
    for kernel, how, fqn in modules:
        where = any_index(fqn) if fqn or how == "loss" else classes.get("", "")
        swaps[kernel, how, where] = swaps.get((kernel, how, where), 0) + 1
    left: dict[tuple[str, str, str, str], list[tuple[Site, int]]] = {}
    sizes: dict[tuple[str, str, str], list[tuple[Site, int]]] = {}
    inside: dict[tuple[str, str, str], set[str]] = {}
    for site, places in graph:
        for place in places or [site.owner]:
            # One graph serves all instances of a block, but only where the frame is one of them.
            times = instances(site, place, classes)
            owners = [key for key in swaps if covers_site(key, site.kernel, place, classes.get("", ""))]
            for owner in owners if site.path != "eager" else ():
                sizes.setdefault(owner, []).append((site, times))
                inside.setdefault(owner, set()).add(place)
            if not owners:
                left.setdefault((site.kernel, place, site.path, site.reason), []).append((site, times))
    rows = [row_of(*key, count, sizes.get(key, []), inside=inside.get(key, ())) for key, count in swaps.items()]
    for (kernel, place, path, reason), found in left.items():
        count = sum(n for _, n in largest_graph(found))
        rows.append(row_of(kernel, "pattern", place, count, found, path, reason))
    return rows


def covers_site(swap: tuple[str, str, str], kernel: str, place: str, root: str) -> bool:
    """Whether a module rewrite also does what a pattern found at `place`."""
    name, how, where = swap
    if name not in COVERED_BY.get(kernel, ()):
        return False
    return how == "loss" or where in (root, place) or place.startswith(f"{where}.")


def instances(site: Site, place: str, classes: dict[str, str]) -> int:
    """How many modules a place with "*" stands for, where the graph is of one of them; 1 where it is the model's."""
    from costlab.kernels.fused.plan import any_index

    if "*" not in place or any(name.isdigit() for name in site.owner.split(".")):
        return 1
    return sum(any_index(name) == place for name in classes) or 1


def largest_graph(found: Sequence[tuple[Site, int]]) -> list[tuple[Site, int]]:
    """The sites of the graph with most of them: further graphs of the same places are recompilations."""
    by: dict[int, list[tuple[Site, int]]] = {}
    for site, times in found:
        by.setdefault(site.graph, []).append((site, times))
    return max(by.values(), key=lambda rows: sum(n for _, n in rows), default=[])


def row_of(
    kernel: str,
    how: Any,
    where: str,
    places: int,
    found: Sequence[tuple[Site, int]],
    path: Any = "specialised",
    reason: str = "",
    inside: Iterable[str] = (),
) -> SiteRow:
    """One line for alike sites; the sizes are the first one's, the bytes those of all."""
    found = largest_graph(found)
    first = found[0][0] if found else None
    known = [s.bytes * n for s, n in found if s.bytes is not None]
    return SiteRow(
        kernel=kernel,
        how=how,
        where=where,
        places=places,
        path=path,
        reason=reason,
        source=first.source if first else "",
        dtype=first.dtype if first else "",
        rows=first.rows if first else None,
        columns=first.columns if first else None,
        bytes=sum(known) if known and len(known) == len(found) else None,
        inside=tuple(sorted(inside)),
    )


def verify(workload: Workload, spec: RunSpec, sites: Sequence[SiteRow], findings: list[str]) -> list[Check]:
    """Loss and gradients of one step with all rewrites against the plain step; one by one if they differ."""
    rewrites = [rewrite_of(site) for site in sites]
    if not rewrites:
        return []
    try:
        base = step_of(workload, spec, None, findings)
        exact = exact_step(workload, spec, findings) if spec.dtype == "bf16" else None
    except Exception as error:  # the step itself does not run in one process: the legs' own comparison remains
        findings.append(f"numerics not checked: one step alone fails with {type(error).__name__}: {first_line(error)}")
        return []
    together = check(workload, spec, rewrites, (base, exact), findings)
    if together.ok or len(rewrites) == 1:
        return [together]
    return [together, *(check(workload, spec, [r], (base, exact), findings) for r in rewrites)]


def rewrite_of(site: SiteRow) -> Rewrite:
    """The rewrite that a site asks for."""
    from costlab.kernels.fused.plan import Rewrite

    return Rewrite(kernel=site.kernel, how=site.how, where=site.where)


Step = tuple[float, dict[str, "Tensor"]]


def exact_step(workload: Workload, spec: RunSpec, findings: list[str]) -> Step:
    """The plain step in fp32 from the same (rounded) parameters: what both 16-bit steps are measured against."""
    import torch

    kept = [(p, p.data) for p in workload.model.parameters()]
    for parameter, data in kept:
        parameter.data = data.float()
    try:
        with torch.autocast(kept[0][0].device.type, enabled=False):
            return step_of(workload, msgspec.structs.replace(spec, dtype="fp32"), None, findings)
    finally:
        for parameter, data in kept:
            parameter.data = data


def check(
    workload: Workload, spec: RunSpec, rewrites: list[Rewrite], known: tuple[Step, Step | None], findings: list[str]
) -> Check:
    """Whether a step with the rewrites is as right as the plain step.

    In fp32 its gradients must be the plain step's to a few roundings. In 16 bits both differ from the step in fp32,
    and the rewritten one may differ by at most TIMES as much as the plain one.
    """
    names = [r.name for r in rewrites]
    base, exact = known
    device = next(workload.model.parameters()).device
    path = "Triton kernels" if device.type == "cuda" else "eager references (no GPU)"
    try:
        own = step_of(workload, spec, rewrites, findings)
    except Exception as error:  # a rewrite that fails is dropped, it does not end the tuning
        return Check(names=names, ok=False, path=path, why=f"{type(error).__name__}: {first_line(error)}")
    off = abs(own[0] - base[0]) / max(abs(base[0]), 1e-12)
    errors = differences(base[1] if exact is None else exact[1], own[1])
    allowed = dict.fromkeys(errors, BOUND)
    if exact is not None:
        allowed = {name: TIMES * error + BOUND for name, error in differences(exact[1], base[1]).items()}
    tensor = max(errors, key=lambda name: errors[name] / allowed[name], default="")
    worst, bound = errors.get(tensor, 0.0), allowed.get(tensor, BOUND)
    right = off <= LOSS_BOUNDS[spec.dtype] and worst <= bound
    words = f"the gradient of {tensor}" if worst > bound else "the loss"
    return Check(
        names=names,
        ok=right,
        loss=base[0],
        loss_error=off,
        worst=worst,
        worst_tensor=tensor,
        bound=bound,
        path=path,
        why="" if right else f"{words} differs by more than allowed",
    )


def step_of(workload: Workload, spec: RunSpec, rewrites: list[Rewrite] | None, findings: list[str]) -> Step:
    """Loss and gradients of the first batch, with rewrites or (None) without, at the same random state."""
    import torch

    from costlab.kernels.fused import registry
    from costlab.kernels.fused.patterns.capture import rewriting
    from costlab.kernels.fused.patterns.engine import Record
    from costlab.kernels.fused.plan import Plan, covers
    from costlab.kernels.fused.planned import Wanted

    model, loss, batch, record = workload.model, workload.loss, workload.batch(0), Record()
    plan = Plan(rewrites=tuple(rewrites or ()))
    swaps = [r for r in plan.rewrites if r.how == "module"]
    patterns = [r for r in plan.rewrites if r.how == "pattern"]
    if swaps:
        order = [name for name in registry.KERNELS if any(r.kernel == name for r in swaps)]
        registry.apply(
            model, order, [], lambda kernel, fqn: any(r.kernel == kernel and covers(r.where, fqn) for r in swaps)
        )
    if any(r.how == "loss" for r in plan.rewrites):
        loss = registry.fused_loss(model, loss, batch, findings) or loss
    backend = rewriting(Wanted(model, patterns, reference=True), record)
    try:
        torch.manual_seed(spec.seed + 1)
        model.zero_grad(set_to_none=True)
        with compiled(workload, spec, backend) if patterns else unchanged(), casting(workload, spec):
            value = loss(model, batch)
        value.backward()
        gradients = {n: p.grad.detach() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return float(value.detach()), gradients
    finally:
        registry.restore(model)
        findings += [f for f in record.findings if f not in findings]


@contextmanager
def unchanged() -> Iterator[None]:
    """The model as it is."""
    yield


def differences(reference: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, float]:
    """Each gradient's difference from the reference, relative to its norm; infinite where one is missing or NaN."""
    norms = {name: float(g.float().norm()) for name, g in reference.items()}
    least = SMALL * max(norms.values(), default=0.0)
    found = {}
    for name, gradient in reference.items():
        other = own.get(name)
        difference = math.inf if other is None else float((other.float() - gradient.float()).norm())
        found[name] = math.inf if math.isnan(difference) else difference / max(norms[name], least, 1e-30)
    return found


def cache_of(device: torch.device) -> tuple[int | None, str]:
    """Bytes of the last-level cache and its name."""
    import torch

    if device.type == "cuda":
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)
        return (int(size), "L2") if size else (None, "")
    for level in ("index3", "index2"):
        try:
            text = Path(f"/sys/devices/system/cpu/cpu0/cache/{level}/size").read_text().strip()
        except OSError:
            continue
        if text.endswith("K") and text[:-1].isdigit():
            return int(text[:-1]) * 1024, f"the CPU's L{level[-1]}"
    return None, ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    return (str(error).strip().splitlines() or [""])[0][:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
