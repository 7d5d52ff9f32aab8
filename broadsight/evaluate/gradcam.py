"""Grad-CAM on the last feature map of any network (Selvaraju et al., ICCV 2017)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.loading import Batch
from ..dry_run import in_eval_mode
from .predictions import Subject, restricted


class WithModel(Subject, Protocol):
    """A subject whose network can be looked into."""

    @property
    def model(self) -> nn.Module: ...


class GradCam:
    """Saliency of a network's own answer: relu(sum over channels of mean gradient x activation), bilinear to (B, H, W).

    The gradient is that of the logit of the class that the network predicts, right or wrong, with respect to the last
    feature map that the answer depends on and that has more than one place. A ViT that answers by its class token does
    not depend on the patches that leave its last block, so for it that is the map that enters this block. For a pooling
    that merges maps of several levels it is the merged one: the backbone's last map is but a part of what is pooled.

    Args:
        kept: The classes that compete; all of the network's if None.
    """

    def __init__(self, classifier: WithModel, kept: np.ndarray | None = None):
        self.classifier, self.kept = classifier, kept
        self.about = "Grad-CAM of the network's own answer"
        self._place: Place | None = None  # found with the first pictures
        self._size: tuple[int, ...] | None = None

    def __call__(self, images: Tensor, batch: Batch) -> Tensor:
        """Normalised images (B, C, H, W) -> (B, H, W), 0 or more; the labels are not looked at."""
        with in_eval_mode(self.classifier.model), torch.enable_grad():
            if self._place is None or self._size != tuple(images.shape[1:]):
                self._place, self._size = self._found(images[:1]), tuple(images.shape[1:])
            activation, gradient = self.looked_at(images, self._place)
        weights = gradient.mean((2, 3), keepdim=True)  # B C 1 1
        cam = (weights * activation).sum(1, keepdim=True).relu()  # B 1 h w
        return F.interpolate(cam.float(), images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]

    def looked_at(self, images: Tensor, place: "Place") -> tuple[Tensor, Tensor]:
        """The map (B, C, h, w) of that place, and the gradient of the answers' logits with respect to it."""
        leaves = []

        def cut(module: nn.Module, inputs: tuple, output: Any) -> Any:
            """Gradients end here: what came before needs none, and with frozen weights there would be none."""
            leaves.append(place.tensor(output).detach().requires_grad_())
            rest = leaves[-1].clone()  # a leaf must not be changed in place, and the next layer may well do that
            return rest if place.item is None else (*output[: place.item], rest, *output[place.item + 1 :])

        handle = place.module.register_forward_hook(cut)
        try:
            logits = restricted(self.classifier.logits(images), self.kept)
        finally:
            handle.remove()
        leaf = leaves[-1]
        if logits.requires_grad:
            (gradient,) = torch.autograd.grad(logits.max(1).values.sum(), leaf, materialize_grads=True)
        else:  # the answer does not depend on the map
            gradient = torch.zeros_like(leaf)
        return place.as_map(leaf.detach()), place.as_map(gradient)

    def _found(self, images: Tensor) -> "Place":
        for place in places_of(self.classifier.model, self.classifier.logits, images):
            _, gradient = self.looked_at(images, place)
            if bool(gradient.any()):
                return place
        raise ValueError(
            f"gradcam finds no feature map in {type(self.classifier.model).__name__} that its answers depend on; "
            "use another saliency"
        )


@dataclass(frozen=True)
class Place:
    """Where a network keeps a map.

    Args:
        module: Whose output it is, and
        item: which of a tuple's.
        form: "NCHW", "NHWC", or "rows" (B, N, C) with other tokens first.
        grid: (h, w)
    """

    module: nn.Module
    item: int | None
    form: str
    grid: tuple[int, int]

    def tensor(self, output: Any) -> Tensor:
        return output if self.item is None else output[self.item]

    def as_map(self, x: Tensor) -> Tensor:
        """(B, C, h, w)"""
        if self.form == "rows":
            return x[:, -self.grid[0] * self.grid[1] :].mT.unflatten(2, self.grid)
        return x.permute(0, 3, 1, 2) if self.form == "NHWC" else x

    def error(self, x: Tensor, wanted: Tensor) -> float:
        """How far an output is from that map, as a share of its largest value; infinite if it cannot be that."""
        if x.ndim == 3 and x.shape[1] < self.grid[0] * self.grid[1]:
            return math.inf
        found = self.as_map(x)
        if found.shape != wanted.shape:
            return math.inf
        return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


def places_of(model: nn.Module, run: Callable[[Tensor], Any], images: Tensor) -> list[Place]:
    """Where the maps of more than one place are found in a pass over one image, the last first.

    A network says what its maps are (as pyramid.py has it), not where: they are known again by their values, whatever
    the form in which a module gives them. Of a network that says nothing, all outputs that may be maps.
    """
    maps: list[Tensor] = []
    known: dict[int, tuple[float, Place]] = {}
    guesses: dict[Place, None] = {}

    def look(module: nn.Module, inputs: tuple, output: Any) -> None:
        several = isinstance(output, tuple)
        for item, x in enumerate(output if several else (output,)):
            if not isinstance(x, Tensor) or x.ndim not in (3, 4) or len(x) != 1 or not x.is_floating_point():
                continue
            where = item if several else None
            if x.ndim == 4 and _plausible(x, images):
                guesses[Place(module, where, "NCHW", (x.shape[-2], x.shape[-1]))] = None
            for number, wanted in enumerate(maps):
                for form in ("NCHW", "NHWC") if x.ndim == 4 else ("rows",):
                    place = Place(module, where, form, (wanted.shape[-2], wanted.shape[-1]))
                    error = place.error(x, wanted)
                    # Of equals the first: later ones may be a branch that passes it on
                    if error < known.get(number, (1e-3,))[0]:
                        known[number] = error, place

    handles = [module.register_forward_hook(look) for module in model.modules()]
    try:
        with torch.no_grad():
            # Twice with hooks: where somebody looks, a network may take another way, with other roundings
            maps = [x for x in feature_maps(model, images) if x.shape[-2] * x.shape[-1] > 1]
            if maps:
                feature_maps(model, images)
            if not known:
                guesses.clear()
                run(images)
    finally:
        for handle in handles:
            handle.remove()
    return [known[number][1] for number in sorted(known, reverse=True)] or list(guesses)[::-1]


def _plausible(x: Tensor, images: Tensor) -> bool:
    """Whether an output (1, a, b, c) looks like a map: of the image's proportions, and no weights of an attention."""
    (height, width), (rows, columns) = images.shape[-2:], x.shape[-2:]
    proportions = rows > 1 and rows <= height and abs(rows * width - columns * height) < max(height, width)
    return proportions and not (
        bool((x >= 0).all()) and torch.allclose(x.sum(-1), torch.ones_like(x[..., 0]), atol=1e-3)
    )


def feature_maps(model: Any, images: Tensor) -> list[Tensor]:
    """What a network says its maps (B, C, h, w) are, lowest level first; nothing if it does not say."""
    try:
        if hasattr(model, "pyramid"):
            found = [*model.pyramid(model.backbone, images), model.forward_features(images)]
        else:
            found = model.forward_intermediates(images, intermediates_only=True)
    except Exception:  # a network is free not to offer any, in whatever words
        return []
    return [x for x in found if isinstance(x, Tensor) and x.ndim == 4]
