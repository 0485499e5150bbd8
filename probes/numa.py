"""CPU and memory binding of this process by system calls (no libnuma), and what /proc says of it. Torch-free."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from costlab.probes.sysfs import ROOT, read

MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND = 0, 1, 2
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy
_MASK_BITS = 1024
_PROBE_BYTES = 8 << 20
_PAGES = re.compile(r"\bN(\d+)=(\d+)")


class NumaRefused(OSError):
    """The kernel or the platform does not let this process place its memory; the message says why."""


def _syscall(which: int, *args: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        raise NumaRefused(f"memory policies are not known on {platform.system()} {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[which]), *args) != 0:
        code = ctypes.get_errno()
        hint = " (the container's seccomp profile forbids it)" if code in (errno.EPERM, errno.ENOSYS) else ""
        raise NumaRefused(f"set_mempolicy: {os.strerror(code)}{hint}")


def set_policy(mode: int, node: int | None = None) -> None:
    """set_mempolicy of this thread and the threads it starts from now on; raises NumaRefused."""
    words = _MASK_BITS // 64
    mask = (ctypes.c_ulong * words)()
    if node is not None:
        mask[node // 64] = 1 << (node % 64)
    pointer = mask if node is not None else None
    _syscall(0, ctypes.c_int(mode), pointer, ctypes.c_ulong(_MASK_BITS + 1 if node is not None else 0))


def get_policy() -> tuple[int, list[int]]:
    """Mode and nodes of this thread's policy; raises NumaRefused."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_MASK_BITS // 64))()
    _syscall(1, ctypes.byref(mode), mask, ctypes.c_ulong(_MASK_BITS), None, ctypes.c_ulong(0))
    return mode.value & 0xFF, [64 * i + b for i, word in enumerate(mask) for b in range(64) if word >> b & 1]


def pages_by_node(root: Path = ROOT, address: int | None = None) -> dict[int, int] | None:
    """Pages of this process by NUMA node from numa_maps, or of the mapping that begins at or holds `address`.

    None where the kernel has no numa_maps. Pages of files shared with other processes count too.
    """
    text = read(root / "proc/self/numa_maps")
    if text is None:
        return None
    lines = text.splitlines()
    if address is not None:
        starts = [(int(line.split(" ", 1)[0], 16), line) for line in lines if line]
        held = [line for start, line in starts if start <= address]
        lines = held[-1:]
    pages: Counter[int] = Counter()
    for line in lines:
        match = re.search(r"kernelpagesize_kB=(\d+)", line)
        scale = int(match[1]) // 4 if match else 1  # huge pages count as the 4 KiB pages they stand for
        for node, count in _PAGES.findall(line):
            pages[int(node)] += int(count) * max(scale, 1)
    return dict(pages)


def share_elsewhere(pages: dict[int, int] | None, node: int) -> float | None:
    """Part of the pages that lie on other nodes than `node`, None where nothing is known."""
    total = sum(pages.values()) if pages else 0
    return 1 - (pages or {}).get(node, 0) / total if total else None


def probe_pages(root: Path = ROOT) -> dict[int, int] | None:
    """Where the kernel puts fresh memory now: touches 8 MiB and looks at numa_maps."""
    with mmap.mmap(-1, _PROBE_BYTES) as area:
        for offset in range(0, _PROBE_BYTES, mmap.PAGESIZE):
            area[offset] = 1
        handle = ctypes.c_char.from_buffer(area)
        found = pages_by_node(root, ctypes.addressof(handle))
        del handle
    return found


@contextmanager
def memory_on(node: int | None) -> Iterator[None]:
    """Memory allocated inside comes from `node` and no other; nothing is done for None. Raises NumaRefused."""
    if node is None:
        yield
        return
    mode, nodes = get_policy()
    set_policy(MPOL_BIND, node)
    try:
        yield
    finally:
        set_policy(mode, nodes[0] if mode != MPOL_DEFAULT and len(nodes) == 1 else None)
