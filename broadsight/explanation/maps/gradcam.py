"""Grad-CAM at every depth: where the features are that speak for a class."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...inspection.map_places import Place, place_named, places_of
from ...inspection.meta_pass import in_eval_mode
from ...inspection.passing import check_model, moved
from ...inspection.watch import eager, uncompiled
from ..gradcam import cam, maps_and_gradients
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
    check_model(model)
    if image.ndim != 4 or len(image) != 1:
        raise ValueError(f"image has shape {tuple(image.shape)}; expected one, as (1, C, H, W)")
    inner = uncompiled(model)
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
