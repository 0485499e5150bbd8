"""Sets of CPU numbers as topology files and the kernel write them."""

from __future__ import annotations

import re

from costlab.probes.sysfs import shown


def from_words(mask: str) -> list[int]:
    """CPUs of a comma-separated mask of 32-bit hexadecimal words, most significant first; ValueError for others."""
    words = [w.strip() for w in mask.split(",")]
    if not all(re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", w) for w in words):
        raise ValueError("not a mask of 32-bit words")
    value = 0
    for word in words:
        value = (value << 32) | int(word, 16)
    return bits(value)


def bits(value: int) -> list[int]:
    """Indices of the set bits."""
    return [i for i in range(value.bit_length()) if value >> i & 1]


def listed(cpus: list[int]) -> str:
    """ "0-15,64-79"."""
    return shown(set(cpus))
