"""Source positions and messages without absolute paths: below the working directory relative, else the base name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

_ABSOLUTE = re.compile(r"(?<![\w.:/\\-])/(?:[\w.+@~-]+/)*[\w.+@~-]+")
_GENERATED = re.compile(r"<eval_with_key>\S* from (.+):(\d+) in .*", re.S)  # the "file" of torch.fx's generated code
_PACKAGES = ("site-packages/", "dist-packages/")
_WRAPPERS = {"torch/distributed/fsdp/": "FSDP", "torch/nn/parallel/distributed.py": "DDP"}
_DISABLING = re.compile(r"`disable` in file `\S*_dynamo/decorators\.py`")
OWN_HOOKS = "hooks of its own, which are not compiled"
OWN_BUCKETS = "DDP cuts the compiled model at the buckets of its gradients"  # torch's DDPOptimizer


def shorten(path: str, cwd: Path | None = None) -> str:
    """`path` relative to an installed package's root or to `cwd`; any other absolute path as its base name."""
    for marker in _PACKAGES:
        if marker in path:
            return path.rpartition(marker)[2]
    if not path.startswith("/"):
        return scrub(path, cwd)
    try:
        return str(Path(path).relative_to(cwd or Path.cwd()))
    except ValueError:
        return Path(path).name


def position(path: str, line: int, cwd: Path | None = None) -> str:
    """`file.py:line`, or "" for no file; generated code has the position of what it was generated from."""
    generated = _GENERATED.fullmatch(path)
    if generated:
        return f"{shorten(generated[1], cwd)}:{generated[2]}"
    return f"{shorten(path, cwd)}:{line}" if path else ""


def scrub(text: str, cwd: Path | None = None) -> str:
    """Replace absolute paths inside a message by their short form."""
    return _ABSOLUTE.sub(lambda m: shorten(m.group(0), cwd), text)


def wrapper_of(*files: str) -> str:
    """The sharding wrapper that one of the files belongs to, "" if none does."""
    return next((name for file in files for part, name in _WRAPPERS.items() if part in file), "")


def wrapped(reason: str, files: Iterable[str]) -> str:
    """A graph break's reason; the sharding wrapper's doing where one of its files is in the stack.

    Without a stack its words tell: nobody but such hooks calls torch's `disable` where it is traced.
    """
    if "DDPOptimizer intentional" in reason:
        return OWN_BUCKETS
    wrapper = wrapper_of(*files) or ("A wrapper of the layers" if _DISABLING.search(reason) else "")
    return f"{wrapper} runs {OWN_HOOKS}" if wrapper else reason


def user_frame(stack: tuple[tuple[str, int], ...]) -> tuple[str, int]:
    """The innermost (file, line) of the user's own code, else of any code but torch's, else the innermost."""
    own = [f for f in stack if not installed(f[0])]
    others = [f for f in stack if "/torch/" not in f[0]]
    for choice in (own, others, list(stack)):
        if choice:
            return choice[-1]
    return "", 0


def installed(path: str) -> bool:
    """Whether a file belongs to an installed package or to Python."""
    return any(m in path for m in _PACKAGES) or (path.startswith(sys.base_prefix) and "/lib/python" in path)
