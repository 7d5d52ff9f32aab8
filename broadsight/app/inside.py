"""What is seen inside a model while one image passes: looked up once, then leafed through by depth and title."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..explanation.maps.map import Look
from ..runs.classifier import Classifier
from .answers import image_of, top_classes
from .candidates import Contestant
from .cards import data_address

KINDS = {
    "gradcam": "Grad-CAM",
    "attention": "Attention",
    "map-tokens": "MAP tokens",
    "super-tokens": "Super tokens",
    "abstract-tokens": "Abstract tokens",
    "fusion": "Fusion",
    "foreground": "Foreground",
    "c-mhsa": "C-MHSA",
}
LIKELY = "the most probable class"
SIDE = 640  # pixels of what is shown


@dataclass(frozen=True)
class Looked:
    """One model's maps of one kind over one image.

    Args:
        view: The part of the image that the model sees, square.
        looks: At least one, by depth.
        asked_for: The choices in the page that led here; the same choices need no second look.
    """

    name: str
    kind: str
    view: Image.Image
    looks: tuple[Look, ...]
    asked_for: tuple[Any, ...] = ()

    @property
    def depths(self) -> int:
        return max(look.depth for look in self.looks) + 1

    def at(self, depth: Any) -> list[Look]:
        """All that is seen at a depth; the nearest there is to whatever number was sent."""
        wanted = depth if isinstance(depth, (int, float)) and depth == depth else 0
        nearest = min({look.depth for look in self.looks}, key=lambda place: abs(place - wanted))
        return [look for look in self.looks if look.depth == nearest]

    def one(self, depth: Any, title: Any = None) -> Look:
        """The look of this title at a depth, or the first."""
        there = self.at(depth)
        return next((look for look in there if look.title == title), there[0])


def kinds(one: Contestant) -> tuple[str, ...]:
    """Which maps a model has."""
    from ..explanation.inside import kinds_of

    return tuple(kinds_of(_classifier(one).model))


def kind_called(words: Any) -> str:
    """The kind that the page calls so."""
    found = {name: kind for kind, name in KINDS.items()}
    if not isinstance(words, str) or words not in found:
        raise ValueError("there is no such kind of map; choose from the list")
    return found[words]


def classes_of(one: Contestant) -> list[str]:
    """The choices of the class to explain; numbered, since two classes may have one name."""
    return [LIKELY, *(f"{number}: {name}" for number, name in enumerate(_classifier(one).classes))]


def class_called(one: Contestant, words: Any) -> int | None:
    """The class of such a choice, or None for the most probable."""
    if words in (None, LIKELY):
        return None
    if words not in classes_of(one):
        raise ValueError("there is no such class; choose from the list")
    return int(words.partition(":")[0])


def look(one: Contestant, image: Image.Image, kind: str, target: int | None = None) -> Looked:
    """Let an image in RGB pass and collect one kind of maps.

    Whoever calls sees to it that nobody else uses the model meanwhile.
    """
    from ..explanation.inside import look_inside

    classifier = _classifier(one)
    there = kinds(one)
    if kind not in there:
        has = f"it has {', '.join(KINDS[name] for name in there)}" if there else "choose another model"
        raise ValueError(f"{one.name} has no {KINDS.get(kind, 'such')} maps; {has}")
    looks = look_inside(classifier.model, image_of(classifier, image), kinds=(kind,), target=target)
    if not looks:
        raise ValueError(f"{one.name} shows nothing of {KINDS[kind]} for this image; choose another kind")
    names = classifier.classes
    return Looked(one.name, kind, view_of(classifier, image), tuple(_with_name(found, names) for found in looks))


def _with_name(seen: Look, names: Sequence[str]) -> Look:
    """Grad-CAM's titles have the number of a class; people know it by its name."""
    number = re.fullmatch(r"class (\d+)", seen.title)
    return replace(seen, title=f"{seen.title}, {names[int(number[1])]}") if number else seen


def drawn(view: Image.Image, seen: Look) -> Image.Image:
    """A look laid over what the model sees."""
    from ..explanation.overlay import overlay

    return overlay(view, seen)


def sheet(one: Contestant, photo: Image.Image, target: int | None = None) -> Image.Image:
    """The overview: the image, the answers, all kinds of maps, depth from left to right."""
    from ..explanation.inside import look_inside
    from ..explanation.sheet import overview_sheet

    classifier = _classifier(one)
    image = image_of(classifier, photo)
    looks = look_inside(classifier.model, image, target=target)
    with torch.inference_mode():
        logits = classifier.logits(image)
    transforms, names = classifier.transforms, classifier.classes
    return overview_sheet(
        view_of(classifier, photo),
        looks,
        top_classes(classifier, logits),
        one.name,
        subtitle=f"{Path(one.source).name or one.name}; {transforms.size} x {transforms.size} pixels",
        explained=names[int(logits[0].argmax()) if target is None else target],
        warning="" if one.trained else "random weights: answers and maps mean nothing",
    )


def view_of(classifier: Classifier, image: Image.Image, side: int = SIDE) -> Image.Image:
    """The square in the middle that the model sees, at a size to look at."""
    part = min(1.0, classifier.transforms.crop_pct)
    edge = min(image.size) * part
    left, top = (image.width - edge) / 2, (image.height - edge) / 2
    return image.resize((side, side), Image.Resampling.BICUBIC, (left, top, left + edge, top + edge))


def described(seen: Look, depths: int) -> str:
    """What is seen, as HTML for below the image: title, layer, how to read it, and the scale of a heat map."""
    from ..explanation.overlay import colour_bar, is_flat

    place = f"depth {seen.depth + 1} of {depths}" if depths > 1 else "its only depth"
    flat = "the map is flat: no place stands out" if is_flat(seen) else ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in (seen.note, flat) if note)
    bar = ""
    if seen.form == "heat":
        scale = f'<img alt="from dark blue to yellow" src="{data_address(colour_bar(160, 10))}">'
        bar = f'<p class="bs-scale">least {scale} most</p>'
    layer = escape(seen.layer or "the model")
    title = f"<p><strong>{escape(seen.title)}</strong>, {place}: <code>{layer}</code></p>"
    return f'<div class="bs-caption">{title}{bar}{notes}</div>'


def _classifier(one: Contestant) -> Classifier:
    if one.classifier is None:
        raise ValueError(f"{one.name} does not classify; maps are of models that do")
    return one.classifier


def names_of(found: Sequence[str]) -> list[str]:
    return [KINDS.get(kind, kind) for kind in found]
