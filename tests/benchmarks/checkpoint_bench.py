"""Measure the checkpoint engine against DCP, safetensors and the machine's own ceilings, on one GPU.

    python tests/benchmarks/checkpoint_bench.py --out tests/benchmarks/results/checkpoint.json     about five minutes
    python tests/benchmarks/checkpoint_bench.py --only disk,stall,dcp --trace-launch               what a save call does
    python tests/benchmarks/checkpoint_bench.py --tiny --out /tmp/checkpoint.json                  tries the script, CPU

Every section runs by itself; one that fails leaves its error text in the results and the others go on. Stalls are
step-time differences: the time of a window of real training steps that begins with a save and ends when the save is
durable, less as many steps at the pace measured right before and after. In a result whose peer is "target", peer_value
is the figure to reach and ratio is value over it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from costlab.kernels.codec import device_load, fp8, gds, triton_blocks
from costlab.kernels.codec.blocks import grid_of
from costlab.kernels.codec.checkpoint import Checkpoint
from costlab.kernels.codec.crc import releases_gil
from costlab.kernels.codec.errors import CheckpointError
from costlab.kernels.codec.files import AtomicFile, aligned_buffer
from costlab.kernels.codec.manifest import committed
from costlab.kernels.codec.pipeline import AsyncCheckpointer, SaveReport
from costlab.kernels.codec.safetensors_io import write_safetensors
from costlab.kernels.codec.stage import SnapshotMode
from costlab.kernels.codec.table import codec_table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from checkpoint_common import GB, Bench, Workload, seconds, stall_of, sync
from checkpoint_dcp import section_dcp
from checkpoint_tune import section_tune
from common import command_line


def environment(bench: Bench) -> dict[str, Any]:
    """What the figures were taken on."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None, "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": _version("triton"), "python": platform.python_version(), "cpus": os.cpu_count(),
        "filesystem": _filesystem(bench.root), "crc_releases_gil": releases_gil(), "tiny": bench.tiny,
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _version(module: str) -> str | None:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return None


