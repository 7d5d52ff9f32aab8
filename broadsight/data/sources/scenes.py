"""The built-in scenes as a source: drawn when needed, without a download."""

from ..scenes import Scenes
from ..view import Grey
from .registry import Options, register_source
from .sample_table import Part, Parts

SCENES = 8000


@register_source("scenes", "scenes", "scenes:", known=["scenes"])
def open_scenes(data: str, options: Options) -> Parts:
    """So many scenes to train on, and a quarter of them to validate and to test on."""
    count = scenes_count(data, SCENES if options.scenes_count is None else options.scenes_count)
    size, seed = options.scenes_size, options.seed
    parts = {}
    for split, number in (("train", count), ("val", count // 4), ("test", count // 4)):
        source = Scenes(number, size=size, seed=seed, split=split, cache=options.cache)
        source = Grey(source) if options.channels == 1 else source
        parts[split] = Part(source, f"scenes/{split}", about=dict(size=size, seed=seed))
    return parts


def scenes_count(data: str, otherwise: int = SCENES) -> int:
    """The count that "scenes:COUNT" asks for, or else the other one."""
    _, colon, number = data.partition(":")
    if colon and not number.isdecimal():
        raise ValueError(f"{data!r}: {number!r} is not a count; write for example scenes:2000")
    count = int(number) if colon else otherwise
    if count < 4:
        raise ValueError(f"{count} scenes are too few; a quarter of them validates, so give 4 or more")
    return count
