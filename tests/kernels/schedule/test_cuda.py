"""CUDA tensors over gloo: two ranks share one GPU, which NCCL refuses; transfers are staged through host memory."""

from __future__ import annotations

import all_reduce_cases as cases
import pytest
from rank_pool import RankPool

pytestmark = pytest.mark.gpu


def test_sums_of_cuda_tensors(ranks: RankPool) -> None:
    assert ranks.run(cases.on_one_gpu, 2) == [20, 20]
