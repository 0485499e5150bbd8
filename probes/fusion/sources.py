"""The source that Inductor generated, by kernel, in bounded size and without the machine's paths. Torch-free."""

from __future__ import annotations

import re

from costlab.probes.fusion.model import KernelSource

LONGEST = 65_536  # characters of one kernel
TOTAL = 8_388_608  # characters of all kernels of a run
_QUOTED = re.compile(r"(?:'''|r'''|\"\"\")(.*?)(?:'''|\"\"\")", re.DOTALL)
_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"<>:]+/)+([^\s/'\"<>:]+)")


class Sources:
    """Sources in the order they were generated; equal ones of several graphs are kept for each graph."""

    def __init__(self, longest: int = LONGEST, total: int = TOTAL) -> None:
        self.kept: list[KernelSource] = []
        self.left_out = 0  # kernels for which there was no room
        self._longest, self._room = longest, total

    def add(self, name: str, phase: str, compile_id: str, body: str) -> None:
        """Keep one kernel's source, cut to the longest allowed; past the total, kernels are only counted."""
        text = clean(body)
        kept = text[: self._longest]
        if len(kept) > self._room:
            self.left_out += 1
            return
        self._room -= len(kept)
        where = "forward" if phase == "inference" else phase
        self.kept.append(KernelSource(name, where, compile_id, language(body), kept, cut=len(kept) < len(text)))


def language(body: str) -> str:
    """Triton or C++, by the call that compiles it."""
    return "cpp" if "async_compile.cpp" in body[:400] or "#include" in body else "triton"


def clean(body: str) -> str:
    """The kernel inside Inductor's compile call, with absolute paths cut to their last part."""
    inside = max(_QUOTED.findall(body), key=len, default="")
    return _PATH.sub(r"\1", inside.strip() or body.strip()) + "\n"
