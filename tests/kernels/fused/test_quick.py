"""Direct launches: which go to the kept kernel, which through Triton. The kernel is a stand-in that keeps its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from costlab.kernels.fused import quick


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def run(self, *args: Any) -> None:
        self.calls.append(args)


class Kernel:
    """In the form of a Triton kernel: `kernel[grid](...)` compiles, launches and returns what it compiled."""

    arg_names = ("x_ptr", "y_ptr", "size", "A", "B")

    def __init__(self) -> None:
        self.slow: list[tuple[Any, ...]] = []
        self.fast: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **options: Any) -> Compiled:
            self.slow.append((grid, args, options))
            return Compiled(self.fast)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77 + device, raising=False)
    monkeypatch.setattr(quick, "_hooked", lambda: False)
    monkeypatch.setattr(quick, "_kept", {})
    return Kernel()


def aligned(*shape: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> torch.Tensor:
    base = torch.zeros(64 + 16, dtype=dtype)
    skip = (-base.data_ptr() % 64) // base.element_size() + shift
    return base[skip : skip + shape[0]]


def test_the_second_launch_is_direct_with_the_constants_in_the_kernels_order(kernel: Kernel) -> None:
    launcher = quick.Quick(kernel)
    x, y, other = aligned(8), aligned(8), aligned(8)
    launcher[(5,)](x, y, 8, B=2, A=1, num_warps=4)
    launcher[(6,)](x, other, 8, B=2, A=1, num_warps=4)
    assert len(kernel.slow) == 1
    (call,) = kernel.fast
    assert call[:6] == (6, 1, 1, 77 + x.get_device(), "function", "metadata")
    assert call[-5:] == (x.data_ptr(), other.data_ptr(), 8, 1, 2)


@pytest.mark.parametrize(
    "change",
    [{"size": 9}, {"A": 3}, {"num_warps": 8}, {"x": aligned(8, dtype=torch.bfloat16)}, {"x": aligned(8, shift=1)}],
)
def test_anything_that_triton_specialises_on_is_another_kernel(kernel: Kernel, change: dict[str, Any]) -> None:
    launcher = quick.Quick(kernel)
    values: dict[str, Any] = {"x": aligned(8), "size": 8, "A": 1, "num_warps": 4}
    for given in (values, {**values, **change}):
        launcher[(1,)](given["x"], aligned(8), given["size"], A=given["A"], B=2, num_warps=given["num_warps"])
    assert len(kernel.slow) == 2 and not kernel.fast


def test_unaligned_addresses_always_go_through_triton(kernel: Kernel) -> None:
    launcher = quick.Quick(kernel)
    for _ in range(3):
        launcher[(1,)](aligned(8, shift=1), aligned(8), 8, A=1, B=2, num_warps=4)
    assert len(kernel.slow) == 3 and not kernel.fast


def test_a_profilers_hook_sees_every_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "_hooked", lambda: True)
    launcher = quick.Quick(kernel)
    for _ in range(3):
        launcher[(1,)](aligned(8), aligned(8), 8, A=1, B=2, num_warps=4)
    assert len(kernel.slow) == 3 and not kernel.fast


def test_another_triton_without_these_parts_is_slower_not_wrong(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiled, "function", None)
    launcher = quick.Quick(kernel)
    for _ in range(2):
        launcher[(1,)](aligned(8), aligned(8), 8, A=1, B=2, num_warps=4)
    assert len(kernel.slow) == 2 and not kernel.fast


def test_kept_kernels_are_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "_MOST", 4)
    launcher = quick.Quick(kernel)
    for size in range(20):
        launcher[(1,)](aligned(8), aligned(8), size, A=1, B=2, num_warps=4)
    assert len(quick._kept) <= 4
