"""What an exported network says of itself: kept as JSON inside the artefact, whatever the format."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

KEY = "broadsight"  # under which a format keeps it
VERSION = 1


@dataclass(frozen=True)
class Description:
    """Everything that is needed to use an artefact without the run or the program that it came from.

    Args:
        task: classify, detect, segment or keypoints.
        title: What tables call the network.
        source: The timm name or the name of the run folder.
        classes: Their names in the order of the outputs, or None where nobody has written them down.
        outputs: Names of what comes out, in order; of a classifier "logits" alone.
        image: What goes in: channels, height, width, and whether any_batch and any_size are taken.
        preprocessing: How a picture becomes an image: resize, crop, crop_pct, interpolation, mean, std.
        provenance: Versions, commit, command, time, parameters and a digest of the weights.
        quantised: Of an int8 artefact what it was calibrated with, what stayed float, accuracy before and after.
        decoding: Of a dense network what turns its raw outputs into boxes, classes of pixels or keypoints.
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
        """
        Raises:
            ValueError: The text was not written by `to_json`, or by a later version of it.
        """
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version > VERSION:
                raise ValueError(f"its description has version {version}, this broadsight reads up to {VERSION}")
            values["outputs"] = tuple(values["outputs"])
            values["classes"] = None if values["classes"] is None else tuple(values["classes"])
            return cls(**values)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"its description is damaged ({type(error).__name__}: {error})") from None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        return self.image["channels"], self.image["height"], self.image["width"]
