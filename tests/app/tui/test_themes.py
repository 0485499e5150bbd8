"""Our own themes can be read by everyone, on 256 colours too."""

from __future__ import annotations

import itertools

import pytest
from rich.color import ColorSystem
from textual.color import Color
from textual.theme import BUILTIN_THEMES, Theme

from costlab.app.tui.themes import OWN_THEMES, role_defaults

INKS = ("status-complete", "status-partial", "status-broken", "accent-text", "muted")


def luminance(color: Color) -> float:
    """Relative luminance as WCAG defines it."""

    def linear(channel: int) -> float:
        c = channel / 255
        return c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4

    return 0.2126 * linear(color.r) + 0.7152 * linear(color.g) + 0.0722 * linear(color.b)


def contrast(a: Color, b: Color) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", OWN_THEMES, ids=lambda t: t.name)
def test_every_ink_has_enough_contrast_on_every_ground(theme: Theme) -> None:
    grounds = [Color.parse(c) for c in (theme.background, theme.surface, theme.variables["cursor-line"]) if c]
    for ink, ground in itertools.product(INKS, grounds):
        wanted = 4.5 if ground == grounds[0] else 3.9
        assert contrast(Color.parse(theme.variables[ink]), ground) >= wanted, ink
    on_accent, accent = theme.variables["on-accent"], theme.variables["accent-text"]
    assert contrast(Color.parse(on_accent), Color.parse(accent)) >= 4.5


def seen_by_deuteranopes(color: Color) -> tuple[float, float]:
    """What is left of a colour without the green cones (Viénot 1999): lightness and the blue-yellow axis."""
    r, g, b = ((c / 255) ** 2.2 for c in (color.r, color.g, color.b))
    red_green = 0.29275 * r + 0.70725 * g
    blue = -0.02234 * r + 0.02234 * g + b
    return red_green**0.4545, blue**0.4545 if blue > 0 else 0.0


@pytest.mark.parametrize("theme", OWN_THEMES, ids=lambda t: t.name)
def test_status_colours_differ_without_green_cones(theme: Theme) -> None:
    seen = [seen_by_deuteranopes(Color.parse(theme.variables[name])) for name in INKS[:3]]
    for a, b in itertools.combinations(seen, 2):
        assert max(abs(a[0] - b[0]), abs(a[1] - b[1])) > 0.03


def test_the_dark_greys_stay_apart_on_256_colours() -> None:
    dark = OWN_THEMES[0]
    greys = (dark.background, dark.surface, dark.panel, dark.variables["cursor-line"])
    numbers = {Color.parse(c).rich_color.downgrade(ColorSystem.EIGHT_BIT).number for c in greys if c}
    assert len(numbers) == 4


@pytest.mark.parametrize("name", sorted(BUILTIN_THEMES))
def test_other_themes_get_roles_of_their_own_colours(name: str) -> None:
    roles = role_defaults(BUILTIN_THEMES[name])
    assert set(roles) == set(INKS) | {"faint", "cursor-line", "on-accent"}
    assert all(roles.values())
