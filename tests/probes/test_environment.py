"""The machine's facts from copied /proc and /sys trees, a stand-in driver, and this machine itself."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from costlab.probes.doctor import doctor_lines
from costlab.probes.environment import environment
from costlab.probes.machine import cpu_model, cpu_quota, gpus, limits, machine, memory_limit
from costlab.probes.nvml import Nvml, visible

from .fake_nvml import FakeNvml

GIB = 1 << 30


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def session(fake: FakeNvml) -> Nvml:
    module: Any = fake
    return Nvml(module)


def test_cpu_model_on_x86_and_arm(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some CPU @ 2.0GHz\n")
    assert cpu_model(tmp_path) == "Some CPU @ 2.0GHz"
    put(tmp_path, "proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.0\n")
    assert cpu_model(tmp_path)


def test_memory_is_the_smallest_cgroup_v2_limit_above_the_process(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 1 kB\n")
    assert memory_limit(tmp_path) == 64 * GIB
    put(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    put(tmp_path, "sys/fs/cgroup/job/step/memory.max", "max\n")
    assert memory_limit(tmp_path) == 64 * GIB
    put(tmp_path, "sys/fs/cgroup/job/memory.max", f"{8 * GIB}\n")
    assert memory_limit(tmp_path) == 8 * GIB


def test_memory_limit_of_cgroup_v1(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\n")
    put(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/box/1\n0::/\n")
    put(tmp_path, "sys/fs/cgroup/memory/box/1/memory.limit_in_bytes", "9223372036854771712\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    assert memory_limit(tmp_path) == 4 * GIB


def test_nothing_told_is_none(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert cpu_quota(tmp_path) is None


def test_cpu_quota_is_told_where_it_binds(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/job\n")
    put(tmp_path, "sys/fs/cgroup/job/cpu.max", "50000 100000\n")
    put(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert cpu_quota(tmp_path) == 0.5
    assert any("0.5 CPUs" in said for said in limits(session(FakeNvml(count=0)), [], tmp_path))


def test_gpus_as_the_driver_tells_them() -> None:
    first, second = gpus(session(FakeNvml(refuse=("nvmlDeviceGetEnforcedPowerLimit",))))
    assert (first.index, first.name, first.memory_bytes) == (0, "NVIDIA Test 0", 1 << 34)
    assert (second.capability, second.pcie, second.power_limit_w) == ("9.0", "Gen1 x16 (at most Gen5 x16)", None)


@pytest.mark.parametrize(
    ("setting", "indices"),
    [("1,0", [1, 0]), ("GPU-11", [1]), ("", []), ("0,7,1", [0]), ("-1", []), (" 1 ", [1])],
)
def test_visible_devices(setting: str, indices: list[int]) -> None:
    nvml = session(FakeNvml())
    assert [i for i, _ in visible(nvml.handles(), nvml, setting)] == indices


def test_limits_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = session(FakeNvml())
    put(tmp_path, "sys/bus/pci/devices/0000:10:00.0/numa_node", "-1\n")
    put(tmp_path, "sys/bus/pci/devices/0000:11:00.0/numa_node", "0\n")
    said = " / ".join(limits(nvml, gpus(nvml), tmp_path))
    assert "GPUDirect Storage" in said and "RDMA" in said and "-1" in said
    put(tmp_path, "sys/bus/pci/devices/0000:10:00.0/numa_node", "1\n")
    put(tmp_path, "dev/nvidia-fs0", "")
    put(tmp_path, "sys/class/infiniband/mlx5_0/node_type", "1")
    assert limits(nvml, gpus(nvml), tmp_path) == []


def test_no_driver_is_said() -> None:
    nvml = session(FakeNvml(refuse=("nvmlInit",)))
    assert limits(nvml, []) and "Not Supported" in limits(nvml, [])[0]


def test_this_machine_without_names_or_paths() -> None:
    env = machine()
    text = msgspec.json.encode(env).decode()
    assert env.cpu and env.cpu_count == len(os.sched_getaffinity(0)) and env.memory_bytes
    assert env.torch.split("+")[0] == torch.__version__.split("+")[0]
    for private in (socket.gethostname(), str(Path.home()), str(Path.cwd())):
        assert private not in text
    assert f'"{getpass.getuser()}"' not in text


def test_environment_adds_what_torch_knows() -> None:
    env = environment(torch.device("cpu"), "gloo")
    assert (env.device, env.backend, env.torch) == ("cpu", "gloo", torch.__version__)
    assert env.cuda == torch.version.cuda
    assert (env.nccl is None) == (not torch.cuda.is_available())


def test_machine_and_doctor_do_not_import_torch() -> None:
    code = (
        "import sys; from costlab.probes.machine import machine; from costlab.probes.doctor import doctor_lines;"
        "machine(); doctor_lines();"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_git_commit_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert machine().git is None
    for command in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"):
        subprocess.run(["git", *command.split()], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    commit = machine().git
    assert commit and head.startswith(commit)


def by_check(lines: list[Any]) -> dict[str, tuple[str, str]]:
    return {check: (status, sentence) for check, status, sentence in lines}


def test_doctor_on_this_machine() -> None:
    lines = doctor_lines()
    found = by_check(lines)
    assert {"torch", "triton", "C++ compiler", "GPU", "/dev/shm", "disk", "RDMA", "terminal"} <= set(found)
    assert found["torch"][0] in ("ok", "warn") and torch.__version__.split("+")[0] in found["torch"][1]
    assert all(status in ("ok", "warn", "missing") and text.endswith(".") for _, status, text in lines)


def test_doctor_with_a_driver_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("TMUX", "x")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = by_check(doctor_lines(tmp_path, tmp_path, session(FakeNvml())))
    assert found["GPU"] == ("ok", "1 x NVIDIA Test 1, driver 580.65.06.")
    assert found["CUDA_VISIBLE_DEVICES"] == ("warn", "CUDA_VISIBLE_DEVICES leaves 1 of 2 GPUs.")
    assert found["energy counter"][0] == "ok"
    assert "NCCL_ALGO" in found["NCCL settings"][1] and "NCCL_DEBUG" not in found["NCCL settings"][1]
    assert found["terminal"][0] == "warn" and "set-clipboard" in found["clipboard"][1]
    assert found["TORCH_COMPILE_DISABLE"][0] == "warn"
    assert found["C++ compiler"][0] == "missing"
    assert found["GPUDirect Storage"][0] == "warn"
    assert found["NUMA"][0] == "warn"
