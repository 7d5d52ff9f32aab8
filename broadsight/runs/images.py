"""Images that a user names to be looked at by a classifier, or scenes that are drawn where none are named."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.scenes import Scenes
from ..data.sources.unlabelled import Unlabelled, find_images
from ..data.view import Grey
from ..errors import UsageError
from .classifier import Classifier

FEW, MOST = 3, 1000  # scenes that are looked at if nobody names an image, and at most


@dataclass(frozen=True)
class ShownImages:
    """Images that are named, by what they were named, or so many scenes; before a model is opened."""

    scenes: int
    found: Unlabelled | None
    named: str
    notes: Sequence[str] = ()

    def of(self, classifier: Classifier) -> tuple[Any, str, list[str]]:
        """The images as a classifier wants them, what records call them, and notes."""
        if self.found is not None:
            return self.found.in_channels(classifier.transforms.channels), self.named, list(self.notes)
        hint = "" if self.named else "; give IMAGE for others"
        note = f"on {self.scenes} built-in scenes, which are drawn{hint}"
        return drawn_scenes(self.scenes, classifier), f"scenes:{self.scenes}", [note]


def shown_images(images: Sequence[str], listing: str | None = None) -> ShownImages:
    """Files, folders, patterns and lists of images; or scenes:N, and a few scenes where nothing is named."""
    if not images and listing is None:
        return ShownImages(FEW, None, "")
    asked = [one for one in images if re.fullmatch(r"scenes(:.*)?", one) and not Path(one).exists()]
    if not asked:
        found, notes = find_images(images, listing)
        return ShownImages(0, found, " ".join(images) or str(listing), notes)
    if len(asked) < len(images) or listing is not None:
        raise UsageError("scenes together with other images; expected one of the two")
    number = asked[0].partition(":")[2] or str(FEW)
    if len(asked) > 1 or not re.fullmatch(r"[1-9][0-9]{0,3}", number) or int(number) > MOST:
        raise UsageError(f"{' '.join(images)}; expected scenes:N, up to {MOST}")
    return ShownImages(int(number), None, " ".join(images))


def drawn_scenes(count: int, classifier: Classifier) -> Any:
    """Scenes of the test part, which no run was trained on, as large as the model sees them."""
    transforms = classifier.transforms
    scenes = Scenes(count, size=max(8, round(transforms.size / transforms.crop_pct)), split="test")
    return Grey(scenes) if transforms.channels == 1 else scenes
