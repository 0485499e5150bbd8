"""Fused kernels put into whole models: what matches, what must not, and that nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costlab.kernels.fused import matching, registry
from costlab.probes.workloads import gpt2, llama, resnet
from costlab.probes.workloads.base import Workload, WorkloadContext

MAKERS: dict[str, Callable[[WorkloadContext], Workload]] = {
    "llama": llama.make,
    "gpt2": gpt2.make,
    "resnet": resnet.make,
}


def counted(replaced: list[str]) -> dict[str, int]:
    names = [r.split(":")[0] for r in replaced]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def built(name: str, device: torch.device) -> tuple[nn.Module, Any, Any]:
    context = WorkloadContext(
        device=device, dtype=torch.float32, size="tiny", batch=2, seq=16, seed=0, rank=0, world_size=1
    )
    workload = MAKERS[name](context)
    model, batch = workload.model, workload.batch(0)
    if name == "resnet":
        model = model.to(memory_format=torch.channels_last)
        batch = (batch[0].contiguous(memory_format=torch.channels_last), batch[1])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    return model, batch, workload.loss


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"add_norm": 4, "norm_linear": 8, "rms_norm": 9, "rope": 4, "gated_linear": 4}),
        ("gpt2", {"add_norm": 2}),
        ("resnet", {"batch_norm_relu": 7}),
    ],
)
def test_built_in_models(device: torch.device, name: str, expected: dict[str, int]) -> None:
    model, batch, loss = built(name, device)
    plain = copy.deepcopy(model)
    assert counted(registry.apply(model)) == expected
    assert list(model.state_dict()) == list(plain.state_dict())
    values = [loss(m, batch) for m in (model, plain)]
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(v, list(m.parameters())) for v, m in zip(values, (model, plain), strict=True))
    # cuDNN convolves in TF32 and picks its algorithm anew for each model.
    limit = 5e-3 if name == "resnet" and device.type == "cuda" else 1e-4
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= limit * b.norm() + 1e-6
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_names_choose_and_repeat_does_nothing(device: torch.device) -> None:
    model, *_ = built("llama", device)
    assert counted(registry.apply(model, ["rope"])) == {"rope": 4}
    assert counted(registry.apply(model, ["rope"])) == {}
    assert counted(registry.apply(model, ["rms_norm"])) == {"rms_norm": 9}
    with pytest.raises(ValueError, match="no fused kernel"):
        registry.apply(model, ["rope", "softmax"])


def test_no_module_is_traced_twice(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking into a block's children to see who reads its norm is what their own rewrite starts from."""
    seen: list[nn.Module] = []
    plain = matching._traced
    monkeypatch.setattr(matching, "_traced", lambda module: (seen.append(module), plain(module))[1])
    registry.apply(built("llama", device)[0])
    assert len(seen) == len(set(seen)) >= 4 * 3


def test_equal_blocks_share_one_class(device: torch.device) -> None:
    """torch.compile guards on the class: one graph must serve all blocks."""
    model, *_ = built("llama", device)
    before = type(model.layers[0])
    registry.apply(model)
    assert len({type(layer) for layer in model.layers}) == 1 and isinstance(model.layers[0], before)
    assert registry.restore(model) == 4 * (5 + 5) + 1 and type(model.layers[0]) is before


def test_copies_and_hooks_survive(device: torch.device) -> None:
    model, (tokens, _), _ = built("llama", device)
    seen: list[str] = []
    model.layers[1].register_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    registry.apply(model)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(tokens), model(tokens))
    assert seen == ["Block", "Block"]


class GemmaNorm(nn.Module):
    """Scales by 1 + weight: not ours, though it looks like it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class ChannelNorm(GemmaNorm):
    """Normalises over another dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


class OutsideEps(GemmaNorm):
    """Adds epsilon to the root instead of under it; differs only where x is small."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class NoisyNorm(GemmaNorm):
    """Is an RMSNorm in evaluation only."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y + torch.randn_like(y) if self.training else y


