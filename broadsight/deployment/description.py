"""What an exported model says of itself: kept as JSON inside the artefact, whatever the format."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

KEY = "broadsight"  # under which a format keeps it
VERSION = 1
MOST = 2**16  # pixels of a side


@dataclass(frozen=True)
class Description:
    """Everything that is needed to use an artefact without the run or the program that it came from.

    Args:
        task: classify, detect, segment or keypoints.
        title: What tables call the model.
        source: The timm name or the name of the run folder.
        classes: Their names in the order of the outputs, or None where nobody has written them down.
        outputs: Names of what comes out, in order; of a classifier "logits" alone.
        image: What goes in: channels, height, width, and whether any_batch and any_size are taken.
        preprocessing: How an image becomes the model's input: resize, crop, crop_pct, interpolation, mean, std.
        provenance: Versions, commit, command, time, parameters and a digest of the weights.
        quantised: Of an int8 artefact what it was calibrated with, what stayed float, accuracy before and after.
        decoding: Of a dense model what turns its raw outputs into boxes, classes of pixels or keypoints.
    """

    task: str
    title: str
    source: str
    classes: tuple[str, ...] | None
    outputs: tuple[str, ...]
    image: dict[str, Any]
    preprocessing: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)
    quantised: dict[str, Any] | None = None
    decoding: dict[str, Any] | None = None

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
            found._check()
            return found
        except RecursionError:
            raise ValueError("its description is damaged (nested too deeply)") from None
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"its description is damaged ({type(error).__name__}: {error})") from None

    def _check(self) -> None:
        """Raise a TypeError if a value is not of its kind."""
        names = (self.task, self.title, self.source, *self.outputs, *(self.classes or ()))
        if not self.outputs or not all(isinstance(name, str) for name in names):
            raise TypeError("names that are no text")
        if not all(type(side) is int and 1 <= side <= MOST for side in self.shape):
            raise TypeError(f"images of {str(self.shape)[:60]}")
        if not all(isinstance(self.image[name], bool) for name in ("any_batch", "any_size")):
            raise TypeError("any_batch or any_size that is neither true nor false")
        if not isinstance(self.preprocessing, dict) or not isinstance(self.provenance, dict):
            raise TypeError("parts that are no tables")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        return self.image["channels"], self.image["height"], self.image["width"]
