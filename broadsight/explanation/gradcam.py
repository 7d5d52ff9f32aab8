"""Grad-CAM on the feature maps of any model (Selvaraju et al., ICCV 2017)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.loading import Batch
from ..evaluation.predictions import Subject, restricted
from ..inspection.map_places import Place, place_named, places_of
from ..inspection.meta_pass import in_eval_mode
from ..inspection.watch import hooked

# A class for all images, or one for each (B,); None for the predicted class of each image.
Target = int | Tensor | None


class WithModel(Subject, Protocol):
    """A subject whose model can be looked into."""

    @property
    def model(self) -> nn.Module: ...


class GradCam:
    """Saliency of a model's answer: relu(sum over channels of mean gradient x activation), bilinear to (B, H, W).

    The gradient is that of the logit of the predicted class, right or wrong, with respect to the last feature map that
    the answer depends on and that has more than one place. A ViT that answers by its class token does not depend on the
    patches that leave its last block, so its map is the one that enters this block. For a pooling that merges maps of
    several levels it is the merged one: the backbone's last map is only a part of what is pooled.

    Args:
        kept: The classes that compete; all of the model's if None.
        target: Another class than the predicted one; see `Target`.
        layer: Path of the module whose map is looked at instead of the last.
    """

    def __init__(
        self, classifier: WithModel, kept: np.ndarray | None = None, target: Target = None, layer: str | None = None
    ):
        self.classifier, self.kept, self.target, self.layer = classifier, kept, target, layer
        self.about = "Grad-CAM of the model's own answer" if target is None else "Grad-CAM of a chosen class"
        self._place: Place | None = None  # found with the first images
        self._size: tuple[int, ...] | None = None

    def __call__(self, images: Tensor, batch: Batch | None = None) -> Tensor:
        """Normalised images (B, C, H, W) -> (B, H, W), 0 or more; labels are not used."""
        with in_eval_mode(self.classifier.model):
            if self._place is None or self._size != tuple(images.shape[1:]):
                self._place, self._size = self._found(images[:1]), tuple(images.shape[1:])
            pair = maps_and_gradients(self._logits, images, [self._place], self.target)[0]
        return F.interpolate(cam(*pair)[:, None], images.shape[-2:], mode="bilinear")[:, 0]

    def _logits(self, images: Tensor) -> Tensor:
        logits = self.classifier.logits(images)
        return logits if self.target is not None else restricted(logits, self.kept)

    def _found(self, images: Tensor) -> Place:
        model = self.classifier.model
        if self.layer is not None:
            return place_named(model, self.classifier.logits, images, self.layer)
        one = self.target[:1] if isinstance(self.target, Tensor) else self.target
        for place in places_of(model, self.classifier.logits, images):
            _, gradient = maps_and_gradients(self._logits, images, [place], one)[0]
            if bool(gradient.any()):
                return place
        raise ValueError(
            f"gradcam finds no feature map in {type(model).__name__} that its answers depend on; use another saliency"
        )


def cam(activation: Tensor, gradient: Tensor) -> Tensor:
    """A map and its gradient (B, C, h, w) -> (B, h, w), 0 or more: every channel counts by its mean gradient."""
    weights = gradient.float().mean((2, 3), keepdim=True)  # B C 1 1
    return (weights * activation.float()).sum(1).relu()


def maps_and_gradients(
    run: Callable[[Tensor], Tensor], images: Tensor, places: Sequence[Place], target: Target = None
) -> list[tuple[Tensor, Tensor]]:
    """For each place its map (B, C, h, w), and the gradient of the target's logit with respect to it; in one pass.

    Works on frozen models and where gradients are switched off. Weights get no gradient.

    Args:
        run: Normalised images -> logits (B, classes), in eval mode.
        places: In any order.
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
            score = _answers(logits, target).sum()
            gradients = torch.autograd.grad(score, [leaves[place] for place in places], materialize_grads=True)
    found = zip(places, gradients, strict=True)
    return [(place.layout.as_map(leaves[place].detach()), place.layout.as_map(x)) for place, x in found]


def _answers(logits: Tensor, target: Target) -> Tensor:
    """(B, classes) -> (B,)"""
    if target is None:
        return logits.max(1).values
    classes = torch.as_tensor(target, device=logits.device).expand(len(logits))
    if int(classes.min()) < 0 or int(classes.max()) >= logits.shape[1]:
        wrong = next(one for one in classes.tolist() if not 0 <= one < logits.shape[1])
        raise ValueError(f"class {wrong}; the model has {logits.shape[1]}: expected 0 to {logits.shape[1] - 1}")
    return logits.gather(1, classes[:, None].long())[:, 0]
