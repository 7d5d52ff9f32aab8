"""Maps of what happens inside a model while one image passes: made once, then leafed through by depth and title."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..explanation.inside import kinds_of, look_inside
from ..explanation.maps.map import KNOWN, Look
from ..explanation.overlay import colour_bar, is_flat
from ..explanation.sheet import overview_sheet
from ..runs.classifier import Classifier
from ..visual import html
from .answers import data_uri, image_of, top_classes
from .candidates import Candidate

KINDS = {kind: about["choice"] for kind, about in KNOWN.items()}
LIKELY = "the most probable class"
SIDE = 640  # pixels of the shown image
MIDDLE = (0.5, 0.5)


@dataclass(frozen=True)
class Looked:
    """Maps of one kind over one image."""

    view: Image.Image  # the square that the model sees
    looks: tuple[Look, ...]  # at least one, by depth
    asked_for: tuple[Any, ...] = ()  # the choices in the page that led here; the same choices need no second look

    @property
    def depths(self) -> int:
        return max(look.depth for look in self.looks) + 1

    def at(self, depth: Any) -> list[Look]:
        """Maps of a depth, or of the nearest depth to any number that was sent."""
        wanted = depth if isinstance(depth, (int, float)) and depth == depth else 0
        nearest = min({look.depth for look in self.looks}, key=lambda place: abs(place - wanted))
        return [look for look in self.looks if look.depth == nearest]

    def one(self, depth: Any, title: Any = None) -> Look:
        """Map of this title at a depth, or the first there."""
        there = self.at(depth)
        return next((look for look in there if look.title == title), there[0])


def kinds(one: Candidate) -> dict[str, str]:
    """Kinds of maps that a model has, by the names that the page gives them."""
    return {KINDS[kind]: kind for kind in kinds_of(_classifier(one).model, query=True)}


def kind_called(words: Any) -> str:
    """Kind of maps by the name that the page gives it; a ValueError for anything else that is sent."""
    if kind := next((kind for kind, name in KINDS.items() if words == name), None):
        return kind
    raise ValueError("there is no such kind of map; choose from the list")


def classes_of(one: Candidate) -> list[str]:
    """The choices of the class to explain; numbered, since two classes may have one name."""
    return [LIKELY, *(f"{number}: {name}" for number, name in enumerate(_classifier(one).classes))]


def class_called(one: Candidate, words: Any) -> int | None:
    """Number of the class of such a choice, or None for the most probable."""
    if words in (None, LIKELY):
        return None
    if words not in classes_of(one):
        raise ValueError("there is no such class; choose from the list")
    return int(words.partition(":")[0])


def place_clicked(index: Any) -> tuple[float, float]:
    """Shares (x, y) of a view's sides for one of its pixels; a ValueError for anything else that is sent."""
    pixels = index if isinstance(index, (list, tuple)) else []
    shares = [(at + 0.5) / SIDE for at in pixels if isinstance(at, (int, float)) and 0 <= at < SIDE]
    if len(pixels) != 2 or len(shares) != 2:
        raise ValueError("there is no such place; click on the image")
    return shares[0], shares[1]


def look(
    one: Candidate, image: Image.Image, kind: str, target: int | None = None, place: tuple[float, float] = MIDDLE
) -> Looked:
    """Let an image in RGB pass and collect one kind of maps; nothing else may use the model meanwhile.

    `place` is the one whose attention is shown, as shares of the sides of what the model sees.
    """
    classifier, there = _classifier(one), kinds(one)
    if kind not in there.values():
        has = f"it has {', '.join(there)}" if there else "choose another model"
        raise ValueError(f"{one.name} has no {KINDS.get(kind, 'such')} maps; {has}")
    data, size = image_of(classifier, image), classifier.transforms.size
    query = [(place[0] * size - 0.5, place[1] * size - 0.5)] if kind == "query" else []
    looks = look_inside(classifier.model, data, kinds=(kind,), target=target, query=query)
    if not looks:
        raise ValueError(f"{one.name} shows nothing of {KINDS[kind]} for this image; choose another kind")
    looks = [replace(found, title=found.title.replace("query 1", "at the cross")) for found in looks]
    if kind == "gradcam":  # its titles are "class" and a number alone
        names = [classifier.classes[int(found.title.removeprefix("class "))] for found in looks]
        looks = [replace(found, title=f"{found.title}, {name}") for found, name in zip(looks, names, strict=True)]
    return Looked(view_of(classifier, image), tuple(looks))


def sheet(one: Candidate, photo: Image.Image, target: int | None = None) -> Image.Image:
    """Draw the overview: the image, the answers, all kinds of maps, depth from left to right."""
    classifier = _classifier(one)
    image, size = image_of(classifier, photo), classifier.transforms.size
    looks = look_inside(classifier.model, image, target=target)
    with torch.inference_mode():
        logits = classifier.logits(image)
    explained = classifier.classes[int(logits[0].argmax()) if target is None else target]
    words = dict(subtitle=f"{Path(one.source).name or one.name}; {size} x {size} pixels", explained=explained)
    words["warning"] = "" if one.trained else "random weights: answers and maps mean nothing"
    return overview_sheet(view_of(classifier, photo), looks, top_classes(classifier, logits), one.name, **words)


def view_of(classifier: Classifier, image: Image.Image, side: int = SIDE) -> Image.Image:
    """Cut out the square in the middle that the model sees, at a size to look at."""
    return image.resize((side, side), Image.Resampling.BICUBIC, classifier.transforms.view(image.size))


def described(seen: Look, depths: int) -> str:
    """Write the caption of a map as HTML: title, layer, how to read it, and the scale of a heat map."""
    scale = data_uri(colour_bar(160, 10))
    return html.render("app/caption", seen=seen, depths=depths, flat=is_flat(seen), scale=scale)


def _classifier(one: Candidate) -> Classifier:
    if not isinstance(one.run, Classifier):
        raise ValueError(f"{one.name} does not classify; maps are of models that do")
    return one.run
