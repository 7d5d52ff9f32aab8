"""Refusals that several layers share, each before torch complains about something else."""

from timm.layers import register_notrace_function
from torch import Tensor

from ..errors import check_choice

# Where a paper's printed equations and its printed sizes, or its released code, part: which of the two is built.
READINGS = ("fitted", "equations")


@register_notrace_function
def check_images(x: Tensor, in_chans: int) -> None:
    """Expects (B, in_chans, H, W) with nothing of size 0."""
    if x.ndim != 4 or x.shape[1] != in_chans:
        raise ValueError(f"images have shape {tuple(x.shape)}; expected (batch, {in_chans}, height, width)")
    if 0 in x.shape[2:]:
        raise ValueError(f"images are {x.shape[2]}x{x.shape[3]} pixels; height and width must be at least 1")
    if x.shape[0] == 0:
        raise ValueError("the batch holds no image; expected at least one")


def check_reading(reading: str) -> None:
    """Expects one of the READINGS."""
    check_choice("reading", reading, READINGS)


def check_divides(what: str, number: int, argument: str, parts: int) -> None:
    """Expects a number that splits into equal parts."""
    if parts < 1 or number % parts:
        raise ValueError(f"{what}={number} does not split into {argument}={parts}; choose a divisor of {number}")
