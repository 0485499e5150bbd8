"""FSDP2 on two gloo ranks with real C++ kernels: blocks compiled one by one, and the whole model after sharding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORLD, BLOCKS = 2, 3
pytestmark = pytest.mark.xdist_group("fusion_fsdp")  # the ranks' runs are shared: one worker starts them, once
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both ranks' joined rows of both scenarios."""
    out = tmp_path_factory.mktemp("fsdp")
    script = Path(__file__).with_name("fsdp_ranks.py")
    # Without a device in sight: FSDP2's default mesh is on the accelerator, and these are the C++ backend's kernels.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    logs = [(out / f"log-{r}.txt").open("w+") for r in range(WORLD)]
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(r), str(WORLD), str(out / "store"), str(out)],
            env=env,
            cwd=out,
            stdout=logs[r],
            stderr=logs[r],
        )
        for r in range(WORLD)
    ]
    try:
        codes = [p.wait(timeout=240) for p in running]
    finally:
        for process in running:
            process.kill()
    for log in logs:
        log.seek(0)
    assert codes == [0] * WORLD, "\n".join(log.read()[-3000:] for log in logs)
    return [json.loads((out / f"rank-{r}.json").read_text()) for r in range(WORLD)]


@pytest.fixture(params=["block", "whole"])
def result(request: pytest.FixtureRequest, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0 of one scenario."""
    found: dict[str, Any] = ranks[0][request.param]
    assert found["errors"] == {}
    return found


def of(rows: Rows, **wanted: object) -> Rows:
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def test_one_graph_serves_all_blocks(result: dict[str, Any]) -> None:
    assert [(phase, root) for _, phase, root in result["graphs"]] == [("forward", "blocks.0"), ("backward", "blocks.0")]


def test_every_block_has_its_own_measured_kernels(result: dict[str, Any]) -> None:
    for i in range(BLOCKS):
        loops = [
            k
            for k in of(result["spans"], kind="kernel", phase="forward")
            if k["layer"].startswith(f"blocks.{i}") and k["kernel_kind"] in ("pointwise", "reduction")
        ]
        assert [k["calls"] for k in loops] == [1, 1, 1]
        assert all(k["ms"] > 0 and k["compile_id"] for k in loops)
        for name in ("up", "down"):
            for phase, count in (("forward", 1), ("backward", 2)):
                products = of(
                    result["spans"], kind="kernel", phase=phase, layer=f"blocks.{i}.{name}", kernel_kind="extern"
                )
                assert [p["calls"] for p in products] == [1] * count
                assert all(p["flops"] == 2 * 64 * 32 * 64 for p in products)


def test_compiled_blocks_are_complete(result: dict[str, Any]) -> None:
    rows = [of(result["spans"], kind="layer", phase="forward", layer=f"blocks.{i}")[0] for i in range(BLOCKS)]
    assert {r["fusion_status"] for r in rows} == {"complete"}
    assert len({(r["fusion_rate"], r["bytes_read"]) for r in rows}) == 1


def test_embedding_head_and_loss_ran_outside_any_graph(result: dict[str, Any]) -> None:
    eager = of(result["spans"], kind="kernel", phase="forward", layer="")
    assert {k["compile_id"] for k in eager} == {""}
    assert any("index_select" in k["name"] or "embedding" in k["name"] for k in eager)
    (loss,) = of(result["spans"], kind="layer", phase="forward", layer="loss")
    assert loss["main_cause"] == "uncompiled"
    assert loss["fusion_status"] in ("partial", "broken")


def test_sharding_and_optimizer_have_spans_of_their_own(result: dict[str, Any]) -> None:
    collectives = of(result["spans"], kind="kernel", kernel_kind="collective")
    assert {k["layer"] for k in collectives} == {"fsdp"}
    (optimizer,) = of(result["spans"], kind="layer", layer="optimizer")
    assert optimizer["layer_class"] == "optimizer"
    assert optimizer["main_cause"] == "per_parameter_loop"


def test_spans_cover_all_launch_time(result: dict[str, Any]) -> None:
    kernels = sum(k["ms"] or 0.0 for k in of(result["spans"], kind="kernel"))
    (step,) = of(result["spans"], kind="step")
    phases = sum(p["ms"] for p in of(result["spans"], kind="phase"))
    assert kernels == pytest.approx(result["launch_ms"], rel=1e-6)
    assert step["ms"] == pytest.approx(kernels, rel=1e-6)
    assert phases == pytest.approx(kernels, rel=1e-6)
    assert sum(k["ms"] for k in result["kernels"]) == pytest.approx(kernels, rel=1e-6)


def test_the_tree_is_whole(result: dict[str, Any]) -> None:
    ids = [s["span_id"] for s in result["spans"]]
    assert len(set(ids)) == len(ids)
    assert [s["kind"] for s in result["spans"] if s["parent_span_id"] is None] == ["step"]
    assert all(s["parent_span_id"] in set(ids) for s in result["spans"] if s["kind"] != "step")


def test_ranks_share_the_trace_and_its_shape(ranks: list[dict[str, Any]]) -> None:
    first, second = (r["block"]["spans"] for r in ranks)
    assert {s["trace_id"] for s in (*first, *second)} == {"truth"}
    assert not {s["span_id"] for s in first} & {s["span_id"] for s in second}
    compiled = [{(s["phase"], s["layer"], s["name"]) for s in x if s["compile_id"]} for x in (first, second)]
    assert compiled[0] == compiled[1]


def test_what_shards_within_the_compiled_model_is_told_apart_from_the_users_code(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["block"]["patterns"] == []
    ((kind, _, source, _),) = ranks[0]["whole"]["patterns"]
    assert kind == "sharding_hook"
    assert source.startswith("fsdp_ranks.py:")
