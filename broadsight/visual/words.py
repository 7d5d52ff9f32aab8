"""Numbers and text for readers: rounded, with units."""

import math
from collections.abc import Mapping
from typing import Any

NOTHING = "\u2013"  # shown where a number is not known
SPACE = "\u00a0"  # between a number and its unit, which stay on one line


def known(value: Any) -> bool:
    """Tell whether a value is a number that can be shown and drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, digits: int = 3) -> str:
    """Format a number: whole numbers in full, others to so many significant digits, with commas at thousands."""
    if not known(value):
        return NOTHING
    if isinstance(value, int) or not value:
        return f"{int(value):,}"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    if not -4 <= int(power) < 15:
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,.{max(0, digits - 1 - int(power))}f}"


def percent(value: Any) -> str:
    return f"{value:.1f}{SPACE}%" if known(value) else NOTHING


def amount(value: Any) -> str:
    """Format a large number with a letter for its size: 1.23 M."""
    if not known(value):
        return NOTHING
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{number(value / size)}{SPACE}{letter}"
    return number(value)


def milliseconds(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def coordinate(value: float) -> str:
    return f"{round(value, 1):g}"  # pixels of a drawing


def sentence(text: object) -> str:
    """End a text with a full stop, unless it ends a sentence already."""
    words = str(text).strip()
    return words if words.endswith((".", "!", "?")) else f"{words}."


def plural(count: int, thing: str, things: str | None = None) -> str:
    """Count things in words: 1 image, 2 images."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def numbers(row: Mapping[str, Any], *keys: str) -> bool:
    """Tell whether a row has a number under each of these keys."""
    return all(known(row.get(key)) for key in keys)
