"""From what a user calls DATA to the images that a classifier is evaluated on."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from ..stratify import METHOD
from .hold_out import hold_out
from .registry import Options, Source, check_places, open_parts

Which = Literal["auto", "train", "val", "test", "all"]


@dataclass(frozen=True)
class Found:
    """Images to evaluate on."""

    source: Source
    place: str
    notes: tuple[str, ...]  # what the user should know
    description: dict[str, Any]  # what was found, as plain types


def open_part(
    data: str, part: Which = "auto", *, split: float | None = None, method: int = METHOD, **how: Any
) -> Found:
    """Open one part of DATA, as `resolve` reads it.

    Args:
        part: "auto" is the part set apart for validation, or everything where nothing is; "train", "val" and, of
            scenes, "test" are those parts; "all" is for data without parts.
        split: Where nothing is set apart, take the fraction of each class that training with this split and seed would
            hold out (or, as "train", the rest).
        method: Of that hold-out, as the run began with it; see `stratify.METHOD`.
        how: As `Options` has it.
    """
    options = Options(**how)
    check_places([data], options.root, options.download)
    if split is not None and not 0 < split < 1:
        raise ValueError(f"split={split} is not between 0 and 1; 0.1 is a tenth of each class")
    kind, parts = open_parts(data, options)
    if split is not None:
        if "all" not in parts:
            raise ValueError(f"--split {split}, but {data} has parts of its own: {', '.join(parts)}; leave --split out")
        parts = dict(zip(("train", "val"), hold_out(parts["all"], split, options.seed, method), strict=True))
    chosen = next((name for name in (("val", "all", "train") if part == "auto" else (part,)) if name in parts), None)
    if chosen is None:
        there = ", ".join(parts)
        raise ValueError(f"{data} has no part {part!r}; it has {there}; leave --part out to take what there is")
    found = parts[chosen]
    alone = f"{data} has a part to train on alone, so that one is evaluated"
    notes = (*[alone] * (part == "auto" and chosen == "train"), *found.notes)
    about = dict(kind=kind, data=data, part=chosen, place=found.place, images=len(found.source), split=split)
    return Found(found.source, found.place, notes, about | found.about)


def same_data(one: str, other: str) -> bool:
    """Whether two names of data mean the same."""
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))
