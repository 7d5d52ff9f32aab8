"""Dense models as candidates: a head on any backbone, timed from images to predictions, or a step of its training."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..dense import HEADS
from ..dense.build import make_dense_model
from ..dense.counting import CLASSES, Counted
from ..inspection.macs import count_calls
from ..surgery.fusion import fuse
from .candidates import Candidate, Variant, blame
from .settings import Settings

OBJECTS = 7  # in an image that is trained on, about as many as in COCO's


def build(variant: Variant, settings: Settings) -> list[Candidate]:
    """A dense model with seeded random weights on images of noise; in training their objects are random too."""
    title = str(variant)
    settings = settings if variant.size is None else replace(settings, size=variant.size)
    model, head = create(variant, settings), HEADS[variant.head or ""]
    stacked = head.task == "segment" or head.top_down  # such models take one batch, and give maps rather than objects
    with blame(title, "being prepared"):
        torch.manual_seed(settings.seed)
        images = torch.rand(settings.batch, model.stages.in_chans, *settings.size)
        macs = count_calls(Counted(model), (1, *images.shape[1:]))[0]
        memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
        place: dict[str, Any] = dict(device=settings.device, memory_format=memory_format)
        model = (fuse(model) if settings.fuse else model).to(**place).eval()
        images = images.to(settings.device)
        given: Any = images.to(memory_format=memory_format) if stacked else list(images)
        targets = objects = None
        if settings.train:
            targets = _maps(model, images) if stacked else [_objects(model, *settings.size) for _ in images]
        elif not stacked:
            with torch.inference_mode():
                objects = sum(len(found["boxes"]) for found in model(given)) / len(images)
        calls = _calls(model.train(settings.train), given, targets)
    return [Candidate(title, "eager", model, macs, *calls, variant, settings.size, objects=objects)]


def create(variant: Variant, settings: Settings) -> Any:
    """The model of a variant, for as many classes as the papers' data have."""
    assert variant.head is not None
    head = HEADS[variant.head]
    sized = {"image_size": settings.size} if head.square else {}
    torch.manual_seed(settings.seed)
    parts: dict[str, Any] = {f"{part}_args": variant.of(part) for part in ("neck", "broadcast")}
    parts |= dict(head_args={**sized, **variant.of("head")}, backbone_args=variant.of("model"), neck=variant.neck)
    broadcast = None if variant.broadcast == "none" else variant.broadcast
    return make_dense_model(variant.head, variant.name, CLASSES[head.task], broadcast=broadcast, **parts)


def _calls(model: nn.Module, images: Any, targets: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What runs the model forward, in training to the sum of its losses, and what is timed."""

    def forward() -> Any:
        return sum(model(images, targets).values()) if model.training else model(images)

    def train() -> None:
        model.zero_grad(set_to_none=True)
        forward().backward()

    return forward, train if model.training else torch.inference_mode()(forward)


def _maps(model: Any, images: Tensor) -> Any:
    """Random classes of all pixels, or heat maps and their weights."""
    place: dict[str, Any] = dict(device=images.device)
    if model.task == "segment":
        return torch.randint(model.num_classes, (len(images), *images.shape[2:]), **place)
    with torch.inference_mode():
        shape = model(images).shape
    return torch.rand(shape, **place), torch.ones(shape[:2], **place)


def _objects(model: Any, height: int, width: int) -> dict[str, Tensor]:
    """Random boxes of an image, masks that fill them, and keypoints in their middles."""
    corners = torch.rand(OBJECTS, 2, 2).sort(1).values * 0.9
    corners[:, 1] += 0.1  # of a side at least
    boxes = (corners * torch.tensor([width, height])).flatten(1)
    left, top, right, bottom = boxes[:, :, None].unbind(1)
    x, y = torch.arange(width), torch.arange(height)
    down, across = (y >= top) & (y < bottom), (x >= left) & (x < right)
    masks = (down[:, :, None] & across[:, None]).to(torch.uint8)
    middles = torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, torch.full((OBJECTS, 1), 2.0)], 1)  # visible
    predictor = getattr(getattr(model, "roi_heads", None), "keypoint_predictor", None)
    points = middles[:, None].repeat(1, 1 if predictor is None else predictor.kps_score_lowres.out_channels, 1)
    labels = torch.randint(1, model.num_classes + 1, (OBJECTS,))
    target = dict(boxes=boxes, labels=labels, masks=masks, keypoints=points)
    return {name: one.to(next(model.parameters()).device) for name, one in target.items()}
