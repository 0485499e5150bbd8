"""FLOPs of a step: three forward passes where all trains, less where weights are frozen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from costlab.probes.flops import ALL_TRAIN, SOME_TRAIN, count_flops
from costlab.probes.workloads.base import Workload

CPU = torch.device("cpu")
ROWS, WIDTH = 4, 8
ONE = 2 * ROWS * WIDTH * WIDTH  # FLOPs of one product


class Adapted(nn.Module):
    """A frozen Linear beside two factors that train, of its own width so that every product counts the same."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """y = base(x) + x a b."""
        out: Tensor = self.base(x) + x @ self.a @ self.b
        return out


def linear(trains: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(trains)


def workload(*layers: nn.Module, through: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Workload:
    model = nn.Sequential(*layers)
    x = torch.ones(ROWS, WIDTH)
    return Workload(model=model, batch=lambda _: x, loss=lambda m, b: (through or (lambda m, b: m(b)))(m, b).sum())


def by_autograd(mine: Workload) -> int:
    """What forward and backward really do."""
    with FlopCounterMode(display=False) as counter:
        mine.loss(mine.model, mine.batch(0)).backward()
    return int(counter.get_total_flops())


def test_three_passes_where_everything_trains() -> None:
    assert count_flops(workload(linear(), nn.ReLU(), linear()), CPU) == (3 * 2 * ONE, ALL_TRAIN, {})


@pytest.mark.parametrize(
    ("layers", "products"),
    [
        ([linear(False), linear(False), linear()], 1 + 1 + 3),
        ([linear(), linear(False), linear(False)], 3 + 2 + 2),
        ([linear(), linear(False), linear()], 3 + 2 + 3),
        ([Adapted()], 1 + 3 + 3),
        ([linear(False), Adapted(), nn.Sequential(nn.ReLU(), Adapted())], 1 + (1 + 3 + 3) + (2 + 3 + 3)),
    ],
)
def test_frozen_weights_have_no_gradients_to_compute(layers: list[nn.Module], products: int) -> None:
    mine = workload(*layers)
    flops, how, _ = count_flops(mine, CPU)
    assert flops is not None
    assert flops == products * ONE
    assert how == SOME_TRAIN
    # autograd skips one more product: the gradient of an input that nothing trains before
    assert by_autograd(mine) <= flops <= by_autograd(mine) + 2 * ONE


def test_calls_are_counted_wherever_they_come_from_and_as_often() -> None:
    shared = linear(False)
    mine = workload(linear(), shared, through=lambda m, b: m[1](m[1](m[0](b))))  # type: ignore[index]
    assert count_flops(mine, CPU) == ((3 + 2 + 2) * ONE, SOME_TRAIN, {"": 0, "1": 2})
    twice = workload(linear(), through=lambda m, b: m(m(b)))
    assert count_flops(twice, CPU) == (2 * 3 * ONE, ALL_TRAIN, {"": 2, "0": 2})


def test_the_model_is_left_as_it_was() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    mine = workload(linear(False), norm, linear())
    state = torch.random.get_rng_state()
    count_flops(mine, CPU)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in mine.model.modules())
    assert norm.running_mean is not None
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(state, torch.random.get_rng_state())


def test_hooks_go_away_when_the_model_fails() -> None:
    def broken(_model: nn.Module, _batch: Tensor) -> Tensor:
        raise ValueError("no")

    mine = workload(linear(False), linear(), through=broken)
    with pytest.raises(ValueError, match="no"):
        count_flops(mine, CPU)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in mine.model.modules())


class Fallible(nn.Module):
    """Tries one module and falls back on another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH + 1, WIDTH, bias=False), linear(False)

    def forward(self, x: Tensor) -> Tensor:
        """Through the second, as the first takes another width."""
        try:
            out: Tensor = self.first(x)
        except RuntimeError:
            out = self.second(x)
        return out


def test_a_module_that_fails_and_is_caught_does_not_confuse_the_others() -> None:
    assert count_flops(workload(linear(), Fallible(), linear()), CPU).flops == (3 + 2 + 3) * ONE


def test_nothing_counted_is_unknown() -> None:
    assert count_flops(workload(nn.LayerNorm(WIDTH)), CPU).flops is None
