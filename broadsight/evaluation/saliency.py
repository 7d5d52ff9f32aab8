"""Which pixels of an image matter: several ways to say so, and the user's own."""

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ..data.loading import Batch, Transforms
from ..data.normalising import Normalise
from ..data.scenes import Scenes
from ..data.sources import Source
from ..data.view import View
from ..deployment.exported import refuse_without_gradients
from ..errors import did_you_mean, first_line
from ..explanation.maps.gradcam import GradCam as GradCam
from ..inspection.attention import watch_attention
from ..inspection.attention_rows import Rows
from ..inspection.meta_pass import as_pair, in_eval_mode
from ..weights.loading import load_given

# Normalised images (B, C, H, W) and their batch -> (B, H, W), the more the more salient
Saliency = Callable[[Tensor, Batch], Tensor]

NAMES = ("scenes", "gradcam", "dino")
DINO = "vit_small_patch16_224.dino"


class SceneSaliency:
    """The scenes' own: 2 where the salient part of the main object is seen, 1 on the rest of it, 0 elsewhere."""

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


class Dino:
    """Where a self-supervised ViT looks (Caron et al., ICCV 2021): class-token attention of its last block.

    `model` is a timm name, with timm's weights or those of a file, or a ViT that is used as it is.
    """

    def __init__(self, model: str | nn.Module = DINO, *, checkpoint: str | Path | None = None):
        self.model: Any = _created(model, checkpoint) if isinstance(model, str) else model
        name = model if isinstance(model, str) else type(model).__name__
        if getattr(self.model, "cls_token", None) is None or not hasattr(self.model, "blocks"):
            raise ValueError(f"{name} has no class token in blocks of attention; give a ViT, such as {DINO}")
        self.about = f"class-token attention of {name}"

    def __call__(self, images: Tensor, batch: Batch) -> Tensor:
        """Images (B, C, H, W) -> (B, H, W), 0 to 1."""
        weights = self.attention(batch.images.to(images.device)).mean(1, keepdim=True)  # B 1 h w
        return F.interpolate(weights, images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]

    def attention(self, photos: Tensor) -> Tensor:
        """Bytes (B, 1 or 3, H, W) -> weights of the class token for each patch (B, heads, h, w)."""
        self.model.to(photos.device)
        config = resolve_model_data_config(self.model)
        images = Normalise(config["mean"], config["std"], photos.device)(photos.expand(-1, 3, -1, -1))
        patch = as_pair(self.model.patch_embed.patch_size)
        grid = [-(-side // step) for side, step in zip(images.shape[-2:], patch, strict=True)]
        size = [cells * step for cells, step in zip(grid, patch, strict=True)]
        if size != list(images.shape[-2:]):
            images = F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True)
        found: list[Tensor] = []

        def keep(name: str, rows: Rows, _: nn.Module) -> None:
            found[:] = [rows.weights(slice(0, 1))[..., 0, :]]  # B heads N, of the latest attention

        with in_eval_mode(self.model), watch_attention(self.model, keep):
            self.model.forward_features(images)
        if not found:
            raise ValueError(f"{type(self.model).__name__} shows no attention of its last block; give another ViT")
        return found[0][..., -grid[0] * grid[1] :].unflatten(-1, (grid[0], grid[1]))  # without other tokens


def _created(name: str, checkpoint: str | Path | None) -> nn.Module:
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(f"{name!r} is no model of timm's; give a ViT, such as {DINO}")
    if checkpoint is not None and not Path(checkpoint).exists():  # said before a model is made in vain
        raise FileNotFoundError(f"{checkpoint} is not a file; give one of the weights of {name}")
    try:
        model = timm.create_model(name, pretrained=checkpoint is None, num_classes=0, dynamic_img_size=True)
    except TypeError as error:
        raise ValueError(f"{name} cannot be made: {first_line(error)}; give a ViT, such as {DINO}") from None
    except Exception as error:
        what = f"the weights of {name} cannot be had: {first_line(error)}"
        raise RuntimeError(f"{what}; give a file of them, or another saliency") from None
    if checkpoint is not None:
        load_given(model, checkpoint)
    return model.requires_grad_(False)


def _made_of_scenes(source: Any) -> bool:
    """Whether the innermost source is one of scenes."""
    while source is not None and not isinstance(source, Scenes):
        source = getattr(source, "source", None)
    return source is not None


def scenes_of(source: Any, index: int) -> tuple[Scenes, int]:
    """The scenes that a source is made of, and which of them has that index."""
    if not _made_of_scenes(source):
        raise ValueError("saliency of the scenes needs scenes as data; use gradcam or dino")
    inner, number = source, index
    while not isinstance(inner, Scenes):
        number = int(inner.rows[number]) if isinstance(inner, View) and len(inner) else number
        inner = inner.source
    if len(source) and source.name(index) != inner.name(number):
        raise ValueError(f"{type(source).__name__} numbers its scenes in a way of its own; use gradcam or dino")
    return inner, number


def from_name(
    name: str | None, classifier: Any, source: Source, kept: np.ndarray | None = None, checkpoint: Any = None
) -> Saliency:
    """A saliency by name: one of NAMES or one's own function; by default that of the scenes, or gradcam."""
    if name is None:
        name = "scenes" if _made_of_scenes(source) else "gradcam"
    if checkpoint is not None and name != "dino":
        raise ValueError(f"a checkpoint is for the saliency dino, not for {name}")
    if name == "scenes":
        return SceneSaliency(source, classifier.transforms)
    if name in ("gradcam", "dino"):
        if name == "dino":
            return Dino(checkpoint=checkpoint)
        refuse_without_gradients("--saliency gradcam", classifier)
        return GradCam(classifier, kept)
    if ":" not in name:
        hint = f"{did_you_mean(name, NAMES)}choose {', '.join(NAMES)}"
        raise ValueError(f"unknown saliency {name!r}; {hint}, or your own as file.py:function or module:function")
    place, _, function = name.rpartition(":")
    if (path := Path(place)).suffix == ".py" and not path.is_file():
        raise FileNotFoundError(f"{place} is not a file; give your own saliency as file.py:function")
    try:
        if path.suffix == ".py":
            spec: Any = importlib.util.spec_from_file_location(path.stem, path)
            module: Any = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found = getattr(module, function)
        else:
            found = pkgutil.resolve_name(name)
    except Exception as error:
        raise ValueError(f"the saliency {name} cannot be loaded: {first_line(error)}") from error
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}; expected a function (images, batch) -> (B, H, W)")
    return found


def about(saliency: Saliency) -> str:
    """What it is, in a few words."""
    return getattr(saliency, "about", None) or getattr(saliency, "__name__", type(saliency).__name__)
