"""Names of the 1000 classes of ImageNet-1k, as timm lists them."""

from functools import cache

from timm.data import ImageNetInfo


@cache
def synsets() -> tuple[str, ...]:
    """WordNet's names of the 1000 classes, n01440764 and so on, in the order of a classifier's outputs."""
    return tuple(ImageNetInfo().label_names())


@cache
def imagenet_names() -> tuple[str, ...]:
    """The 1000 classes in English, each by the first of its synonyms; two that share it have their synset besides."""
    first = [text.partition(",")[0] for text in ImageNetInfo().label_descriptions()]
    shared = {name for name in first if first.count(name) > 1}
    return tuple(f"{name} ({key})" if name in shared else name for name, key in zip(first, synsets(), strict=True))
