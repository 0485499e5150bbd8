"""Fusion-rate targets by layer class: those that come with costlab, the user's own before them, and the gap to them.

The user's file is `targets.toml` in the store's root, or the one given with --targets, in the form of the built-in one.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import resources
from pathlib import Path

import msgspec

from costlab.app.analysis.cost import money_per_ms
from costlab.app.analysis.views import CostView, FusionView
from costlab.app.text import plain

FILE = "targets.toml"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The target of the classes whose lower-case name matches a shell-style pattern."""

    pattern: str
    target: float


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The first rule that matches decides, else `default`; `problem` says why a file was left out."""

    default: float
    rules: tuple[Rule, ...] = ()
    problem: str = ""

    def of(self, layer_class: str) -> float:
        """Target of a layer class."""
        name = layer_class.lower()
        return next((r.target for r in self.rules if fnmatch.fnmatchcase(name, r.pattern.lower())), self.default)


class TargetsError(ValueError):
    """The target file cannot be used; one line."""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    default: float | None = None
    rules: tuple[Rule, ...] = msgspec.field(default=(), name="class")


_chosen: ContextVar[Targets | None] = ContextVar("targets", default=None)


def parse(text: str, origin: str, base: Targets | None = None) -> Targets:
    """The targets of a TOML text, before those of `base`; raise TargetsError naming `origin` where they are wrong."""
    try:
        found = msgspec.convert(tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise TargetsError(f"{plain(origin)} cannot be read: {plain(error, 160)}") from error
    default = found.default if found.default is not None else base.default if base else None
    if default is None:
        raise TargetsError(f"{plain(origin)} has no default target")
    for name, value in (("default", default), *((r.pattern, r.target) for r in found.rules)):
        if not 0 < value <= 1:
            raise TargetsError(f"{plain(origin)}: target of '{plain(name, 40)}' is {value:g}; give a rate in (0, 1]")
    return Targets(default=default, rules=(*found.rules, *(base.rules if base else ())))


@lru_cache(maxsize=1)
def builtin() -> Targets:
    """The targets that come with costlab."""
    return parse(resources.files("costlab.app.analysis").joinpath(FILE).read_text(encoding="utf-8"), FILE)


def read(path: Path) -> Targets:
    """A user's file over the built-in targets. Raises TargetsError."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path), builtin())
    except (OSError, UnicodeDecodeError) as error:
        raise TargetsError(f"{plain(path)} cannot be read: {plain(error, 120)}") from error


@contextmanager
def using(targets: Targets) -> Iterator[None]:
    """Take these targets inside."""
    token = _chosen.set(targets)
    try:
        yield
    finally:
        _chosen.reset(token)


def active() -> Targets:
    """Those in use: the chosen ones, else the store's file over the built-in ones, else the built-in ones."""
    from costlab.app.store.home import home

    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    path = home() / FILE
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return builtin()
    return _stored(path, stamp)


@lru_cache(maxsize=4)
def _stored(path: Path, _stamp: int) -> Targets:
    try:
        return read(path)
    except TargetsError as error:
        return msgspec.structs.replace(builtin(), problem=str(error))


def gap_bytes(moved: int, lost: int, target: float) -> int:
    """Bytes that must go for the rate 1 - lost / moved to reach the target; each goes from both lost and moved.

    Never more than what is lost.
    """
    if moved <= 0:
        return 0
    return min(lost, max(0, round((lost - (1 - target) * moved) / target)))


def priced(view: FusionView, cost: CostView | None) -> FusionView:
    """The view with the gap of each class in money over the run's steps, where a price and a length are known."""
    price = cost.price_per_gpu_hour.value if cost and cost.price_per_gpu_hour else None
    if cost is None or price is None or not cost.run_steps:
        return view
    rate = money_per_ms(price, cost.gpus) * cost.run_steps
    rows = [
        msgspec.structs.replace(c, gap_run_money=None if c.gap_ms is None else c.gap_ms * rate) for c in view.classes
    ]
    return msgspec.structs.replace(view, classes=rows)
