"""Refusing files outside of their folder that a stranger's list or COCO file may name; links in it are followed."""

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from .sources.sample_table import some

_ALLOWED: ContextVar[bool] = ContextVar("allow_outside", default=False)


@contextmanager
def outside_allowed(allowed: bool = True) -> Generator[None, None, None]:
    """Allow such names in a `with`; what was allowed before stays allowed."""
    before = _ALLOWED.set(_ALLOWED.get() or allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def refuse_outside(file: Path, names: Iterable[str], folders: Sequence[Path]) -> None:
    """Raise ValueError if names that a file lists, relative to the first of some folders, lead out of all of them."""
    outside = [] if _ALLOWED.get() else [name for name in names if not is_inside(name, folders)]
    if outside:
        what = f"{len(outside):,} file{'s' * (len(outside) > 1)} outside of {os.path.abspath(folders[0])}"
        hint = "add --allow-outside (in Python: with broadsight.data.inside.outside_allowed())"
        raise ValueError(f"{file} names {what}: {some(outside, 3)}; if they are meant, {hint}")


def is_inside(name: str, folders: Sequence[Path]) -> bool:
    """Whether a path, relative to the first of some folders, leads into one; links count where it goes up again."""
    if not os.path.isabs(name) and not os.path.splitdrive(name)[0] and ".." not in name:
        return True  # most of a million
    whole = os.path.join(os.path.abspath(folders[0]), name)
    ways = [os.path.abspath, os.path.realpath] if ".." in Path(name).parts else [os.path.abspath]
    return any(all(way(whole).startswith(os.path.join(way(folder), "")) for way in ways) for folder in folders)
