"""How good a dense model is on labelled images: it is asked batch by batch, and what it says is scored as COCO does.

One scorer for each kind of task. Training asks it after every epoch, `eval` once; several processes each score their
own images and put their states together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.dense.pose_geometry import apply_affine
from ..visual.metrics import GOALS
from .average_precision import AveragePrecision
from .coco_results import to_results
from .inference import detect_with_flip, segment
from .pose import decode, flip_test
from .segmentation_scores import SegmentationScores

KINDS = {"detect": ("box",), "instances": ("box", "mask"), "keypoints": ("box", "keypoint")}


@dataclass(frozen=True)
class Views:
    """Which views of an image a model is shown.

    Args:
        flip: The mirror image as well.
        scales: Factors of its size.
        short_side, long_side: What images for segmentation are resized to; None leaves them as they are.
        slide: Overlapping windows of short_side x short_side, for segmentation.
    """

    flip: bool = False
    scales: tuple[float, ...] = (1.0,)
    short_side: int | None = None
    long_side: int | None = None
    slide: bool = False


PLAIN = Views()


class Scorer:
    """Collects what a model says of images. Figures are in per cent, `goal` names the one that counts."""

    goal: str
    metric: Any

    def add(self, model: nn.Module, batch: Any) -> int:
        """Ask a model in eval mode about a batch; how many images that were."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all images."""
        self.metric.reset()

    def state(self) -> Any:
        """All that was collected, as what can be sent to other processes."""
        return self.metric.state()

    def merge(self, others: Iterable[Any]) -> None:
        """Add the states of other processes, in any order; one's own may be among them."""
        self.metric.merge(others)

    def compute(self) -> dict[str, float]:
        """Figures by name; nan for what is not defined."""
        return self.metric.compute()

    def per_class(self) -> list[dict[str, Any]]:
        """A row of figures for each class."""
        return self.metric.per_class()

    def coverage(self) -> tuple[int, int]:
        """How many classes occur in the images, over which means are taken, and how many there are."""
        return self.metric.coverage()


