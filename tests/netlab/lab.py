"""Hosts as network namespaces joined by rate-limited veth pairs, in namespaces of their own.

A switched lab has a bridge in one more namespace and a token bucket on both ends of every host's cable, so a host
sends and receives at its NIC's rate. A line has a cable between neighbours and routes through the hosts between. The
machine's own network is not touched: no interface, route or address is made outside the lab's namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

BURST = 16384  # bytes that pass above the rate; small against the messages, so that it does not shorten them
MTU = 9000


@dataclass(frozen=True)
class Layout:
    """A lab to build: `slow` maps a host to the fraction of `mbit` that its NIC has."""

    name: str
    hosts: int
    ranks: int
    mbit: float
    wiring: str = "switch"
    slow: dict[int, float] = field(default_factory=dict)

    def rate(self, host: int) -> float:
        """Mbit/s of a host's NIC."""
        return self.mbit * self.slow.get(host, 1.0)

    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by host."""
        return tuple(tuple(range(h * self.ranks, (h + 1) * self.ranks)) for h in range(self.hosts))


def layouts(mbit: float) -> list[Layout]:
    """The five labs: one slow host has a quarter of the others' rate."""
    return [
        Layout("4x2 switched", 4, 2, mbit),
        Layout("4x2 daisy chain", 4, 2, mbit, "line"),
        Layout("4x2 slow host at the end", 4, 2, mbit, slow={3: 0.25}),
        Layout("4x2 slow host in the middle", 4, 2, mbit, slow={1: 0.25}),
        Layout("2x4 switched", 2, 4, mbit),
    ]


def refusal() -> str:
    """Why this machine cannot hold a lab, empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are missing: apt-get install iproute2"
    name = f"costlab-probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"network namespaces are not allowed here: {probe.stderr.strip()}"
    try:
        _ip("-n", name, "link", "add", "e0", "type", "veth", "peer", "name", "e1")
        _tbf(name, "e0", 100.0)
        return ""
    except subprocess.CalledProcessError as error:
        return f"this kernel lacks veth or the token bucket filter: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def lab(layout: Layout) -> Iterator[list[str]]:
    """Build the lab; yields the namespace path of each rank; removes everything, also after a failure or SIGTERM.

    What a killed process left behind is removed by the next lab.
    """
    sweep()
    before = signal.signal(signal.SIGTERM, _leave)
    prefix = f"costlab-{os.getpid()}"
    hosts = [f"{prefix}-h{h}" for h in range(layout.hosts)]
    spaces = [*hosts, f"{prefix}-switch"] if layout.wiring == "switch" else hosts
    try:
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        if layout.wiring == "switch":
            _switch(layout, hosts, spaces[-1])
        else:
            _line(layout, hosts)
        yield [f"/var/run/netns/{hosts[h]}" for h in range(layout.hosts) for _ in range(layout.ranks)]
    finally:
        for space in spaces:
            _remove(space)
        signal.signal(signal.SIGTERM, before)


def sweep() -> None:
    """Remove the namespaces of labs whose process is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"^costlab-\d+-\w+", listed, re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            _remove(name)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


def _remove(space: str) -> None:
    subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _switch(layout: Layout, hosts: Sequence[str], switch: str) -> None:
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")
    for h, host in enumerate(hosts):
        port = f"p{h}"
        _ip("link", "add", "e0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "mtu", str(MTU), "master", "br0", "up")
        _ip("-n", host, "addr", "add", f"{_address(h)}/24", "dev", "e0")
        _ip("-n", host, "link", "set", "e0", "mtu", str(MTU), "up")
        _tbf(host, "e0", layout.rate(h))
        _tbf(switch, port, layout.rate(h))


def _line(layout: Layout, hosts: Sequence[str]) -> None:
    for h, host in enumerate(hosts):
        # the address lives on a bridge without ports: gloo asks for the address of one interface
        _ip("-n", host, "link", "add", "e0", "type", "bridge")
        _ip("-n", host, "addr", "add", f"{_address(h)}/32", "dev", "e0")
        _ip("-n", host, "link", "set", "e0", "up")
        _set(host, "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
    for left in range(len(hosts) - 1):
        _cable(layout, hosts, left)
    for h, host in enumerate(hosts):
        for other in range(len(hosts)):
            if other != h:
                _ip("-n", host, "route", "add", f"{_address(other)}/32", "dev", "right" if other > h else "left",
                    "src", _address(h))  # fmt: skip


def _cable(layout: Layout, hosts: Sequence[str], left: int) -> None:
    one, other = hosts[left], hosts[left + 1]
    _ip("link", "add", "right", "netns", one, "type", "veth", "peer", "name", "left", "netns", other)
    for host, end in ((one, "right"), (other, "left")):
        _ip("-n", host, "link", "set", end, "mtu", str(MTU), "up")
        _set(host, f"net.ipv4.conf.{end}.proxy_arp=1", f"net.ipv4.conf.{end}.rp_filter=0")
        _tbf(host, end, min(layout.rate(left), layout.rate(left + 1)))


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _tbf(space: str, device: str, mbit: float) -> None:
    kbit = f"{mbit * 1000:.0f}kbit"
    command = f"tc -n {space} qdisc add dev {device} root tbf rate {kbit} burst {BURST} latency 400ms"
    subprocess.run(command.split(), capture_output=True, text=True, check=True)


def _set(space: str, *settings: str) -> None:
    command = ["ip", "netns", "exec", space, "sysctl", "-qw", *settings]
    subprocess.run(command, capture_output=True, text=True, check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
