"""Builds trees that look like /sys and /proc of real servers, under a folder of the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Machine:
    """A tree; `root` is what the code under test takes for /."""

    root: Path

    def write(self, path: str, text: str) -> None:
        """One file with a line feed, as the kernel ends them."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n", encoding="utf-8")

    def nodes(
        self,
        cpus: Sequence[str],
        *,
        online: str | None = None,
        memory_kb: Sequence[int] | None = None,
        distances: Sequence[str] | None = None,
    ) -> None:
        """NUMA nodes with their CPU lists; `online` CPUs default to all."""
        for i, listed in enumerate(cpus):
            self.write(f"sys/devices/system/node/node{i}/cpulist", listed)
            kilobytes = memory_kb[i] if memory_kb else 1 << 20
            self.write(f"sys/devices/system/node/node{i}/meminfo", f"Node {i} MemTotal:  {kilobytes} kB")
            if distances:
                self.write(f"sys/devices/system/node/node{i}/distance", distances[i])
        self.write("sys/devices/system/node/online", f"0-{len(cpus) - 1}" if len(cpus) > 1 else "0")
        self.write("sys/devices/system/cpu/online", online or ",".join(c for c in cpus if c))

    def packages(self, cpus: Mapping[int, Sequence[int]]) -> None:
        """Package -> its CPUs."""
        for package, members in cpus.items():
            for cpu in members:
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(package))

    def allowed(self, cpus: str, memory: str) -> None:
        """What the process's cpuset leaves it."""
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}")

    def pci(
        self,
        address: str,
        *,
        numa: int | None = -1,
        local: str = "",
        code: str = "0x030200",
        vendor: str = "0x10de",
        under: Sequence[str] = (),
        speed: tuple[str, str] = ("32.0 GT/s PCIe", "16"),
        max_speed: tuple[str, str] = ("32.0 GT/s PCIe", "16"),
    ) -> str:
        """A device below bridges `under` (topmost first); returns its real folder."""
        folder = "/".join(["sys/devices/pci0000:00", *under, address])
        files = {
            "class": code, "vendor": vendor, "device": "0x2335",
            "current_link_speed": speed[0], "current_link_width": speed[1],
            "max_link_speed": max_speed[0], "max_link_width": max_speed[1],
        }  # fmt: skip
        if numa is not None:
            files["numa_node"] = str(numa)
        if local:
            files["local_cpulist"] = local
        for name, text in files.items():
            self.write(f"{folder}/{name}", text)
        self._link(f"sys/bus/pci/devices/{address}", folder)
        return folder

    def ethernet(self, name: str, device: str, mbps: str) -> None:
        """A network interface on the device with this real folder."""
        self.write(f"{device}/net/{name}/speed", mbps)
        self.write(f"{device}/net/{name}/operstate", "up")
        self._link(f"{device}/net/{name}/device", device)
        self._link(f"sys/class/net/{name}", f"{device}/net/{name}")

    def infiniband(self, name: str, device: str, rate: str) -> None:
        """An RDMA device with one port."""
        port = f"{device}/infiniband/{name}/ports/1"
        for file, text in {"rate": rate, "state": "4: ACTIVE", "link_layer": "InfiniBand"}.items():
            self.write(f"{port}/{file}", text)
        self._link(f"{device}/infiniband/{name}/device", device)
        self._link(f"sys/class/infiniband/{name}", f"{device}/infiniband/{name}")

    def _link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / target)


def two_sockets(root: Path) -> Machine:
    """Two nodes of eight CPUs; a GPU and an InfiniBand card under one switch of node 1, a GPU on node 0."""
    machine = Machine(root)
    machine.nodes(["0-7", "8-15"], distances=["10 21", "21 10"])
    machine.packages({0: range(8), 1: range(8, 16)})
    machine.allowed("0-15", "0-1")
    machine.pci("0000:17:00.0", code="0x060400", numa=0, vendor="0x8086")
    machine.pci("0000:18:00.0", numa=0, local="0-7", under=["0000:17:00.0"])
    for bridge in (["0000:97:00.0"], ["0000:97:00.0", "0000:98:00.0"]):
        machine.pci(bridge[-1], code="0x060400", numa=1, vendor="0x1000", under=bridge[:-1])
    switch = ["0000:97:00.0", "0000:98:00.0"]
    machine.pci("0000:99:00.0", numa=1, local="8-15", under=switch)
    card = machine.pci("0000:9a:00.0", numa=1, code="0x020700", vendor="0x15b3", under=switch)
    machine.infiniband("mlx5_0", card, "400 Gb/sec (4X NDR)")
    lan = machine.pci("0000:03:00.0", numa=0, code="0x020000", vendor="0x8086")
    machine.ethernet("eno1", lan, "25000")
    return machine


def virtual_machine(root: Path) -> Machine:
    """One node, two GPUs whose numa_node is -1, a virtual network card without a speed."""
    machine = Machine(root)
    machine.nodes(["0-15"], distances=["10"])
    machine.packages({0: range(16)})
    machine.allowed("0-15", "0")
    for address in ("0000:00:06.0", "0000:00:07.0"):
        machine.pci(address, numa=-1, local="0-15", speed=("Unknown", "0"), max_speed=("Unknown", "0"))
    card = machine.pci("0000:00:03.0", numa=-1, code="0x020000", vendor="0x1af4")
    machine.ethernet("eth0", f"{card}", "-1")
    return machine
