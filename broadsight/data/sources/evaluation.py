"""From what a user calls DATA to the images that a classifier is evaluated on."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..stratify import METHOD
from .hold_out import hold_out
from .registry import Options, Source, cache_folder, check_places, open_parts

Which = Literal["auto", "train", "val", "test", "all"]


@dataclass(frozen=True)
class Found:
    """Images to evaluate on.

    Args:
        place: Where they are.
        notes: What the user should know.
        description: What was found, as plain types.
    """

    source: Source
    place: str
    notes: tuple[str, ...]
    description: dict[str, Any]


def open_part(
    data: str,
    part: Which = "auto",
    *,
    split: float | None = None,
    seed: int = 0,
    channels: int = 3,
    scenes_size: int = 64,
    root: str | None = None,
    download: bool = False,
    cache: str | Path | None = None,
    method: int = METHOD,
) -> Found:
    """Open one part of DATA.

    Args:
        data, seed, channels, scenes_size, root, download, cache: As for `resolve`.
        part: "auto" is the part set apart for validation, or everything where nothing is; "train", "val" and, of
            scenes, "test" are those parts; "all" is for data without parts.
        split: Where nothing is set apart, take the fraction of each class that training with this split and seed would
            hold out (or, as "train", the rest).
        method: Of that hold-out, as the run began with it; see `stratify.METHOD`.
    """
    check_places([data], root, download)
    if split is not None and not 0 < split < 1:
        raise ValueError(f"split={split} is not between 0 and 1; 0.1 is a tenth of each class")
    kind, parts = open_parts(data, Options(channels, cache_folder(cache), root, download, seed, scenes_size))
    if split is not None:
        if "all" not in parts:
            raise ValueError(f"--split {split}, but {data} has parts of its own: {', '.join(parts)}; leave --split out")
        parts = dict(zip(("train", "val"), hold_out(parts["all"], split, seed, method), strict=True))
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
