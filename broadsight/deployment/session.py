"""What an opened artefact looks like, whatever executes it, and what it says of itself."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import numpy as np

from ..options import Precision

KEY = "broadsight"  # under which a format keeps the description, as JSON
VERSION = 1
MOST = 2**16  # pixels of a side


@dataclass(frozen=True)
class Description:
    """Everything that is needed to use an artefact without the run or the program that it came from."""

    task: str  # classify, detect, segment or keypoints
    title: str  # what tables call the model
    source: str  # the timm name or the name of the run folder
    classes: tuple[str, ...] | None  # in the order of the outputs, or None where nobody has written them down
    outputs: tuple[str, ...]  # names of what comes out, in order; of a classifier "logits" alone
    image: dict[str, Any]  # what goes in: channels, height, width, and whether any_batch and any_size are taken
    preprocessing: dict[str, Any]  # how an image becomes that: resize, crop, crop_pct, interpolation, mean, std
    provenance: dict[str, Any] = field(default_factory=dict)  # versions, commit, command, time, parameters, digest
    quantised: dict[str, Any] | None = None  # of int8: what it was calibrated with, what stayed float, accuracy
    decoding: dict[str, Any] | None = None  # of a dense model: what makes boxes, pixels or keypoints of its outputs
    precision: str = "fp32"  # of its weights, or what its runtime is asked to compute in

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """What `to_json` wrote; a ValueError if it did not, or if a later version did."""
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version > VERSION:
                raise ValueError(f"its description has version {version}, this broadsight reads up to {VERSION}")
            values["outputs"] = tuple(values["outputs"])
            values["classes"] = None if values["classes"] is None else tuple(values["classes"])
            found = cls(**values)
            names = (found.task, found.title, found.source, *found.outputs, *(found.classes or ()))
            if not found.outputs or not all(isinstance(name, str) for name in names):
                raise TypeError("names that are no text")
            if not all(type(side) is int and 1 <= side <= MOST for side in found.shape):
                raise TypeError(f"images of {str(found.shape)[:60]}")
            if not all(isinstance(found.image[name], bool) for name in ("any_batch", "any_size")):
                raise TypeError("any_batch or any_size that is neither true nor false")
            if found.precision not in get_args(Precision)[1:]:
                raise TypeError(f"the precision {str(found.precision)[:20]}")
            if not isinstance(found.preprocessing, dict) or not isinstance(found.provenance, dict):
                raise TypeError("parts that are no tables")
            return found
        except RecursionError:
            raise ValueError("its description is damaged (nested too deeply)") from None
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"its description is damaged ({type(error).__name__}: {error})") from None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        return self.image["channels"], self.image["height"], self.image["width"]


class Session:
    """An artefact in its own runtime: `session(images) -> outputs by name`. `run` gives them in order."""

    def __init__(
        self, description: Description, run: Callable[[np.ndarray], Sequence[np.ndarray]], precision: str = "fp32"
    ):
        self.description, self._run = description, run
        self.precision = precision  # that it computes in, as its runtime says

    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """Normalised images (B, C, H, W) -> outputs by name; a ValueError if they have another shape than exported."""
        images = np.ascontiguousarray(images, np.float32)
        image, came, (channels, height, width) = self.description.image, images.shape, self.description.shape
        fits = len(came) == 4 and came[0] > 0 and came[1] == channels
        if not fits or not (image["any_size"] or came[2:] == (height, width)):
            sides = "H x W of your choice" if image["any_size"] else f"{height} x {width}"
            expected = f"(B, {channels}, H, W) with {sides}: resize them, or export again with --size"
            raise ValueError(f"images of shape {came}; {self.description.title} was exported for {expected}")
        if image["any_batch"] or len(images) == 1:
            found = self._run(images)
        else:  # exported for one image at a time
            each = [self._run(one[None]) for one in images]
            found = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        return dict(zip(self.description.outputs, found, strict=True))
