"""Colours of the report, light and dark: all are made from the palette, with enough contrast to be read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import ImageColor

from ..visual import colours
from ..visual.plots import PALETTE

LEVELS = 10  # steps of a heat table beside the empty one
GRAPHIC, TEXT = 3.0, 4.5  # contrast that WCAG 2.1 asks of graphics and of text
_rgb: Any = ImageColor.getrgb


@dataclass(frozen=True)
class Theme:
    page: str
    surface: str
    sunken: str
    ink: str
    muted: str
    edge: str


LIGHT = Theme(page="#f6f7f8", surface="#ffffff", sunken="#eef0f2", ink="#1b1f24", muted="#59626c", edge="#dfe3e7")
DARK = Theme(page="#0f1216", surface="#171b20", sunken="#20262c", ink="#e7eaed", muted="#a2abb5", edge="#2c333b")


def mix(colour: str, other: str, share: float) -> str:
    """Mix two colours; `share` is that of the other."""
    pairs = zip(_rgb(colour), _rgb(other), strict=True)
    return "#" + "".join(f"{round((1 - share) * a + share * b):02x}" for a, b in pairs)


def contrast(colour: str, other: str) -> float:
    """Contrast of two colours as WCAG defines it, 1 to 21."""
    return colours.contrast(_rgb(colour), _rgb(other))


def readable(colour: str, theme: Theme, at_least: float) -> str:
    """Mix as much ink into a colour as it needs to be seen on the theme's surface."""
    mixed = (mix(colour, theme.ink, share / 20) for share in range(21))
    return next(one for one in mixed if contrast(one, theme.surface) >= at_least)


def heat(theme: Theme, colour: str) -> list[tuple[str, str]]:
    """Backgrounds from the surface to the colour in equal steps, each with the text colour that is read best on it."""
    full = readable(colour, theme, GRAPHIC)
    grounds = [mix(theme.surface, full, level / LEVELS) for level in range(LEVELS + 1)]
    return [(ground, "#{:02x}{:02x}{:02x}".format(*colours.ink(_rgb(ground)))) for ground in grounds]


def style() -> str:
    """CSS variables of both themes. What is printed is always light."""
    light, dark = ("".join(_variables(theme)) for theme in (LIGHT, DARK))
    levels = [f"{kind}{level}" for kind in "he" for level in range(LEVELS + 1)]
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        + "".join(f".c{i}{{color:var(--c{i})}}" for i in range(len(PALETTE)))
        + "".join(f".{one}{{background:var(--{one});color:var(--{one}t)}}" for one in levels)
    )


def _variables(theme: Theme) -> Iterator[str]:
    for name, value in vars(theme).items():
        yield f"--{name}:{value};"
    yield f"--link:{readable(PALETTE[0], theme, TEXT)};--warn:{readable(PALETTE[5], theme, TEXT)};"
    for i, colour in enumerate(PALETTE):
        yield f"--c{i}:{readable(colour, theme, GRAPHIC)};"
    for kind, colour in (("h", PALETTE[0]), ("e", PALETTE[5])):
        for level, (ground, text) in enumerate(heat(theme, colour)):
            yield f"--{kind}{level}:{ground};--{kind}{level}t:{text};"
