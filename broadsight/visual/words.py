"""Text and numbers as a reader meets them: escaped, rounded, with units."""

import html
import math
import re
from collections.abc import Mapping
from typing import Any

NOTHING = "\u2013"  # shown where a number is not known
SPACE = "\u00a0"  # between a number and its unit, which stay on one line

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def escape(text: object) -> str:
    """Any text as HTML, in an attribute too; what cannot be printed becomes a sign that says so."""
    return html.escape(_UNPRINTABLE.sub("\ufffd", str(text)), quote=True)


def known(value: Any) -> bool:
    """Whether it is a number that can be shown and drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, digits: int = 3) -> str:
    """Whole numbers whole, others to so many significant digits, thousands apart."""
    if not known(value):
        return NOTHING
    if isinstance(value, int) or not value:
        return f"{int(value):,}"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    if not -4 <= int(power) < 15:
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,.{max(0, digits - 1 - int(power))}f}"


def percent(value: Any) -> str:
    """A percentage, 0 to 100, to one decimal."""
    return f"{value:.1f}{SPACE}%" if known(value) else NOTHING


def amount(value: Any) -> str:
    """Large numbers in thousands, millions, or thousand millions: 1.23 M."""
    if not known(value):
        return NOTHING
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{number(value / size)}{SPACE}{letter}"
    return number(value)


def sentence(text: object) -> str:
    """With a full stop, escaped."""
    words = str(text).strip()
    return escape(words if words.endswith((".", "!", "?")) else f"{words}.")


def plural(count: int, thing: str, things: str | None = None) -> str:
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def numbers(row: Mapping[str, Any], *keys: str) -> bool:
    """Whether a row has a number under each of these keys."""
    return all(known(row.get(key)) for key in keys)