def _filesystem(path: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if str(path).startswith(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def section_checks(bench: Bench) -> None:
    """Kernels bit-equal to the definition on this device."""
    if bench.device.type != "cuda":
        bench.add("kernels bit-equal to definition", "not measured (no GPU)", "")
        return
    sys.path.insert(0, str(HERE.parent / "kernels" / "codec"))
    import test_triton_blocks as cases

    shapes = [*cases.SMALL, ((1024, 4096), (16, 16)), ((1000, 1000), (128, 128)), ((333, 4097), (1, 32))]
    for shape, block in shapes:
        for dtype in fp8.FLOATS:
            cases.check(shape, block, dtype, "cuda")
    for shape, dtype in itertools.product(((16, 1024), (48, 3072), (4096, 4096)), fp8.FLOATS):
        cases.check_tiles(shape, dtype, "cuda")
    cases.check_rounding("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        cases.check_log8("cuda", dtype)
    bench.add("kernels bit-equal to definition", "yes", "", n=3 * len(shapes))


def section_codec(bench: Bench) -> None:
    """FP8 encode and decode against the device's copy speed, bytes read plus bytes written over time."""
    device, side = bench.device, 256 if bench.tiny else 16384
    repeats = 3 if bench.tiny else 20
    source = torch.randn(side, side, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(device, lambda: target.copy_(source), repeats, 3)
    bench.add("device copy, read + write", copy / GB, "GB/s", n=repeats)
    worst = {"encode": 1e9, "decode": 1e9}
    for dtype in (torch.float32, torch.bfloat16):
        x = source.to(dtype)
        grid = grid_of((side, side), (16, 16))
        codes, scales, _ = fp8.encode(x)
        count, out = (
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.empty(grid.numel, dtype=dtype, device=device),
        )
        encode: Callable[[], object] = partial(fp8.encode, x)
        decode: Callable[[], object] = partial(fp8.decode, codes, scales, grid, dtype)
        if triton_blocks.usable(x, grid):
            encode = partial(triton_blocks.encode_into, x, grid, codes, scales, count, "e4m3")
            decode = partial(triton_blocks.decode_into, codes, scales, grid, out, "e4m3")
        moved = x.nbytes + codes.nbytes + scales.nbytes
        for name, work in (("encode", encode), ("decode", decode)):
            speed = moved / seconds(device, work, repeats, 3)
            worst[name] = min(worst[name], speed / copy)
            bench.add(f"fp8 {name} {str(dtype)[6:]}", speed / GB, "GB/s", "copy", copy / GB, speed / copy, repeats)
    bench.add("fp8_encode_of_copy", worst["encode"], "ratio", "target", 0.95, worst["encode"] / 0.95, repeats)
    bench.add("fp8_decode_of_copy", worst["decode"], "ratio", "target", 0.90, worst["decode"] / 0.90, repeats)


def section_disk(bench: Bench) -> None:
    """What the disk takes, before the saves; it is measured again after them, and the median is the ceiling."""
    for _ in range(2):
        _raw_write(bench)


def _raw_write(bench: Bench) -> None:
    """O_DIRECT writes of 16 MiB by eight threads, and fsync."""
    from concurrent.futures import ThreadPoolExecutor

    size, piece = (8 << 20, 1 << 20) if bench.tiny else (4 << 30, 16 << 20)
    if not bench.buffers:
        bench.buffers = [aligned_buffer(piece) for _ in range(8)]
        for buffer in bench.buffers:
            buffer[:] = np.random.default_rng(0).integers(0, 256, piece, dtype=np.uint8)
    path = bench.root / f"raw-{len(bench.disk)}"
    start = time.perf_counter()
    file = AtomicFile(path, direct=True)
    file.allocate(size)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: file.write(bench.buffers[i % 8], i * piece), range(size // piece)))
    file.commit(size)
    bench.disk.append(size / (time.perf_counter() - start))
    path.unlink()


def section_stall(bench: Bench) -> None:
    """Stall and time to durable of exact and FP8 saves in a training loop."""
    load = Workload(bench)
    bench.add("state", load.nbytes() / 2**30, "GiB")
    bench.add("step without a save", load.pace(3 if bench.tiny else 16) * 1e3, "ms", n=16)
    for name in ("exact", "fp8"):
        root = bench.root / name
        with AsyncCheckpointer(root, name, gate_every=0) as checkpointer:
            checkpointer.attach(load.optimizer)
            checkpointer.warm_up(load.state())
            stalls: list[float] = []
            reports: list[SaveReport] = []
            for attempt in range(2 if bench.tiny else 6):

                def save(number: int = attempt) -> Callable[[], bool]:
                    return checkpointer.save(number, load.state()).done

                stall = stall_of(load, save, bench)
                report = checkpointer.wait()
                assert report is not None
                # The first save touches everything for the first time.
                if attempt:
                    stalls.append(stall)
                    reports.append(report)
                _keep_newest(root)
        if bench.disk:
            _raw_write(bench)
        _report_saves(bench, name, stalls, reports)
        if bench.trace:
            _trace(bench, name, reports[-1])
    _gate_cost(bench, load)


def _trace(bench: Bench, name: str, report: SaveReport) -> None:
    """Every part of one save on the host's clock, from the call."""
    for part, took in report.launch_parts:
        print(f"    {name} call: {part:<10} {took * 1e3:9.3f} ms")
    for stage in dict.fromkeys(stage for stage, _, _ in report.timeline):
        spans = [(start, end) for found, start, end in report.timeline if found == stage]
        first, last, busy = min(spans)[0], max(end for _, end in spans), sum(end - start for start, end in spans)
        text = f"{first * 1e3:.2f} .. {last * 1e3:.2f} ms, {len(spans)} spans, {busy * 1e3:.2f} ms in all"
        bench.add(f"{name} trace {stage}", text, "")


def _keep_newest(root: Path) -> None:
    for directory, _ in list(committed(root))[1:]:
        shutil.rmtree(directory)


def _report_saves(bench: Bench, name: str, stalls: list[float], reports: list[SaveReport]) -> None:
    stall = statistics.median(stalls)
    bench.facts[f"stall_{name}"] = stall
    spread = f"{min(stalls) * 1e3:.1f} .. {max(stalls) * 1e3:.1f}"
    bench.add(f"{name} stall (step-time difference)", stall * 1e3, "ms", n=len(stalls))
    bench.add(f"{name} stall range", spread, "ms", n=len(stalls))
    best = min(reports, key=lambda r: r.durable_s)
    bench.add(f"{name} launch", statistics.median(r.launch_s for r in reports) * 1e3, "ms", n=len(reports))
    for part in [part for part, _ in best.launch_parts]:
        took = statistics.median(dict(r.launch_parts)[part] for r in reports)
        bench.add(f"{name} launch, {part}", took * 1e3, "ms", n=len(reports))
    if best.device_s is not None:
        bench.add(f"{name} staged on the device", best.device_s * 1e3, "ms")
        bench.add(f"{name} snapshot in device memory", best.snapshot_bytes / 2**30, "GiB")
    bench.add(f"{name} file", best.file_bytes / best.state_bytes, "of state", n=len(reports))
    for stage in ("stage", "copy", "checksum", "write", "pack", "sync", "commit"):
        bench.add(f"{name} {stage}", best.seconds(stage) * 1e3, "ms")
    durable = statistics.median(r.durable_s for r in reports)
    speed = best.file_bytes / durable
    disk = statistics.median(bench.disk) if bench.disk else None
    bench.add(f"{name} time to durable", durable, "s", n=len(reports))
    if disk:
        bench.add("disk write, O_DIRECT, fsync", disk / GB, "GB/s", n=len(bench.disk))
        bench.add(f"{name} durable speed", speed / GB, "GB/s", "disk", disk / GB, speed / disk, len(reports))
        if name == "exact":
            bench.add("durable_of_disk", speed / disk, "ratio", "target", 0.9, speed / disk / 0.9, len(reports))


def _gate_cost(bench: Bench, load: Workload) -> None:
    """What the first-update gate adds to the save it is measured in."""
    with AsyncCheckpointer(bench.root / "gate", "fp8", gate_every=1, gate_threshold=10.0) as checkpointer:
        checkpointer.warm_up(load.state())
        for number in range(2):
            sync(load.device)
            start = time.perf_counter()
            report = checkpointer.save(number, load.state()).result()
            bench.add(
                f"fp8 save call with the gate, {number + 1}", (time.perf_counter() - start) * 1e3, "ms to durable"
            )
            assert report is not None
        bench.add("fp8 first-update error, worst parameter", report.update_error, "relative")
    shutil.rmtree(bench.root / "gate")


def _saved(bench: Bench, name: str) -> Path:
    """The checkpoint that the stall section left; one made now where it didn't run."""
    root = bench.root / name
    if not root.exists() or not list(committed(root)):
        load = Workload(bench)
        with AsyncCheckpointer(root, name, gate_every=0) as checkpointer:
            checkpointer.save(0, load.state()).result()
    return next(committed(root))[0]


def section_load(bench: Bench) -> None:
    """Open, verify and load the exact checkpoint that the stall section left; safetensors on the same tensors."""
    directory = _saved(bench, "exact")
    file = next(directory.glob("rank-*.clck"))
    _read_through(file)
    start = time.perf_counter()
    with Checkpoint.open(directory) as checkpoint:
        names = [n for n in checkpoint.names if not checkpoint.places[n][0][1].kind]
        views = [checkpoint.tensor(n, verify=False) for n in names]
        opened = time.perf_counter() - start
        bench.add("zero-copy open, checksums not read", opened * 1e3, "ms", "target", 50.0, opened * 20)
        start = time.perf_counter()
        checkpoint.verify()
        total = sum(v.nbytes for v in views)
        bench.add("verify all checksums, one thread", total / (time.perf_counter() - start) / GB, "GB/s")
        write_safetensors(bench.root / "peer.safetensors", dict(zip(names, views, strict=True)))
        if bench.device.type == "cuda":
            _load_to_gpu(bench, checkpoint, names, total)
    (bench.root / "peer.safetensors").unlink()


def _read_through(path: Path) -> None:
    with path.open("rb", buffering=0) as source:
        while source.read(16 << 20):
            pass


def _load_to_gpu(bench: Bench, checkpoint: Checkpoint, names: list[str], total: int) -> None:
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    ceiling = pinned.nbytes / seconds(bench.device, partial(there.copy_, pinned, non_blocking=True), 5, 2)
    bench.add("HtoD from pinned memory", ceiling / GB, "GB/s", n=5)
    del pinned, there
    state = {n: torch.zeros_like(checkpoint.tensor(n, verify=False), device="cuda") for n in names}
    times = [_timed_load(checkpoint, state) for _ in range(5)]
    ours = statistics.median(times[1:])
    bench.add("first load to the GPU (pins its buffers)", times[0] * 1e3, "ms")
    bench.add("load to the GPU, verified", total / ours / GB, "GB/s", "HtoD", ceiling / GB, total / ours / ceiling, 3)
    bench.add("load_of_htod", total / ours / ceiling, "ratio", "target", 0.9, total / ours / ceiling / 0.9, 3)
    _load_parts(bench, checkpoint, state, total)
    equal = all(torch.equal(state[n].cpu(), checkpoint.tensor(n)) for n in names[:: max(1, len(names) // 40)])
    bench.add("loaded tensors equal the file", "yes" if equal else "NO", "", n=len(names[:: max(1, len(names) // 40)]))
    from safetensors.torch import load_file

    _read_through(bench.root / "peer.safetensors")
    peers = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loaded = load_file(bench.root / "peer.safetensors", device="cuda")
        torch.cuda.synchronize()
        peers.append(time.perf_counter() - start)
        del loaded
    bench.add("load against safetensors", ours * 1e3, "ms", "safetensors", min(peers) * 1e3, min(peers) / ours, 2)


def _load_parts(bench: Bench, checkpoint: Checkpoint, state: dict[str, torch.Tensor], total: int) -> None:
    """The readers alone: how many, how much at a time, and what checking costs."""
    jobs = [
        device_load.Job(checkpoint.files[0], entry, state[name].view(-1).view(torch.uint8))
        for name, entry in checkpoint.files[0].entries.items() if name in state and entry.length
    ]  # fmt: skip
    jobs.sort(key=lambda job: job.entry.offset)
    for threads, piece, verify in ((16, 16, True), (16, 16, False), (8, 16, True), (24, 16, True), (16, 8, True)):
        loader = device_load.DeviceLoader(bench.device, threads, verify, piece << 20)
        try:
            loader.load(jobs)
            taken = [_timed(partial(loader.load, jobs)) for _ in range(3)]
        finally:
            loader.close()
        checked = "checked" if verify else "not checked"
        bench.add(f"readers {threads} x {piece} MiB, {checked}", total / statistics.median(taken) / GB, "GB/s", n=3)
    for threads in (1, 8, 16):
        bench.add(f"page cache to pinned memory, {threads} threads", _read_speed(jobs, threads) / GB, "GB/s", n=3)


def _read_speed(jobs: list[device_load.Job], threads: int) -> float:
    """Bytes a second that reads of a piece each bring from the page cache into pinned buffers, and nothing else."""
    from concurrent.futures import ThreadPoolExecutor

    file, size = jobs[0].container, device_load.PIECE
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(threads)]
    end = max(job.entry.offset + job.entry.length for job in jobs)
    starts = range(0, min(end, 4 << 30) - size, size)

    def some(number: int) -> None:
        for start in starts[number::threads]:
            file._pread_into(start, buffers[number])

    with ThreadPoolExecutor(threads) as pool:
        taken = [_timed(lambda: list(pool.map(some, range(threads)))) for _ in range(3)]
    return len(starts) * size / statistics.median(taken)


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _timed_load(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> float:
    return _timed(lambda: checkpoint.load(state))


def section_fp8_load(bench: Bench) -> None:
    """Decode an FP8 checkpoint to the device."""
    directory = _saved(bench, "fp8")
    _read_through(next(directory.glob("rank-*.clck")))
    with Checkpoint.open(directory) as checkpoint:
        names = [n for n in checkpoint.names if not checkpoint.places[n][0][1].kind]
        device = None if bench.device.type == "cpu" else bench.device
        sync(bench.device)
        start = time.perf_counter()
        total = sum(checkpoint.tensor(n, device).nbytes for n in names)
        sync(bench.device)
        bench.add("load fp8 checkpoint, decoded bytes", total / (time.perf_counter() - start) / GB, "GB/s")


def section_torn(bench: Bench) -> None:
    """Every parameter is filled with the step number while steps run; a checkpoint must hold one number."""
    shape, count, steps = ((64, 64), 8, 12) if bench.tiny else ((4096, 4096), 16, 120)
    weights = {f"w{i}": torch.zeros(shape, device=bench.device) for i in range(count)}
    busy = torch.randn(shape, device=bench.device)
    for name, waits in (("exact", True), ("fp8", True), ("exact", False)):
        root = bench.root / f"torn-{name}-{waits}"
        checked = torn = 0
        # Without a copy on the device the time in which a careless loop tears the snapshot is longest.
        mode: SnapshotMode = "auto" if waits else "stream"
        with AsyncCheckpointer(root, name, gate_every=0, snapshot=mode) as checkpointer:
            checkpointer.warm_up(weights)
            for step in range(1, steps + 1):
                if waits:
                    checkpointer.before_step()
                for value in weights.values():
                    value.fill_(float(step))
                torch.mm(busy, busy)
                if step % 10 == 0:
                    checkpointer.save(step, weights)
            checkpointer.wait()
            for directory, manifest in committed(root):
                with Checkpoint.open(directory) as checkpoint:
                    values = [checkpoint.tensor(n) for n in weights]
                    low, high = (float(f(torch.stack([f(v) for v in values]))) for f in (torch.min, torch.max))
                    checked += 1
                    torn += not (low == high and abs(low - manifest.step) <= 1e-5 * manifest.step)
        shutil.rmtree(root)
        label = f"torn snapshots, {name}" + ("" if waits else ", without waiting (shows the test can fail)")
        bench.add(label, torn, "", "saves", float(checked), n=checked)


def section_special(bench: Bench) -> None:
    """Non-finite blocks, unfit second moments and many zeros through the device's kernels and back."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(1000, 2000, generator=generator)
    w[3, 3], w[999, 1999] = float("nan"), float("-inf")
    thin = torch.randn(1024, 1024, generator=generator) * (torch.rand(1024, 1024, generator=generator) < 0.25)
    v = (torch.randn(600, 700, generator=generator) * 6 - 20).exp2()
    wrong = v.clone()
    wrong[5, 5] = -1.0
    state = {"w.weight": w, "thin.weight": thin, "a.exp_avg_sq": v, "b.exp_avg_sq": wrong, "h.weight": w.half()}
    on_device = {n: t.to(bench.device) for n, t in state.items()}
    with AsyncCheckpointer(bench.root / "special", "fp8", gate_every=0) as checkpointer:
        for step in range(2):
            checkpointer.save(step, on_device).result()
    with Checkpoint.open(next(committed(bench.root / "special"))[0]) as checkpoint:
        checkpoint.verify()
        device = None if bench.device.type == "cpu" else bench.device
        for name, tensor in state.items():
            on_cpu, back = checkpoint.tensor(name), checkpoint.tensor(name, device).cpu()
            assert torch.equal(on_cpu.view(torch.uint8), back.view(torch.uint8)), name
            bad = ~torch.isfinite(tensor)
            assert torch.equal(torch.isfinite(on_cpu), ~bad), name
        assert checkpoint.tensor("b.exp_avg_sq")[5, 5] == -1
        places = checkpoint.places
        bench.add("zeros coded as", places["thin.weight"][0][1].layout.name, "")
        bench.add("raw blocks kept", float(places["w.weight"][0][1].patch_count), "")
    shutil.rmtree(bench.root / "special")


def section_flip(bench: Bench) -> None:
    """Flip single bits of a file's data; each must be reported with the tensor's name."""
    state = {f"t{i}": torch.randn(300, 400) for i in range(20)}
    with AsyncCheckpointer(bench.root / "flip") as checkpointer:
        report = checkpointer.save(1, state).result()
    assert report is not None
    path = next(report.directory.glob("rank-*.clck"))
    found = 0
    rng = np.random.default_rng(0)
    with Checkpoint.open(report.directory) as checkpoint:
        entries = list(checkpoint.files[0].entries.values())
    with path.open("r+b", buffering=0) as file:
        for _ in range(50):
            entry = entries[int(rng.integers(len(entries)))]
            at = entry.offset + int(rng.integers(entry.length))
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << int(rng.integers(8))]), at)
            try:
                with Checkpoint.open(report.directory) as checkpoint:
                    checkpoint.verify()
            except CheckpointError as error:
                found += repr(entry.name) in str(error)
            os.pwrite(file.fileno(), byte, at)
    bench.add("flipped bits reported with tensor and offset", float(found), "of 50", n=50)
    shutil.rmtree(bench.root / "flip")


def section_kill(bench: Bench) -> None:
    """kill -9 at random moments, in a process without CUDA."""
    moments = 5 if bench.tiny else 200
    script = HERE.parent / "kernels" / "codec" / "killing.py"
    command = [sys.executable, str(script), str(bench.root / "kill"), str(moments), "1"]
    quiet = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    bench.add("kill -9: last checkpoint whole", float(json.loads(done.stdout)["moments"]), f"of {moments}", n=moments)
    shutil.rmtree(bench.root / "kill")


def section_ranks(bench: Bench) -> None:
    """FSDP2 shards, replicas, a failing rank and another world size, on two CPU ranks: the tests of it."""
    script = HERE.parent / "kernels" / "codec" / "test_distributed.py"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    if done.returncode:
        raise RuntimeError(done.stdout[-400:])
    bench.add("two CPU ranks: sharded save, replica, resume", done.stdout.strip().splitlines()[-1], "")


def section_table(bench: Bench) -> None:
    """The codec table on the workload's own tensors (one layer)."""
    load = Workload(bench)
    weight = next(load.model.parameters())
    slot = load.optimizer.state[weight]
    state = {
        "w.weight": weight.detach(), "o.w.exp_avg": slot["exp_avg"], "o.w.exp_avg_sq": slot["exp_avg_sq"],
        "o.w.step": slot["step"],
    }  # fmt: skip
    for row in codec_table(state, timing=True):
        error = "" if row.update_error is None else f", update error {row.update_error:.3g}"
        speed = "" if row.encode_gbs is None else f", {row.encode_gbs:.1f} / {row.decode_gbs:.1f} GB/s"
        text = f"{row.bits:.3f} b, rel L2 {row.rel_l2:.3g}, flushed {row.flushed}{error}{speed}"
        bench.add(f"codec {row.tensor_class}: {row.codec}", text, "")


def section_gds(bench: Bench) -> None:
    """GPUDirect Storage: what is there."""
    found = gds.probe(bench.root, 0 if bench.tiny else 256 << 20)
    bench.add("GPUDirect Storage", f"{found.mode}: {found.reason}", "")
    if found.write_gbs is not None:
        bench.add("cuFile write", found.write_gbs, "GB/s", "read", found.read_gbs)


SECTIONS: list[tuple[str, Callable[[Bench], None]]] = [
    ("disk", section_disk), ("checks", section_checks), ("tune", section_tune), ("codec", section_codec),
    ("stall", section_stall), ("dcp", section_dcp), ("load", section_load), ("fp8 load", section_fp8_load),
    ("special", section_special), ("torn", section_torn), ("flip", section_flip), ("gds", section_gds),
    ("table", section_table), ("ranks", section_ranks), ("kill", section_kill),
]  # fmt: skip


def main() -> None:
    """Run the sections and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "checkpoint.json")
    parser.add_argument("--root", type=Path, default=None, help="a directory on the disk to be measured")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to try the script")
    parser.add_argument("--tune", action="store_true", help="also sweep the kernels' tiles and use the fastest")
    parser.add_argument("--trace-launch", action="store_true", help="what one save call does, and when")
    parser.add_argument("--only", default="", help="comma-separated sections")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else [name for name, _ in SECTIONS if name != "tune"]
    unknown = set(only) - {name for name, _ in SECTIONS}
    if unknown:
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; there are: {', '.join(n for n, _ in SECTIONS)}")
    root = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=options.root))
    bench = Bench(options.tiny, root, command_line(), trace=options.trace_launch)
    chosen = [section for section in SECTIONS if section[0] in only or (section[0] == "tune" and options.tune)]
    try:
        for name, work in chosen:
            bench.section(name, work)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            body = {"environment": environment(bench), "results": [asdict(r) for r in bench.results]}
            options.out.write_text(json.dumps(body, indent=1) + "\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("\n== results")
    for result in bench.results:
        shown = f"{result.value:.5g}" if isinstance(result.value, float) else str(result.value)
        ratio = "" if result.ratio is None else f"{result.ratio:.4g}"
        print(f"{result.metric:<46} {shown:>14} {result.unit:<10} {result.peer:<14} {ratio}")


if __name__ == "__main__":
    main()
