"""The named what-if toggles: what each changes in a run's options, and whether it can be tried here.

A toggle exists only when the option behind it does; anything else is reached with `key=value`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from costlab.probes.spec import RunSpec


@dataclass(frozen=True)
class Machine:
    """What availability depends on. `gpus` counts those this process may use."""

    gpus: int

    def on_gpu(self, spec: RunSpec) -> bool:
        """Whether a run of `spec` would use GPUs."""
        return spec.device != "cpu" and self.gpus > 0

    def ranks(self, spec: RunSpec) -> int:
        """World size of a run of `spec`."""
        return (spec.ranks or (self.gpus if self.on_gpu(spec) else 2)) * spec.nnodes


Obstacle = Callable[[RunSpec, Machine], str]


def _none(_spec: RunSpec, _machine: Machine) -> str:
    return ""


def _needs_gpu(spec: RunSpec, machine: Machine) -> str:
    return "" if machine.on_gpu(spec) else "needs a CUDA GPU"


def _needs_peers(least: int) -> Obstacle:
    def obstacle(spec: RunSpec, machine: Machine) -> str:
        have = machine.ranks(spec)
        return "" if have >= least else f"needs at least {least} ranks, this run has {have}"

    return obstacle


def _graphs(spec: RunSpec, machine: Machine) -> str:
    if spec.compile == "none":
        return "needs a compiled baseline: combine it with compile=block"
    return _needs_gpu(spec, machine)


def _autotune(spec: RunSpec, _machine: Machine) -> str:
    return "needs a compiled baseline: combine it with compile=block" if spec.compile == "none" else ""


def _all_reduce(spec: RunSpec, machine: Machine) -> str:
    if spec.parallel == "fsdp":
        return "FSDP2 over all ranks has no all-reduce to plan: combine it, hybrid+ddp or hybrid+hsdp"
    if spec.grad_compression != "none":
        return "the gradients' compression is DDP's one communication hook: combine it with grad_compression=none"
    return _needs_peers(2)(spec, machine)


@dataclass(frozen=True)
class Toggle:
    """One switch; `options` are the run options it sets."""

    name: str
    title: str
    options: dict[str, Any]
    obstacle: Obstacle = field(default=_none, repr=False)

    def unavailable(self, spec: RunSpec, machine: Machine) -> str:
        """Why it cannot be tried on `spec` here, "" when it can."""
        if all(getattr(spec, key) == value for key, value in self.options.items()):
            return "the baseline has it already"
        return self.obstacle(spec, machine)


TOGGLES: dict[str, Toggle] = {
    t.name: t
    for t in (
        Toggle("eager", "no torch.compile", {"compile": "none", "cudagraphs": False}),
        Toggle("compile", "torch.compile of each block", {"compile": "block"}),
        Toggle("compile-model", "torch.compile of the whole model", {"compile": "model"}),
        Toggle("cudagraphs", "CUDA graphs", {"cudagraphs": True}, _graphs),
        Toggle("autotune", "max-autotune", {"compile_mode": "max-autotune-no-cudagraphs"}, _autotune),
        Toggle("fused", "fused Triton kernels where they fit", {"fused": True}),
        Toggle("ddp", "DDP", {"parallel": "ddp"}),
        Toggle("fsdp", "FSDP2", {"parallel": "fsdp"}),
        Toggle("hsdp", "HSDP", {"parallel": "hsdp"}, _needs_peers(2)),
        Toggle("hybrid", "the planner's all-reduce schedule", {"schedule": "auto"}, _all_reduce),
        Toggle("bf16", "bf16", {"dtype": "bf16"}),
        Toggle("fp32", "fp32", {"dtype": "fp32", "autocast": False}),
        Toggle("recompute", "recompute each block's activations", {"recompute": "block"}),
        Toggle("numa-bind", "bind ranks to their GPU's NUMA node", {"check_in": "bind"}, _needs_gpu),
        Toggle("gc-freeze", "objects from before the steps left out of garbage collections", {"gc": "freeze"}),
        Toggle("fp8", "save with costlab's engine in FP8", {"checkpoint_codec": "fp8"}),
        Toggle("exact", "save with costlab's engine, exactly", {"checkpoint_codec": "exact"}),
        Toggle("sgd", "SGD with momentum", {"optimizer": "sgd"}),
    )
}


def this_machine() -> Machine:
    """The machine costlab runs on."""
    from costlab.probes.launch import count_gpus

    return Machine(gpus=count_gpus())
