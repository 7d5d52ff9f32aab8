"""Small dense models of every head that exports, as `open_dense` would hand them over, and an image for them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from broadsight.dense import HEADS as REGISTERED
from broadsight.dense import build
from broadsight.dense.scoring import Views
from broadsight.deployment import Description
from broadsight.deployment.dense.raw import RawModel, raw_model
from broadsight.deployment.dense.session import find
from broadsight.surgery.pooling import swap_pool
from tests.deployment.tiny import reference

HEADS: dict[str, dict[str, Any]] = {
    "retinanet": dict(width=32, image_size=(64, 107)),
    "retinanet atss": dict(width=64, image_size=(64, 107), assigner="atss"),
    "fcos": dict(width=64, image_size=(64, 107)),
    "ssdlite": dict(image_size=(96, 80), extra_widths=(32, 16, 16, 16)),
    "rtdetr": dict(image_size=(64, 96), channels=16, heads=2, feed_forward=16, decoder_layers=2, queries=20),
    "semantic_fpn": dict(pyramid_channels=16, channels=8),
    "upernet": dict(channels=16),
    "simple_baseline": dict(channels=8, num_keypoints=5, input_size=(96, 64)),
}


@cache
def dense_run(kind: str, backbone: str = "test_resnet", neck: str = "fpn") -> Any:
    """What `open_dense` gives, as far as export asks; weights are such that there is something to find."""
    torch.manual_seed(0)
    head = kind.split()[0]
    below: Any = swap_pool(backbone, "map", dim=64, heads=4, mlp_dim=64) if neck == "map" else backbone
    model: Any = build(head, below, 3, neck=neck, **HEADS[kind]).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "stages.network." not in name:
            # Activations keep their size, so that scores are further apart than rounding
            parameter.data.add_(torch.randn_like(parameter) * (1.4 / parameter[0].numel() ** 0.5))
        if name.endswith("cls_logits.bias"):
            parameter.data.zero_()
    task, top_down = REGISTERED[head].task, head == "simple_baseline"
    names: Any = dict(classes=("a", "b", "c"), keypoint_names=tuple("vwxyz"), category_ids={1: 1, 2: 2, 3: 3})
    points: Any = dict(flip_pairs=(), skeleton=((0, 1),), keypoint_offset=0.0, top_down=top_down)
    place: Any = dict(title=f"{kind} {backbone} {neck}", path=Path("runs") / kind, settings={"data": "elsewhere"})
    seen: Any = dict(channels=3, views=lambda: Views(short_side=64, long_side=256), device=torch.device("cpu"))
    made: Any = dict(head=head, task=task, model=model, own_data=_elsewhere, recipe=SimpleNamespace(image_size=96))
    return SimpleNamespace(**made, **names, **points, **place, **seen)


def _elsewhere() -> None:
    raise FileNotFoundError("the images of this run are elsewhere")


def description_of(run: Any, raw: RawModel, any_size: bool = True) -> Description:
    image = dict(channels=3, height=raw.size[0], width=raw.size[1], any_batch=True, any_size=any_size and raw.any_size)
    names = run.task, run.title, "x", run.classes, raw.outputs
    return Description.from_json(Description(*names, image, raw.preprocessing, decoding=raw.decoding).to_json())


def in_torch(raw: RawModel) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """The model in torch, called as a session is."""
    return lambda images: dict(zip(raw.outputs, reference(raw.model)(images), strict=True))


def raw_find(run: Any, image: Image.Image, boxes: Any = None) -> dict[str, np.ndarray]:
    """What the raw model finds in torch, decoded as an artefact's outputs are."""
    raw = raw_model(run)
    return find(in_torch(raw), description_of(run, raw), image, boxes)


def make_image(width: int = 150, height: int = 101, seed: int = 0) -> Image.Image:
    """Coarse noise, which models without training find things in."""
    small = np.random.default_rng(seed).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)
