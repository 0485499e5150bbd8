"""List prices per GPU-hour: a small table that comes with costlab, the user's own file over it, or a given price.

A price is quoted, never measured. The user's file is `prices.toml` in the store's root, in the form of app/prices.toml.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from importlib import resources
from pathlib import Path

import msgspec

from costlab.app.store.home import home
from costlab.app.text import plain
from costlab.probes.records import Environment

FILE = "prices.toml"


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `match` are word sequences that all occur in the device's name, in any case."""

    gpu: str
    match: list[str]
    per_hour: float
    date: str  # when the price was read, YYYY-MM
    source: str
    currency: str = "USD"


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """The price used for a run. `per` says of what an hour: GPU or rank."""

    per_hour: float
    currency: str
    date: str
    note: str
    per: str = "GPU-hour"


class PriceError(ValueError):
    """The price file cannot be used; one line."""


def parse(text: str, origin: str) -> list[Price]:
    """The `[[price]]` entries of a TOML text; raise PriceError naming `origin` where they are wrong."""
    try:
        prices = msgspec.convert(tomllib.loads(text).get("price", []), list[Price])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise PriceError(f"{origin} cannot be read: {plain(error, 160)}") from error
    bad = [p.gpu for p in prices if not p.per_hour > 0 or not p.match]
    if bad:
        raise PriceError(f"{origin}: '{plain(bad[0], 60)}' needs a price above zero and at least one word to match")
    return prices


@lru_cache(maxsize=1)
def builtin_prices() -> list[Price]:
    """The table that comes with costlab."""
    return parse(resources.files("costlab.app").joinpath(FILE).read_text(encoding="utf-8"), FILE)


def user_prices(path: Path | None = None) -> list[Price]:
    """The user's own table; empty without a file. Raise PriceError for one that cannot be read."""
    file = path or home() / FILE
    try:
        return parse(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise PriceError(f"{file} cannot be read: {plain(error, 120)}") from error


def find(name: str, prices: list[Price]) -> Price | None:
    """The most specific price for a device name: the one with most words, all of them whole words of the name."""
    fits = [p for p in prices if all(re.search(rf"(?i)(?<!\w){re.escape(w)}(?!\w)", name) for w in p.match)]
    return max(fits, key=lambda p: (len(p.match), sum(map(len, p.match))), default=None)


def quote_for(environment: Environment, price: float | None, note: str = "") -> tuple[Quote | None, str]:
    """The price of one GPU-hour of this run's devices and a remark: why there is none, or what is wrong with a file."""
    on_cpu = environment.device == "cpu"
    if price is not None:
        how = note or "given with --price"
        return Quote(per_hour=price, currency="USD", date="", note=how, per="rank-hour" if on_cpu else "GPU-hour"), ""
    if on_cpu:
        return None, "no GPU, and no price was given: pass --price for money figures"
    names = sorted({g.name for g in environment.gpus})
    if len(names) != 1:
        return None, "the GPUs are not known or not alike: pass --price for money figures"
    return _listed(names[0])


def _listed(name: str) -> tuple[Quote | None, str]:
    problem = ""
    try:
        own = find(name, user_prices())
    except PriceError as error:
        own, problem = None, str(error)
    entry: Price | None = own or find(name, builtin_prices())
    if entry is None:
        return None, problem or f"no list price for {plain(name, 60)}: pass --price, or add it to {FILE}"
    kind = "your price table" if own else "list price, on-demand, edit or pass --price"
    how = f"{kind} ({entry.source}, {entry.date})"
    return Quote(per_hour=entry.per_hour, currency=entry.currency, date=entry.date, note=how), problem