class ObjectScorer(Scorer):
    """Boxes, masks or keypoints of objects against those of COCO targets.

    Args:
        task: "detect", "instances" or "keypoints".
        category_ids, class_names, flip_pairs: Of the data.
        views: Of each image.
        device: Where the model is.
        keypoint_offset: How much keypoints of model and targets are beyond those in COCO's files, which are scored.
        keep: Whether to keep all that was found.

    Attributes:
        results: All that was found, as COCO's result files have it.
    """

    def __init__(
        self,
        task: str,
        category_ids: dict[int, int],
        class_names: Sequence[str],
        *,
        flip_pairs: Sequence[tuple[int, int]] = (),
        views: Views = PLAIN,
        device: torch.device | str = "cpu",
        keypoint_offset: float = 0.0,
        keep: bool = False,
    ):
        self.goal, self.views, self.device, self.flip_pairs = GOALS[task], views, device, flip_pairs
        self.keypoint_offset, self.keep, self.results = keypoint_offset, keep, []
        self.metric = AveragePrecision(KINDS[task], category_ids, class_names)

    def find(self, model: nn.Module, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Objects in images of bytes (C, H, W)."""
        given = [image.to(self.device).float() / 255 for image in images]
        options: dict[str, Any] = dict(flip=self.views.flip, scales=self.views.scales, keypoint_pairs=self.flip_pairs)
        return detect_with_flip(model, given, **options)

    def add(self, model: nn.Module, batch: Any) -> int:
        found = self.find(model, batch.images)
        for image, one, target in zip(batch.images, found, batch.targets, strict=True):
            one, target = (moved_keypoints(objects, -self.keypoint_offset) for objects in (one, target))
            if self.keep:
                self.results += to_results(target["image_id"], one, self.metric.category_ids)
            self.metric.update(target["image_id"], (image.shape[-2], image.shape[-1]), one, target)
        return len(batch.images)


class PixelScorer(Scorer):
    """Classes of pixels against masks, at the size at which those were drawn.

    Args:
        class_names: Of the data.
        views: Of each image.
        device: Where the model is.
    """

    goal = GOALS["segment"]

    def __init__(self, class_names: Sequence[str], *, views: Views = PLAIN, device: torch.device | str = "cpu"):
        self.views, self.device = views, device
        self.metric = SegmentationScores(len(class_names), class_names=class_names)

    def find(self, model: nn.Module, image: Tensor) -> Tensor:
        """Probabilities (K, H, W) of the classes in an image of bytes (C, H, W)."""
        views = self.views
        side = views.short_side or min(image.shape[-2:])
        return segment(
            model,
            image.to(self.device).float() / 255,
            short_side=views.short_side,
            long_side=views.long_side,
            mode="slide" if views.slide else "whole",
            crop=(side, side),
            stride=(max(1, side * 2 // 3), max(1, side * 2 // 3)),
            scales=views.scales,
            flip=views.flip,
        )

    def add(self, model: nn.Module, batch: Any) -> int:
        for image, target in zip(batch.images, batch.targets, strict=True):
            self.metric.update(self.find(model, image), target)  # refuses what is not finite
        return len(batch.images)


class PoseScorer(Scorer):
    """Keypoints in crops of persons, put back into their images and scored there.

    Args:
        dataset: The images that the crops are from, with `target(i)`.
        category_ids, class_names, flip_pairs: Of the data.
        views: Whether mirrored crops are asked about as well; scales do not apply.
        device: Where the model is.
        keypoint_offset: As for ObjectScorer.
    """

    goal = GOALS["keypoints"]

    def __init__(
        self,
        dataset: Any,
        category_ids: dict[int, int],
        class_names: Sequence[str],
        *,
        flip_pairs: Sequence[tuple[int, int]] = (),
        views: Views = PLAIN,
        device: torch.device | str = "cpu",
        keypoint_offset: float = 0.0,
    ):
        self.dataset, self.views, self.device, self.flip_pairs = dataset, views, device, flip_pairs
        self.keypoint_offset = keypoint_offset
        self.metric = AveragePrecision(("keypoint",), category_ids, class_names)
        self.reset()

    def reset(self) -> None:
        self._crops: dict[tuple[int, int], dict[str, Tensor]] = {}

    def find(self, model: Any, crops: Tensor, matrices: Tensor) -> Tensor:
        """Keypoints (N, K, 3) in pixels of the images: x, y and how sure, of crops of bytes (N, C, H, W).

        Args:
            matrices: (N, 2, 3), from a crop to its image.
        """
        given = crops.to(self.device).float() / 255
        maps = flip_test(model, given, self.flip_pairs) if self.views.flip else model(given)
        points = decode(maps, stride=model.stride).cpu()
        placed = apply_affine(points[..., :2].double(), matrices.double())
        return torch.cat([placed.float(), points[..., 2:]], -1)

    def add(self, model: nn.Module, batch: Any) -> int:
        if not len(batch.images):
            return 0
        metas = [target["meta"] for target in batch.targets]
        found = self.find(model, torch.stack(list(batch.images)), torch.stack([meta["matrix"] for meta in metas]))
        for points, meta in zip(found, metas, strict=True):
            # A person's score is how sure its keypoints are, times how sure the box was
            score = points[:, 2].mean() * meta["score"]
            key = int(meta["image"]), int(meta["place"])
            self._crops[key] = dict(points=points, score=score, box=meta["box"], label=meta["label"])
        return len(metas)

    def state(self) -> dict[tuple[int, int], dict[str, Tensor]]:
        return dict(self._crops)

    def merge(self, others: Iterable[dict[tuple[int, int], dict[str, Tensor]]]) -> None:
        for other in others:
            self._crops.update(other)

    def predictions(self, image: int) -> dict[str, Tensor]:
        """All persons of one image, as a detector of keypoints would give them."""
        rows = [self._crops[key] for key in sorted(self._crops) if key[0] == image]
        if not rows:
            count = len(self.dataset.keypoint_names)
            empty = dict(boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64), scores=torch.zeros(0))
            return empty | dict(keypoints=torch.zeros(0, count, 3))
        return dict(
            boxes=torch.stack([row["box"] for row in rows]),
            labels=torch.tensor([int(row["label"]) for row in rows]),
            scores=torch.stack([row["score"] for row in rows]),
            keypoints=torch.stack([row["points"] for row in rows]),
        )

    def compute(self) -> dict[str, float]:
        self.metric.reset()
        for image in range(len(self.dataset)):
            target = self.dataset.target(image)
            pair = (moved_keypoints(objects, -self.keypoint_offset) for objects in (self.predictions(image), target))
            self.metric.update(target["image_id"], target["boxes"].canvas_size, *pair)
        return self.metric.compute()


def make_scorer(
    task: str,
    images: Any,
    class_names: Sequence[str],
    *,
    top_down: bool,
    flip_pairs: Sequence[tuple[int, int]],
    keypoint_offset: float,
    views: Views,
    device: torch.device | str,
    keep: bool = False,
) -> Scorer:
    """The scorer of a task on labelled images; `top_down` for models that see crops of single objects."""
    if task == "segment":
        return PixelScorer(class_names, views=views, device=device)
    common: dict[str, Any] = dict(flip_pairs=flip_pairs, keypoint_offset=keypoint_offset, views=views, device=device)
    if top_down:
        return PoseScorer(images, images.category_ids, class_names, **common)
    return ObjectScorer(task, images.category_ids, class_names, keep=keep, **common)


def moved_keypoints(found: dict[str, Any], by: float) -> dict[str, Any]:
    """The same objects with x and y of their keypoints so much larger, if they have any."""
    if "keypoints" not in found:
        return found
    points = found["keypoints"]
    return {**found, "keypoints": points + points.new_tensor([by, by, 0.0])}


def defined(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Without those that are undefined, such as AP of large objects where there are none."""
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def known_or_none(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The same with None for numbers that are undefined."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def why_missing(name: str, occurring: int) -> str:
    """Why a figure has no value on images in which so many classes occur."""
    if name in ("miou", "macc"):
        return f"needs pixels of at least two classes; the masks show {occurring}"
    if not occurring:
        return "nothing was there to be found"
    what = next((size for size in ("small", "medium", "large") if name.endswith(f"_{size}")), None)
    return f"there are no {what} objects" if what else "nothing was there to be found"
