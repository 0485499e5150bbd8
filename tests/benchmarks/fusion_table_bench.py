"""How long the fusion table of a 96-layer model takes to open: `fusion_table_bench.py --out FILE.json`. No GPU needed.

A recorded run's tables are enlarged to 96 blocks, written as a run, and opened as the pane does: read, analysed,
laid out as lines, put into the table widget of a running app and drawn. Medians over several openings; modules are
imported before the clock starts, as they are when somebody opens a pane. `cpu_s` is the processor's time of the same
openings, which a busy machine does not stretch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import result

LAYERS = 96
BAR_S = 1.0
SAMPLE = "h200-llama-1b"
SIZE = (120, 40)


def enlarge(folder: Path, layers: int) -> tuple[Path, int]:
    """A run whose first block's rows stand `layers` times; the rows of the span table. Other layers stay."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    from costlab.app.store import open_sample

    source = open_sample(SAMPLE).path
    shutil.copytree(source, folder)
    rank = folder / "rank-00000"
    rows = 0
    for name in ("spans", "misses", "kernels", "patterns"):
        path = rank / f"{name}.parquet"
        if not path.exists():
            continue
        table = pq.read_table(path)
        frame = table.to_pandas()
        block = frame.layer.str.match(r"layers\.0(\.|$)")
        others = frame[~frame.layer.str.match(r"layers\.\d+(\.|$)")]
        copies = [relabelled(frame[block], i) for i in range(layers)]
        whole = pd.concat([others, *copies], ignore_index=True)
        pq.write_table(pa.Table.from_pandas(whole, schema=table.schema, preserve_index=False), path)
        rows = len(whole) if name == "spans" else rows
    return folder, rows


def relabelled(block: Any, index: int) -> Any:
    """The block's rows as those of block `index`, with span ids of their own and times that differ a little.

    Equal blocks are folded into one line; bytes that differ keep every block a line of its own, the hardest case.
    """
    out = block.copy()
    out["layer"] = out.layer.str.replace(r"^layers\.0", f"layers.{index}", regex=True)
    for column in ("span_id", "parent_span_id"):
        if column in out:
            inside = set(block.span_id)
            out[column] = [f"{v[:12]}{index:04x}" if v in inside else v for v in out[column]]
    if "structural_lost" in out:
        out["structural_lost"] = out.structural_lost + 4096 * index
    return out


async def opened(run: Path) -> dict[str, float]:
    """Seconds to analyse a run and to draw its fusion table, and both; `lines` is how many the table has."""
    from costlab.app.analysis.build import build_report
    from costlab.app.store import open_run
    from costlab.app.tui.app import CostlabApp
    from costlab.app.tui.panes.fusion_rows import Filter, FusionTree

    worked, began = time.process_time(), time.perf_counter()
    report = build_report(open_run(str(run)))
    analysed = time.perf_counter()
    assert report.fusion is not None
    tree = FusionTree.of(report.fusion)
    for row in report.fusion.layers:
        if row.has_children:
            tree.toggle(row.path, True)
    lines = tree.lines(Filter())
    listed = time.perf_counter()
    worked = time.process_time() - worked
    drawn, drew = await draw(CostlabApp, run)
    return {
        "analysis": analysed - began,
        "lines": float(len(lines)),
        "listing": listed - analysed,
        "table": drawn,
        "total": listed - began + drawn,
        "cpu": worked + drew,
    }


async def draw(kind: Any, run: Path) -> tuple[float, float]:
    """Seconds, by the wall and by the processor, from the switch to the fusion pane until it has been drawn."""
    from costlab.app.tui.panes.fusion import FusionPane

    app = kind([run])
    async with app.run_test(size=SIZE) as pilot:
        deadline = time.perf_counter() + 60
        while app.session.report is None and time.perf_counter() < deadline:
            await pilot.pause(0.02)
        await app.workers.wait_for_complete()
        await pilot.pause()
        worked, began = time.process_time(), time.perf_counter()
        await pilot.press("2")
        await pilot.pause()
        assert app.query_one(FusionPane).display
        return time.perf_counter() - began, time.process_time() - worked


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run, spans = enlarge(Path(temporary) / "run-96", LAYERS)
        asyncio.run(opened(run))  # imports and caches
        found = [asyncio.run(opened(run)) for _ in range(options.repeats)]
    middle = {k: statistics.median(f[k] for f in found) for k in found[0]}
    about = {"layers": LAYERS, "span_rows": spans, "lines": int(middle["lines"]), "cpu_s": middle["cpu"]}
    command = "python tests/benchmarks/fusion_table_bench.py --out FILE"
    rows = [
        result("fusion_table_open (96 layers)", middle["total"], "s", peer="bar", peer_value=BAR_S, n=len(found),
               command=command, **about),
        *(result(f"fusion_table_{part} (96 layers)", middle[part], "s", n=len(found), command=command)
          for part in ("analysis", "listing", "table")),
    ]  # fmt: skip
    machine = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    options.out.write_text(json.dumps({"environment": machine, "results": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['metric']:40} {row['value']:.3f} s")


if __name__ == "__main__":
    main()