class Upcast(GemmaNorm):
    """Written as in many models; is one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(dtype)


@pytest.mark.parametrize(
    ("kind", "found"),
    [(GemmaNorm, False), (ChannelNorm, False), (OutsideEps, False), (NoisyNorm, False), (Upcast, True)],
)
def test_norms_are_recognised_by_what_they_do(kind: type[nn.Module], found: bool) -> None:
    module = kind(24)
    assert registry.apply(module) == (["rms_norm: " + kind.__name__] if found else [])


class Gate(nn.Module):
    """A gated MLP; `forward` is given by the cases below."""

    def __init__(self, bias: bool = False, inplace: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(16, 32, bias=False),
            nn.Linear(16, 32, bias=False),
            nn.Linear(32, 16, bias=bias),
        )
        self.act, self.drop = nn.SiLU(inplace=inplace), nn.Dropout(0.5)


class WithModule(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(x) * self.act(self.a(x)))


class Biased(WithModule):
    def __init__(self) -> None:
        super().__init__(bias=True)


class InPlaceSilu(Gate):
    """SiLU overwrites the gate, which is used again."""

    def __init__(self) -> None:
        super().__init__(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        return self.c(self.act(a) * self.b(x) + a)


class ReusedProduct(Gate):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.a(x), approximate="tanh") * self.b(x)
        return self.c(y) + y.mean()


class ReusedActivation(Gate):
    def forward(self, x: Tensor) -> Tensor:
        s = F.silu(self.a(x))
        return self.c(s * self.b(x)) + s.mean()


class OtherActivation(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)) * self.b(x))


class Branching(Gate):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > -1e9:
            return self.c(F.silu(self.a(x)) * self.b(x))
        return x


class Broadcast(Gate):
    """The gate is one column: no shapes in the graph, so the guard must say no at run time."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.a(x)[..., :1]) * self.b(x))


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (WithModule, True), (Biased, True), (ReusedProduct, True), (Broadcast, True),
        (InPlaceSilu, False), (ReusedActivation, False), (OtherActivation, False), (Branching, False),
    ],
)  # fmt: skip
def test_gates(device: torch.device, kind: type[nn.Module], found: bool) -> None:
    torch.manual_seed(0)
    model = kind().to(device)
    plain, x = copy.deepcopy(model), torch.randn(3, 5, 16, device=device)
    assert counted(registry.apply(model)) == ({"gated_linear": 1} if found else {})
    ours, theirs = model(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), list(model.parameters()), allow_unused=True),
        torch.autograd.grad(theirs.square().sum(), list(plain.parameters()), allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class PostNorm(nn.Module):
    """A residual block; the cases change one thing each."""

    def __init__(self, residual: bool = True, mutate: bool = False) -> None:
        super().__init__()
        self.fc, self.proj, self.norm = nn.Linear(16, 40), nn.Linear(40, 16), nn.LayerNorm(16)
        self.residual, self.mutate = residual, mutate

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(F.gelu(self.fc(x)))
        s = x + h if self.residual else h + h
        if self.mutate:
            s.mul_(2.0)
        return self.norm(s)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, {"ffn_layer_norm": 1}), ({"residual": False}, {"add_norm": 1}), ({"mutate": True}, {})],
)
def test_residual_blocks(device: torch.device, options: dict[str, bool], expected: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = PostNorm(**options).to(device)
    plain, findings = copy.deepcopy(model), list[str]()
    x = torch.randn(2, 7, 16, device=device)
    assert counted(registry.apply(model, findings=findings)) == expected
    assert bool(findings) == bool(options.get("mutate"))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


class Mixed(nn.Module):
    """A user's model nobody tuned for: a shared norm, a sum with three users, batch norm in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.BatchNorm2d(8))
        self.norm, self.gain = Upcast(8), nn.Linear(8, 8, bias=False)

    def forward(self, image: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.stem(image).flatten(2).transpose(1, 2)
        s = x + self.gain(x)
        y = self.norm(s)
        z = self.norm(s + y)
        return {"out": s * scale + y + z, "aux": s.mean()}


def test_a_model_that_mixes_patterns(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Mixed().to(device, memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    image = torch.randn(2, 3, 6, 6, device=device).contiguous(memory_format=torch.channels_last)
    replaced = counted(registry.apply(model))
    assert replaced == {"add_norm": 2, "batch_norm_relu": 1, "rms_norm": 1}
    for training in (True, False):
        ours, theirs = model.train(training)(image, scale=0.5), plain.train(training)(image, scale=0.5)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """A block as torchvision writes it: one ReLU module in place, the branch added in place; `kind` varies the end."""

    def __init__(self, kind: str = "iadd") -> None:
        super().__init__()
        self.kind = kind
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.down = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = self.down(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.kind == "iadd":
            out += identity
        elif self.kind == "swapped":
            out = identity + out
        elif self.kind == "kept":
            both = out + identity
            return self.relu(both + 0.0) + both
        elif self.kind == "wide":
            out += identity.mean((2, 3), keepdim=True)
        elif self.kind == "input":
            x += out
            return self.relu(x * 1.0)
        return self.relu(out)


@pytest.mark.parametrize(("kind", "found"), [("iadd", 2), ("swapped", 2), ("kept", 1), ("wide", 2), ("input", 0)])
def test_a_residual_branch_is_added_before_the_relu(device: torch.device, kind: str, found: int) -> None:
    """`wide` matches and takes the unfused path; `input` writes to what the caller holds and is left alone."""
    torch.manual_seed(0)
    model = Residual(kind).to(device, memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    notes: list[str] = []
    assert counted(registry.apply(model, findings=notes)) == ({"batch_norm_relu": found} if found else {})
    assert bool(notes) == (kind == "input")
    image = torch.randn(3, 8, 5, 5, device=device).contiguous(memory_format=torch.channels_last)
    for training in (True, False):
        ours, theirs = (m.train(training)(image.clone()) for m in (model, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        if kind == "input":  # autograd refuses it in either form
            continue
        gradients = [
            torch.autograd.grad(out.square().sum(), list(m.parameters())) for out, m in ((ours, model), (theirs, plain))
        ]
        torch.testing.assert_close(*gradients, rtol=2e-3, atol=2e-3)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Rotations(nn.Module):
    """q and k rotated; `sign` and `order` make near-misses."""

    def __init__(self, swapped: bool = False, halved: bool = True) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.swapped, self.halved = swapped, halved

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1) if self.halved else (x.float()[..., ::2], x.float()[..., 1::2])
        first = b * cos - a * sin if self.swapped else a * cos - b * sin
        return torch.cat((first, sin * a + cos * b), dim=-1).to(x.dtype)

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.inner(self.turn(q, cos, sin) @ self.turn(k, cos, sin).transpose(-1, -2))


@pytest.mark.parametrize(
    ("options", "found"), [({}, True), ({"swapped": True}, False), ({"halved": False}, False)]
)  # fmt: skip
def test_rotations(device: torch.device, options: dict[str, bool], found: bool) -> None:
    torch.manual_seed(0)
    model = Rotations(**options)
    q, k = (torch.randn(2, 2, 5, 8, device=device) for _ in range(2))
    cos, sin = torch.randn(5, 4, device=device), torch.randn(5, 4, device=device)
    expected = model(q, k, cos, sin)
    assert counted(registry.apply(model)) == ({"rope": 1} if found else {})
    torch.testing.assert_close(model(q, k, cos, sin), expected, rtol=1e-4, atol=1e-5)
    # Shapes that the kernel does not take run the module's own operations.
    torch.testing.assert_close(model(q[0], k[0], cos, sin), expected[0], rtol=1e-4, atol=1e-5)


def test_loss_without_logits(device: torch.device) -> None:
    model, batch, loss = built("llama", device)
    registry.apply(model)
    expected = loss(model, batch)
    fused = registry.fused_loss(model, loss, batch)
    assert fused is not None
    value = fused(model, batch)
    ours, theirs = (torch.autograd.grad(v, list(model.parameters())) for v in (value, expected))
    torch.testing.assert_close(value, expected)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6
    assert model(batch[0]).shape == (*batch[0].shape, 512)


@pytest.mark.parametrize("case", ["smoothed", "sum", "no head", "crash"])
def test_other_losses_are_left_alone(device: torch.device, case: str) -> None:
    name = "resnet" if case == "no head" else "llama"
    model, batch, loss = built(name, device)

    def other(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if case == "crash":
            raise RuntimeError("not today")
        logits = model(batch[0]).flatten(0, 1)
        smoothing, reduction = (0.1, "mean") if case == "smoothed" else (0.0, "sum")
        return F.cross_entropy(logits, batch[1].flatten(), label_smoothing=smoothing, reduction=reduction)

    findings: list[str] = []
    assert registry.fused_loss(model, loss if case == "no head" else other, batch, findings) is None
    assert len(findings) == 1 and registry.restore(model) == 0 and model.training


def test_every_kernel_is_described() -> None:
    for name, kernel in registry.KERNELS.items():
        assert kernel.name == name and kernel.replaces and registry.guards(name).endswith(kernel.guards)
