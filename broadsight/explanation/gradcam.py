"""Grad-CAM on the feature maps of any model (Selvaraju et al., ICCV 2017)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.loading import Batch
from ..evaluation.predictions import restricted
from ..inspection.map_places import Place, places_of
from ..inspection.meta_pass import in_eval_mode
from ..inspection.watch import hooked


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
