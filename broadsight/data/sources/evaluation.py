"""From what a user calls DATA to the images that a classifier is evaluated on."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..stratify import METHOD
from ..view import Grey
from . import Source, cache_folder, check_places, hold_out, open_parts, scenes_count

Which = Literal["auto", "train", "val", "test", "all"]


@dataclass(frozen=True)
class Found:
    """Images to evaluate on.

    Args:
        place: Where they are.
        notes: What the user should know.
        description: What was resolved, as plain types.
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
    """Opens one part of DATA.

    Args:
        data, seed, channels, scenes_size, root, download, cache: As for `resolve`.
        part: "auto" is the part set apart for validation, or everything where nothing is; "train", "val" and, of
            scenes, "test" are those parts; "all" is for data without parts.
        split: Where nothing is set apart, take the fraction of each class that training with this split and seed would
            hold out (or, as "train", the rest).
        method: Of that hold-out, as the run began with it; see `stratify.METHOD`.
    """
    check_places([data], root, download)
    folder = cache_folder(cache)
    if split is not None and not 0 < split < 1:
        raise ValueError(f"split={split} is not between 0 and 1; 0.1 is a tenth of each class")
    if data == "scenes" or data.startswith("scenes:"):
        if split is not None:
            raise ValueError("scenes validate on scenes of their own; --split is for other data")
        return _scenes(data, part, seed, channels, scenes_size, folder)
    kind, parts = open_parts(data, channels, folder, root, download)
    notes: list[str] = []
    if split is not None and "all" not in parts:
        raise ValueError(f"--split {split}, but {data} has parts of its own: {', '.join(parts)}; leave --split out")
    if split is not None:
        train, val = hold_out(parts["all"], split, seed, method)
        parts = {"train": train, "val": val}
    order = {"auto": ("val", "all", "train"), "val": ("val",), "train": ("train",), "all": ("all",), "test": ()}[part]
    chosen = next((name for name in order if name in parts), None)
    if chosen is None:
        there = ", ".join(parts)
        raise ValueError(f"{data} has no part {part!r}; it has {there}; leave --part out to take what there is")
    if part == "auto" and chosen == "train":
        notes.append(f"{data} has a part to train on alone, so that one is evaluated")
    found = parts[chosen]
    description = dict(kind=kind, data=data, part=chosen, place=found.place, images=len(found.source), split=split)
    return Found(found.source, found.place, (*notes, *found.notes), description)


def _scenes(data: str, part: Which, seed: int, channels: int, size: int, cache: Path) -> Found:
    from ..scenes import Scenes

    if part == "all":
        raise ValueError("scenes have the parts train, val and test; leave --part out for val")
    count = scenes_count(data)
    split = "val" if part == "auto" else part
    source: Source = Scenes(count if split == "train" else count // 4, size=size, seed=seed, split=split, cache=cache)
    source = Grey(source) if channels == 1 else source
    place = f"scenes/{split}"
    description = dict(kind="scenes", data=data, part=split, place=place, images=len(source), size=size, seed=seed)
    return Found(source, place, (), description)


def same_data(one: str, other: str) -> bool:
    """Whether two names of data mean the same."""
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))
