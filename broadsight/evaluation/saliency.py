"""Which pixels of an image matter: several ways to say so, and the user's own."""

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.loading import Batch, Transforms
from ..data.scenes import Scenes
from ..data.sources import Source
from ..data.view import View
from ..errors import did_you_mean, first_line
from ..explanation.gradcam import GradCam as GradCam
from .dino import Dino as Dino

# Normalised images (B, C, H, W) and their batch -> (B, H, W), the more the more salient
Saliency = Callable[[Tensor, Batch], Tensor]

NAMES = ("scenes", "gradcam", "dino")


class SceneSaliency:
    """The scenes' own: 2 where the salient part of the main object is seen, 1 on the rest of it, 0 elsewhere.

    Args:
        source: Scenes, or others that are made of them: in grey, some of them.
        transforms: How the images become tensors; the map goes the same way, without values in between.
    """

    about = "the scenes' own: the salient part of the main object, then the rest of it"

    def __init__(self, source: Source, transforms: Transforms):
        self.source = source
        scenes_of(source, 0)
        self.geometry = replace(transforms, channels=1, mean=(0.0,), std=(1.0,), interpolation="nearest").build(False)

    def __call__(self, images: Tensor, batch: Batch) -> Tensor:
        """(B, C, H, W) -> (B, H, W)."""
        maps = []
        for _, _, index in batch.keys:
            scenes, number = scenes_of(self.source, index)
            part = scenes.scene(number).parts[0]  # 1 is the salient one
            drawn = np.where(part == 1, 2, part > 0).astype(np.uint8)
            maps.append(torch.as_tensor(self.geometry(Image.fromarray(drawn))))
        return torch.cat(maps).to(images.device, torch.float32)


def made_of_scenes(source: Any) -> bool:
    """Whether the innermost source is one of scenes."""
    while source is not None and not isinstance(source, Scenes):
        source = getattr(source, "source", None)
    return source is not None


def scenes_of(source: Any, index: int) -> tuple[Scenes, int]:
    """The scenes that a source is made of, and which of them has that index."""
    if not made_of_scenes(source):
        raise ValueError("saliency of the scenes needs scenes as data; use gradcam or dino")
    inner, number = source, index
    while not isinstance(inner, Scenes):
        number = int(inner.rows[number]) if isinstance(inner, View) and len(inner) else number
        inner = inner.source
    if len(source) and source.name(index) != inner.name(number):
        raise ValueError(f"{type(source).__name__} numbers its scenes in a way of its own; use gradcam or dino")
    return inner, number


def from_name(
    name: str | None,
    classifier: Any,
    source: Source,
    *,
    kept: np.ndarray | None = None,
    checkpoint: str | Path | None = None,
) -> Saliency:
    """A saliency by name.

    Args:
        name: "scenes", "gradcam", "dino", or one's own function as "file.py:function" or "module:function"; by default
            the scenes' own where there are scenes, and else gradcam.
        classifier: Whose images they are; it is what Grad-CAM looks into.
        kept: The classes that compete, for Grad-CAM.
        checkpoint: Weights for DINO; timm's if None.
    """
    if name is None:
        name = "scenes" if made_of_scenes(source) else "gradcam"
    if checkpoint is not None and name != "dino":
        raise ValueError(f"a checkpoint is for the saliency dino, not for {name}")
    if name == "scenes":
        return SceneSaliency(source, classifier.transforms)
    if name == "gradcam":
        return GradCam(classifier, kept)
    if name == "dino":
        return Dino(checkpoint=checkpoint)
    if ":" not in name:
        hint = f"{did_you_mean(name, NAMES)}choose {', '.join(NAMES)}"
        raise ValueError(f"unknown saliency {name!r}; {hint}, or your own as file.py:function or module:function")
    found = _own(name)
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}; expected a function (images, batch) -> (B, H, W)")
    return found


def _own(name: str) -> Any:
    place, _, function = name.rpartition(":")
    path = Path(place)
    if path.suffix == ".py" and not path.is_file():
        raise FileNotFoundError(f"{place} is not a file; give your own saliency as file.py:function")
    try:
        if path.suffix != ".py":
            return pkgutil.resolve_name(name)
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, function)
    except Exception as error:
        raise ValueError(f"the saliency {name} cannot be loaded: {first_line(error)}") from error


def about(saliency: Saliency) -> str:
    """What it is, in a few words."""
    return getattr(saliency, "about", None) or getattr(saliency, "__name__", type(saliency).__name__)
