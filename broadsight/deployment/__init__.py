"""Models as files that other runtimes execute, with everything inside that is needed to use them."""

from .agreement import Agreement, compare, rounding_of
from .capture import capture
from .description import Description
from .formats import FORMATS, need, open_artefact
from .prepare import prepare
from .session import Session

__all__ = [
    "FORMATS",
    "Agreement",
    "Description",
    "Session",
    "capture",
    "compare",
    "need",
    "open_artefact",
    "prepare",
    "rounding_of",
]
