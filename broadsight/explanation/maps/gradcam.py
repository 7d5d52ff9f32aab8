"""Grad-CAM (Selvaraju et al., ICCV 2017): where the features are that speak for a class, at any depth of any model."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.loading import Batch
from ...evaluation.predictions import restricted
from ...inspection.map_places import Place, place_named, places_of
from ...inspection.meta_pass import in_eval_mode
from ...inspection.passing import moved
from ...inspection.watch import eager, hooked, uncompiled
from .map import Look

NOTE = "features of bright places raise the score of the class; those of dark ones do not, or lower it"

# The places of each model's maps, by its modules and the images' size, since the search takes two passes of its own.
_found: WeakKeyDictionary[nn.Module, dict[tuple, list[Place]]] = WeakKeyDictionary()


def gradcam_looks(model: nn.Module, image: Tensor, target: int | None = None, layer: str | None = None) -> list[Look]:
    """Grad-CAM of one class on each of the model's feature maps that it depends on, the last being the usual one.

    Args:
        model: Normalised images (B, C, H, W) -> logits (B, classes); it may be frozen, compiled or in train mode.
        image: (1, C, H, W), normalised; moved to the model's device and dtype.
        target: Number of the class; the predicted one if None.
        layer: Path of a module whose map alone is looked at.
    """
    inner = uncompiled(model)
    if image.ndim != 4 or len(image) != 1:
        raise ValueError(f"image has shape {tuple(image.shape)}; expected one, as (1, C, H, W)")
    classes: list[int] = []

    def run(images: Tensor) -> Tensor:
        logits = inner(images).float()
        classes[:] = [int(logits[0].argmax())]
        return logits

    with torch.inference_mode(False), eager(inner), in_eval_mode(inner):
        image = moved(image.clone(), inner)
        if layer is None:
            known = _found.setdefault(inner, {})
            key = (tuple(image.shape[1:]), *map(id, inner.modules()))
            if key not in known:
                known.clear()  # one size at a time: places hold on to modules that may have been replaced
                known[key] = places_of(inner, run, image)[::-1]
            places = known[key]
        else:
            places = [place_named(inner, run, image, layer)]
        if not places:
            raise ValueError(f"gradcam finds no feature map in {type(inner).__name__}; look at another kind")
        pairs = list(zip(places, maps_and_gradients(run, image, places, target), strict=True))
        # With weights of zeros before the answer, as some untrained models have, it depends on none: a flat map
        kept = [(place, pair) for place, pair in pairs if layer or bool(pair[1].any())] or pairs[-1:]
        # Of a model that names no maps, the last one of each size
        last = {place.name if place.said else place.layout.grid: (place, cam(*pair)) for place, pair in kept}
    title = f"class {classes[0] if target is None else target}"
    shown = enumerate(last.values())
    return [Look("gradcam", title, one.name, depth, "heat", values[0].cpu(), NOTE) for depth, (one, values) in shown]


class GradCam:
    """Saliency of a model's answer: relu(sum over channels of mean gradient x activation), bilinear to (B, H, W).

    The gradient is that of the predicted class's logit, among those that are `kept` or all, by the last feature map of
    several places that it depends on: of a ViT with a class token the one that enters the last block, of a pooling over
    several levels the merged one.
    """

    about = "Grad-CAM of the model's own answer"

    def __init__(self, classifier: Any, kept: np.ndarray | None = None):
        self.classifier, self.kept = classifier, kept
        self._places: list[Place] = []  # one, found with the first images of a size
        self._size: tuple[int, ...] = ()

    def __call__(self, images: Tensor, batch: Batch | None = None) -> Tensor:
        """Normalised images (B, C, H, W) -> (B, H, W), 0 or more; labels are not used."""
        with in_eval_mode(self.classifier.model):
            if self._size != tuple(images.shape[1:]):
                self._places, self._size = [self._found(images[:1])], tuple(images.shape[1:])
            ((activation, gradient),) = maps_and_gradients(self._logits, images, self._places)
        return F.interpolate(cam(activation, gradient)[:, None], images.shape[-2:], mode="bilinear")[:, 0]

    def _logits(self, images: Tensor) -> Tensor:
        return restricted(self.classifier.logits(images), self.kept)

    def _found(self, images: Tensor) -> Place:
        model = self.classifier.model
        for place in places_of(model, self.classifier.logits, images):
            if bool(maps_and_gradients(self._logits, images, [place])[0][1].any()):
                return place
        what = f"gradcam finds no feature map in {type(model).__name__} that its answers depend on"
        raise ValueError(f"{what}; use another saliency")


def cam(activation: Tensor, gradient: Tensor) -> Tensor:
    """A map and its gradient (B, C, h, w) -> (B, h, w), 0 or more: every channel counts by its mean gradient."""
    weights = gradient.float().mean((2, 3), keepdim=True)  # B C 1 1
    return (weights * activation.float()).sum(1).relu()


def maps_and_gradients(
    run: Callable[[Tensor], Tensor], images: Tensor, places: Sequence[Place], target: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """For each place its map (B, C, h, w), and the gradient by it of the logit of the target or the predicted class.

    One pass of `run`, from normalised images to logits; also of frozen models. Weights get no gradient.
    """
    leaves: dict[Place, Tensor] = {}
    of_module: dict[nn.Module, list[Place]] = {}
    for place in places:
        of_module.setdefault(place.module, []).append(place)

    def keep(module: nn.Module, inputs: tuple, output: Any) -> Any:
        for place in of_module[module]:
            x = place.tensor(output)
            if not place.layout.suits(x):
                continue
            if not leaves or not x.requires_grad:
                # Gradients end here: what came before needs none, and with frozen weights there would be none
                x = x.detach().requires_grad_()
            leaves[place] = x
            output = place.replaced(output, x.clone())  # the next layer may change its input in place
        return output

    with torch.inference_mode(False), torch.enable_grad():
        with hooked(of_module, after=keep):
            logits = run(images.clone() if images.is_inference() else images)
        for place in places:
            if place not in leaves:
                raise ValueError(f"layer {place.name} takes no part in a pass through the model; choose another")
        gradients: Sequence[Tensor] = [torch.zeros_like(leaves[place]) for place in places]
        if logits.requires_grad and places:  # else the answer does not depend on any map
            classes = logits.shape[1]
            if target is not None and not 0 <= target < classes:
                raise ValueError(f"class {target}; the model has {classes}: expected 0 to {classes - 1}")
            score = (logits.max(1).values if target is None else logits[:, target]).sum()
            gradients = torch.autograd.grad(score, [leaves[place] for place in places], materialize_grads=True)
    found = zip(places, gradients, strict=True)
    return [(place.layout.as_map(leaves[place].detach()), place.layout.as_map(x)) for place, x in found]
