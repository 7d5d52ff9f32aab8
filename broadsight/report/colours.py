"""Colours of the report, light and dark: all are made from the palette, with enough contrast to be read."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..visual.plots import PALETTE

LEVELS = 10  # steps of a heat table beside the empty one
GRAPHIC, TEXT = 3.0, 4.5  # contrast that WCAG 2.1 asks of graphics and of text


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
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round((1 - share) * a + share * b):02x}" for a, b in pairs)


def contrast(colour: str, other: str) -> float:
    """Contrast of two colours as WCAG defines it, 1 to 21."""
    dark, light = sorted((_luminance(colour), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def readable(colour: str, theme: Theme, at_least: float) -> str:
    """Mix as much ink into a colour as it needs to be seen on the theme's surface."""
    shares = (share / 20 for share in range(21))
    return next(
        c for c in (mix(colour, theme.ink, share) for share in shares) if contrast(c, theme.surface) >= at_least
    )


def heat(theme: Theme, colour: str) -> list[tuple[str, str]]:
    """Backgrounds from the surface to the colour in equal steps, each with the text colour that is read best on it."""
    full = readable(colour, theme, GRAPHIC)
    grounds = [mix(theme.surface, full, level / LEVELS) for level in range(LEVELS + 1)]
    return [(ground, max("#000000", "#ffffff", key=lambda ink: contrast(ink, ground))) for ground in grounds]


def style() -> str:
    """CSS variables of both themes. What is printed is always light."""
    return (
        f":root{{{''.join(_variables(LIGHT))}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{''.join(_variables(DARK))}}}}}\n"
        + "".join(f".c{i}{{color:var(--c{i})}}" for i in range(len(PALETTE)))
        + "".join(
            f".{kind}{i}{{background:var(--{kind}{i});color:var(--{kind}{i}t)}}"
            for kind in "he"
            for i in range(LEVELS + 1)
        )
    )


def _variables(theme: Theme) -> Iterator[str]:
    for name in ("page", "surface", "sunken", "ink", "muted", "edge"):
        yield f"--{name}:{getattr(theme, name)};"
    yield f"--link:{readable(PALETTE[0], theme, TEXT)};--warn:{readable(PALETTE[5], theme, TEXT)};"
    for i, colour in enumerate(PALETTE):
        yield f"--c{i}:{readable(colour, theme, GRAPHIC)};"
    for kind, colour in (("h", PALETTE[0]), ("e", PALETTE[5])):
        for level, (ground, text) in enumerate(heat(theme, colour)):
            yield f"--{kind}{level}:{ground};--{kind}{level}t:{text};"


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(colour: str) -> float:
    parts = [c / 255 for c in _channels(colour)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
