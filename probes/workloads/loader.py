"""Finds a workload by name, or loads a user's `path/to/file.py:function`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from costlab.probes.workloads.base import (
    Workload,
    WorkloadContext,
    WorkloadError,
    coerce,
    initialise_lazy_modules,
    takes_nothing,
)


def load(name: str, ctx: WorkloadContext) -> Workload:
    """Build the workload; every failure of a user's file becomes a WorkloadError with the file's own line."""
    if ":" in name:
        return _load_user(name, ctx)
    from costlab.probes.workloads import gpt2, llama, resnet

    makers = {"llama": llama.make, "gpt2": gpt2.make, "resnet50": resnet.make}
    if name not in makers:
        raise WorkloadError(f"no workload '{name}'; built in: {', '.join(makers)}; your own: path/to/file.py:make")
    return makers[name](ctx)


def _load_user(name: str, ctx: WorkloadContext) -> Workload:
    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    make = _function(path, function or "make")
    where = f"{path.name}:{function}"
    try:
        with _as_program(path):
            result = make() if takes_nothing(make) else make(ctx)
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"{where} raised {_told(error)} ({_user_line(error, path)})") from error
    workload = coerce(result, where)
    try:
        initialise_lazy_modules(workload, ctx.device)
    except Exception as error:  # the user's model or loss
        line = _user_line(error, path)
        raise WorkloadError(
            f"{where}: a first batch for the model's lazy modules raised {_told(error)} ({line})"
        ) from error
    if workload.name == "custom":
        workload.name = path.stem
        workload.title = workload.title or path.stem
    workload.source = workload.source or where
    return workload


def _function(path: Path, function: str) -> Callable[..., object]:
    if not path.is_file():
        raise WorkloadError(f"no such file: {path}; give the path to your workload as path/to/file.py:make")
    module = _import_file(path)
    make = getattr(module, function, None)
    if not callable(make):
        found = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        listed = ", ".join(found[:8]) or "no functions"
        raise WorkloadError(f"{path.name} has no function '{function}'; it defines: {listed}")
    return make  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    """Import by path as the user's script would: its own folder first on sys.path."""
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"{path.stem}_workload" if taken else path.stem  # a file called json.py must not be everybody's json
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path.name} is not a Python file; give path/to/file.py:make")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and dataclasses look the module up by name
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with _as_program(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = _user_line(error, path)
        raise WorkloadError(f"importing {path.name} failed: {_told(error)} ({line})") from error
    return module


@contextlib.contextmanager
def _as_program(path: Path) -> Iterator[None]:
    """Let argparse in the user's file find its defaults, not costlab's own arguments."""
    before, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = before


def _told(error: BaseException) -> str:
    if isinstance(error, SystemExit) and error.code == 2:  # argparse's
        return f"SystemExit: {error}; costlab passes no command line on, so give your arguments defaults"
    return f"{type(error).__name__}: {error}"


def _user_line(error: BaseException, path: Path) -> str:
    """`file.py:line` of the deepest frame inside the user's file, for the one-line message."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{path.name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).name == path.name]
    return f"{path.name}:{own[-1].lineno}" if own else path.name
