"""Whether the files that a list or a COCO file names lie in the folder of that data, as they should.

Such a file may come from a stranger, and names of any form are in it: absolute ones, or with `..` in them. Links that a
user has put into his folder are his own and are followed.
"""

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from .sources.sample_table import some

_ALLOWED: ContextVar[bool] = ContextVar("allow_outside", default=False)


def permit_outside(allowed: bool) -> None:
    """From here on, in this command, say whether lists and COCO files may name files outside of their folder."""
    _ALLOWED.set(allowed)


@contextmanager
def outside_allowed(allowed: bool = True) -> Generator[None, None, None]:
    """The same for a while; what was allowed before stays allowed."""
    before = _ALLOWED.set(_ALLOWED.get() or allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


def refuse_outside(file: Path, names: Iterable[str], folders: Sequence[Path]) -> None:
    """Check all names that a file lists.

    Args:
        file: Which lists them.
        names: Paths, relative to the first of the folders.
        folders: Where they may lead.

    Raises:
        ValueError: Some lead elsewhere, and nobody has allowed that.
    """
    if _ALLOWED.get():
        return
    outside = [name for name in names if not is_inside(name, folders)]
    if outside:
        raise ValueError(
            f"{file} names {len(outside):,} {'file' if len(outside) == 1 else 'files'} outside of "
            f"{os.path.abspath(folders[0])}: {some(outside, 3)}; if they are meant, add --allow-outside "
            "(in Python: with broadsight.data.inside.outside_allowed())"
        )


def is_inside(name: str, folders: Sequence[Path]) -> bool:
    """Whether a path, relative to the first of some folders, leads into one of them; links along it are followed only
    where the path goes up again."""
    drive, _ = os.path.splitdrive(name)
    if not os.path.isabs(name) and not drive and ".." not in name:
        return True  # most of a million
    whole = os.path.join(os.path.abspath(folders[0]), name)
    up = ".." in Path(name).parts
    return any(
        _below(os.path.normpath(whole), os.path.abspath(folder))
        and (not up or _below(os.path.realpath(whole), os.path.realpath(folder)))
        for folder in folders
    )


def _below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))
