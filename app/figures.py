"""Numbers as people read them: three significant digits, thousands separators, a unit. One place for all renderers.

A missing or non-finite value is shown as `MISSING`, never as zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from costlab.app.analysis.views import Figure

MISSING = "–"
_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_EIGHTHS = " ▏▎▍▌▋▊▉"


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits: 0.0123, 9.85, 114, 144,000."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    rounded = round(value, digits - 1 - size)
    if rounded and math.floor(math.log10(abs(rounded))) > size:
        size += 1
    if size < -6:
        return f"{value:.{digits - 1}e}"
    return f"{rounded:,.{max(digits - 1 - size, 0)}f}"


def count(value: float | None) -> str:
    """A whole number with thousands separators and all its digits."""
    return MISSING if value is None or not math.isfinite(value) else f"{round(value):,}"


def counted(number: int, what: str) -> str:
    """1 round, 3 rounds, 1,200 steps."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def fused_kernels(by_name: Mapping[str, int]) -> str:
    """Fused kernels and how many of each: 22 x add_norm, 1 x linear_cross_entropy."""
    return ", ".join(f"{count(number)} x {name}" for name, number in by_name.items())


def times(value: float | None) -> str:
    """How often per step: whole numbers without decimals, others to three digits."""
    return count(value) if value is not None and value == round(value) else number(value)


def _with(value: float | None, unit: str) -> str:
    text = number(value)
    return text if text == MISSING else f"{text} {unit}"


def ms(value: float | None) -> str:
    """A time given in ms: µs below 0.1 ms, seconds from 1,000 ms on."""
    if value is None or not math.isfinite(value):
        return MISSING
    if 0 < abs(value) < 0.1:
        return _with(value * 1e3, "µs")
    return seconds(value / 1e3) if abs(value) >= 999.5 else _with(value, "ms")


def seconds(value: float | None) -> str:
    """A time given in seconds: ms below one second, minutes from 120 s on, hours from 120 min on."""
    if value is None or not math.isfinite(value):
        return MISSING
    if 0 < abs(value) < 0.9995:
        return ms(value * 1e3)
    if abs(value) >= 7200:
        return _with(value / 3600, "h")
    return _with(value / 60, "min") if abs(value) >= 120 else _with(value, "s")


def size(value: float | None) -> str:
    """Bytes in decimal units: 17.1 GB."""
    if value is None or not math.isfinite(value):
        return MISSING
    power = 0
    while abs(value) >= 999.5 and power < len(_BYTES) - 1:
        value, power = value / 1e3, power + 1
    return _with(value, _BYTES[power])


def share(value: float | None) -> str:
    """A fraction as per cent: 47 %, 8.6 %, <0.1 %."""
    if value is None or not math.isfinite(value):
        return MISSING
    percent = 100 * value
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.05:
        return "<0.1 %" if percent > 0 else ">-0.1 %"
    return f"{percent:.0f} %" if abs(percent) >= 9.95 else f"{percent:.1f} %"


def rate(value: float | None) -> str:
    """A fusion rate: two decimals, cut rather than rounded so that 1.00 means nothing was lost."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{math.floor(value * 100 + 1e-6) / 100:.2f}"


def money(value: float | None, currency: str = "USD") -> str:
    """An amount with its currency: $1.53, $0.000123, 1.53 CHF."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:,.2f}" if 1 <= abs(value) < 1000 else number(value)
    return f"{_SYMBOLS[currency]}{text}" if currency in _SYMBOLS else f"{text} {currency}"


def value(amount: float | None, unit: str) -> str:
    """`amount` in the form its unit asks for; an unknown unit is appended."""
    plain_units = {"ms": ms, "s": seconds, "B": size, "fraction": share, "rate": rate, "count": count}
    if unit in plain_units:
        return plain_units[unit](amount)
    currency, _, per = unit.partition(" ")
    currency, slash, what = currency.partition("/")
    if currency in _SYMBOLS or (currency.isupper() and len(currency) == 3):
        text = money(amount, currency)
        return text if text == MISSING else text + (f"/{what}" if slash else "") + (f" {per}" if per else "")
    return _with(amount, unit)


def figure(item: Figure | None) -> str:
    """A figure's value with its unit."""
    return MISSING if item is None else value(item.value, item.unit)


def brief(item: Figure | None) -> str:
    """A figure's value without the "per ..." of its unit, where a label says that already."""
    return MISSING if item is None else value(item.value, item.unit.partition(" per ")[0])


def interval(item: Figure | None) -> str:
    """A figure's interval, "[low, high]" in its unit, or "" where there is none."""
    if item is None or item.low is None or item.high is None:
        return ""
    unit = item.unit.partition(" per ")[0]
    return f"[{value(item.low, unit)}, {value(item.high, unit)}]"


def resolved(item: Figure | None) -> str:
    """A difference of times: its value, or "< high" where its interval holds zero, so that noise is not read as one.

    An interval below zero says no more than that nothing is there: "≤ 0".
    """
    if item is None or item.low is None or item.high is None or item.low > 0:
        return figure(item)
    return f"< {value(item.high, item.unit)}" if item.high > 0 else f"≤ {value(0.0, item.unit)}"


def footnote(item: Figure) -> str:
    """Where a figure comes from: "measured, n=20: median of the timed steps"."""
    sample = "" if item.n is None else f", n={item.n}"
    return f"{item.source}{sample}: {item.how}" if item.how else f"{item.source}{sample}"


def bar(fraction: float | None, width: int) -> str:
    """A bar of eighth blocks, at most `width` cells; anything above zero shows at least one eighth."""
    if fraction is None or not math.isfinite(fraction) or fraction <= 0:
        return ""
    eighths = max(1, round(min(fraction, 1.0) * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
