"""Linears behind an RMSNorm that compute the norm's output again: equal gradients, less saved, never a wrong note."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from costlab.kernels.fused import registry
from costlab.kernels.fused.launch import INTERPRETED
from costlab.kernels.fused.norm_linear import norm_linear, note_of
from costlab.kernels.fused.rms_norm import add_rms_norm, rms_norm, rms_norm_reference

Draw = Callable[..., Tensor]
Agree = Callable[..., None]
ROWS, DIM = 12, 32
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="without kernels the modules take their own path"
)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm_reference(x, self.weight, self.eps)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh() + self.b(x)


class Block(nn.Module):
    """Both forms that are found: a norm alone before a module of Linears, a norm of a sum before a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.inner, self.out = Norm(), Norm(), Gate(), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(self.first(x))
        h = x + x.sin()
        return h + self.out(self.second(h)).tanh()


class Reads(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + x


class Writes(Gate):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.a(x)


class Views(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.flatten(0, -2))


def saved_bytes(run: Callable[[], Tensor], model: nn.Module) -> int:
    """Bytes that the forward leaves for the backward, parameters aside, each storage once."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        pointer = t.untyped_storage().data_ptr()
        if pointer not in known:
            storages[pointer] = t.untyped_storage().nbytes()
        kept.append(t)
        return t

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(storages.values())


def used(model: nn.Module) -> list[nn.Parameter]:
    unused = (
        [] if type(getattr(model, "inner", None)) is Gate or not hasattr(model, "inner") else [model.inner.b.weight]
    )
    return [p for p in model.parameters() if not any(p is u for u in unused)]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), [x, *used(model)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_norm_and_linear(draw: Draw, agree: Agree, dtype: torch.dtype) -> None:
    def fused(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, h = add_rms_norm(x, r, g, 1e-5, note=True)
        z = rms_norm(x, g, 1e-5, note=True)
        return norm_linear(y, w, note_of(y)), norm_linear(z, w, note_of(z)), h  # type: ignore[arg-type]

    def reference(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x + r
        return rms_norm_reference(h, g, 1e-5) @ w.t(), rms_norm_reference(x, g, 1e-5) @ w.t(), h

    inputs = [
        draw(2, 6, 40, dtype=dtype),
        draw(2, 6, 40, dtype=dtype),
        draw(40, dtype=dtype),
        draw(24, 40, dtype=dtype),
    ]
    agree(fused, reference, inputs, tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype])


def test_found_and_equal(device: torch.device) -> None:
    plain = Block().to(device)
    model = copy.deepcopy(plain)
    assert registry.apply(model).count("norm_linear: Block") == 2
    x = torch.randn(2, ROWS, DIM, device=device, requires_grad=True)
    for ours, theirs in zip(gradients(model, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


@needs_kernels
def test_the_output_of_the_norm_is_not_saved(device: torch.device) -> None:
    x = torch.randn(2, ROWS, DIM, device=device, requires_grad=True)
    with_note, without = Block().to(device), Block().to(device)
    registry.apply(with_note)
    registry.apply(without, [name for name in registry.KERNELS if name != "norm_linear"])
    saved = [saved_bytes(lambda m=m: m(x), m) for m in (with_note, without)]  # type: ignore[misc]
    assert saved[1] - saved[0] == 2 * x.numel() * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA GPU")
def test_a_compiled_graph_does_not_save_it_either(device: torch.device) -> None:
    """The partitioner is free to save what the backward could compute again; it must not find that cheaper."""
    x = torch.randn(2, ROWS, DIM, device=device, requires_grad=True)
    with_note, without = Block().to(device), Block().to(device)
    without.load_state_dict(with_note.state_dict())
    registry.apply(with_note)
    registry.apply(without, [name for name in registry.KERNELS if name != "norm_linear"])
    compiled = [torch.compile(m, fullgraph=True) for m in (with_note, without)]
    for ours, theirs in zip(gradients(compiled[0], x), gradients(compiled[1], x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    saved = [saved_bytes(lambda c=c: c(x), m) for c, m in zip(compiled, (with_note, without), strict=True)]  # type: ignore[misc]
    assert saved[1] - saved[0] >= 2 * x.numel() * 4


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes no fake tensors")
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)])
def test_a_note_is_traced(draw: Draw, shape: tuple[int, ...]) -> None:
    def run(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = rms_norm(x, g, 1e-5, note=True)
        z, _ = add_rms_norm(x, y, g, 1e-5, note=True)
        return norm_linear(y, w, note_of(y)) + norm_linear(z, w, note_of(z))  # type: ignore[arg-type]

    inputs = [draw(*shape), draw(16), draw(8, 16)]
    seed = torch.ones(*shape[:-1], 8, device=inputs[0].device)
    compiled = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)
    ours, theirs = (torch.autograd.grad(f(*inputs), inputs, seed) for f in (compiled, run))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [Reads, Writes, Views])
def test_other_readers_and_writers_are_left_alone(device: torch.device, kind: type[Gate]) -> None:
    plain = Block().to(device)
    plain.inner = kind().to(device)
    model = copy.deepcopy(plain)
    assert registry.apply(model).count("norm_linear: Block") == 1  # the second norm's only
    x = torch.randn(ROWS, DIM, device=device, requires_grad=True)
    for ours, theirs in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()  # a single element near zero may be off by more


def test_hooks_between_norm_and_linear_are_respected(device: torch.device) -> None:
    model = Block().to(device)
    model.inner.a.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.out.register_forward_hook(lambda _, args, out: out + args[0])
    plain = copy.deepcopy(model)
    assert "norm_linear: Block" not in registry.apply(model)
    x = torch.randn(ROWS, DIM, device=device)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


def test_a_linear_without_note_is_a_linear(device: torch.device) -> None:
    model = Block().to(device)
    registry.apply(model)
    x = torch.randn(ROWS, DIM, device=device)
    torch.testing.assert_close(model.out(x), x @ model.out.weight.t())
    assert isinstance(model.out, nn.Linear) and registry.restore(model) and type(model.out) is nn.Linear


def test_autocast_takes_the_plain_path(device: torch.device) -> None:
    plain = Block().to(device)
    model = copy.deepcopy(plain)
    registry.apply(model)
    x = torch.randn(ROWS, DIM, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(model(x), plain(x), rtol=2e-2, atol=2e-2)
