"""What stands before and behind an exported classifier: images become its images, its logits become answers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..data.decoding import decode
from ..data.loading import Transforms
from ..data.normalising import Normalise
from .session import Description


def image_to_images(description: Description) -> Callable[[Image.Image], np.ndarray]:
    """PIL image of any size and mode -> (C, H, W) float32, bit by bit what the model saw in Python.

    Stack several for a session: `session(np.stack([prepare(image), ...]))`. Several threads may call it at once.
    """
    _check_task(description)
    transforms, channels = transforms_of(description), description.image["channels"]
    transform = transforms.build(training=False)
    normalise = Normalise(transforms.mean, transforms.std)

    def prepare(image: Image.Image) -> np.ndarray:
        pixels = torch.as_tensor(transform(decode(image, channels)))  # C H W, bytes
        return normalise(pixels[None])[0].numpy()

    return prepare


def transforms_of(description: Description) -> Transforms:
    """How an image becomes the input of an exported classifier."""
    said, channels = description.preprocessing, description.image["channels"]
    try:
        mean, std = tuple(said["mean"]), tuple(said["std"])
        return Transforms(said["crop"], channels, mean, std, said["interpolation"], said["crop_pct"])
    except KeyError as error:
        raise ValueError(
            f"{description.title} does not say the {error.args[0]!r} of its preprocessing; export it again"
        ) from None


def top_classes(description: Description, logits: np.ndarray, top: int = 5) -> list[dict[str, Any]]:
    """Logits (K,) of one image -> the `top` most probable classes, the best first; of equals the first.

    Each with its name ("class"; without names the number), "index" and "probability" between 0 and 1.
    """
    _check_task(description)
    names, logits = description.classes, np.asarray(logits, np.float64)
    if top < 1:
        raise ValueError(f"top={top}; expected 1 or more")
    if logits.ndim != 1 or not len(logits) or (names is not None and len(names) != len(logits)):
        expected = f"({len(names)},)" if names is not None else "one row"
        raise ValueError(f"logits of shape {logits.shape}; expected {expected}: give those of one image")
    if not np.isfinite(logits).all():
        raise ValueError(f"{description.title} answers with logits that are not finite; its weights are damaged")
    raised = np.exp(logits - logits.max())
    probabilities = raised / raised.sum()
    order = np.argsort(-logits, kind="stable")[:top].tolist()
    found = [(names[place] if names else str(place), place, float(probabilities[place])) for place in order]
    return [dict(zip(("class", "index", "probability"), one, strict=True)) for one in found]


def _check_task(description: Description) -> None:
    if description.task != "classify":
        raise ValueError(f"{description.title} was exported for the task {description.task}; expected a classifier")
