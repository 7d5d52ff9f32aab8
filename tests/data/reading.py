"""What tests of sources ask them."""

from broadsight.data.sources import Source, Splits


def rows(source: Source) -> dict[str, str]:
    """Names with their classes."""
    return {source.name(row): source.classes[source.label(row)] for row in range(len(source))}


def grey(source: Source, row: int) -> int:
    """The brightness of an image that has one."""
    return source.open(row).getpixel((0, 0))[0]


def said(splits: Splits, *words: str) -> bool:
    """Whether a note has all these words."""
    return any(all(word in note for word in words) for note in splits.notes)
