"""Two themes of our own and the roles every other theme is mapped to.

Status hues are bluish green, amber and vermilion (crimson on light) in the spirit of Okabe and Ito's colour-blind-safe
set, lightened or darkened until each has at least 4.5:1 contrast on the background; blue is the only accent. Greys have
little tint, so that a terminal of 256 colours still finds four different ones.
"""

from __future__ import annotations

from typing import Final

from textual.color import Color
from textual.theme import Theme

DARK: Final = "costlab-dark"
LIGHT: Final = "costlab-light"

COSTLAB_DARK = Theme(
    name=DARK,
    dark=True,
    primary="#5ab0e6",
    secondary="#8fa3b8",
    accent="#5ab0e6",
    success="#35b893",
    warning="#e5a82e",
    error="#f0794a",
    foreground="#d9dde2",
    background="#121416",
    surface="#1a1d20",
    panel="#24272b",
    variables={
        "status-complete": "#35b893",
        "status-partial": "#e5a82e",
        "status-broken": "#f0794a",
        "accent-text": "#5ab0e6",
        "faint": "#5b6775",
        "cursor-line": "#2d3238",
        "muted": "#8a96a3",
        "on-accent": "#121416",
        "text-muted": "#8a96a3",
    },
)

COSTLAB_LIGHT = Theme(
    name=LIGHT,
    dark=False,
    primary="#005f9e",
    secondary="#55616e",
    accent="#005f9e",
    success="#00694d",
    warning="#8a5a00",
    error="#b0203f",
    foreground="#1d242c",
    background="#fbfaf7",
    surface="#f3f1ec",
    panel="#e8e5de",
    variables={
        "status-complete": "#00694d",
        "status-partial": "#8a5a00",
        "status-broken": "#b0203f",
        "accent-text": "#005f9e",
        "faint": "#9a9c9e",
        "cursor-line": "#dce6ee",
        "muted": "#5c6670",
        "on-accent": "#fbfaf7",
        "text-muted": "#5c6670",
    },
)

OWN_THEMES: Final = (COSTLAB_DARK, COSTLAB_LIGHT)


def role_defaults(theme: Theme) -> dict[str, str]:
    """CSS variables of our roles for a theme that does not define them."""
    return {**_status_roles(theme), **(_ansi_greys() if theme.ansi else _greys(theme))}


def _status_roles(theme: Theme) -> dict[str, str]:
    ink = theme.foreground or theme.primary
    return {
        "status-complete": theme.success or ink,
        "status-partial": theme.warning or ink,
        "status-broken": theme.error or ink,
        "accent-text": theme.accent or theme.primary,
    }


def _ansi_greys() -> dict[str, str]:
    """The terminal's own sixteen colours cannot be blended."""
    return {
        "muted": "ansi_bright_black",
        "faint": "ansi_bright_black",
        "cursor-line": "ansi_default",
        "on-accent": "ansi_black",
    }


def _greys(theme: Theme) -> dict[str, str]:
    """Between ink and paper; fixed colours, since a drawn line has no background to contrast with yet."""
    ink = Color.parse(theme.foreground or ("#d8d8d8" if theme.dark else "#202020"))
    paper = Color.parse(theme.background or ("#121212" if theme.dark else "#f5f5f5"))
    return {
        "muted": ink.blend(paper, 0.35).hex,
        "faint": ink.blend(paper, 0.6).hex,
        "cursor-line": paper.blend(ink, 0.13).hex,
        "on-accent": paper.hex,
    }
