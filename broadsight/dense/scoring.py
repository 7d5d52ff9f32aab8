"""Scores of a dense model on labelled images: it predicts batch by batch, and the predictions are scored as by COCO."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from ..data.dense.pose_geometry import apply_affine
from ..visual.metrics import GOALS
from .average_precision import SIZES, AveragePrecision, to_results
from .inference import Views, detect, segment
from .pose import decode, flip_test

IGNORED = 255  # target pixels that do not count
KINDS = {"detect": ("box",), "instances": ("box", "mask"), "keypoints": ("box", "keypoint")}


class SegmentationScores:
    """Counts pixels by true and predicted class, for figures of the whole dataset. torchmetrics has no IoU over only
    those classes that the targets show."""

    def __init__(self, class_names: Sequence[str]):
        self.num_classes, self.class_names = len(class_names), tuple(class_names)
        self.reset()

    def reset(self) -> None:
        self._own = uuid4().hex  # so that a state that is merged twice counts once
        self._parts = {self._own: torch.zeros(self.num_classes, self.num_classes, dtype=torch.int64)}

    @property
    def counts(self) -> Tensor:
        """(K, K) pixels: rows are true classes, columns predicted ones."""
        return torch.stack(list(self._parts.values())).sum(0)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add targets (H, W) or (B, H, W) and predicted classes, as whole numbers or as scores ((B,) K, H, W)."""
        if prediction.is_floating_point():
            if prediction.ndim < 3 or prediction.shape[-3] != self.num_classes:
                expected = f"{self.num_classes} classes, H, W"
                raise ValueError(f"scores of shape {tuple(prediction.shape)}; expected {expected}")
            if not prediction.isfinite().all():
                raise ValueError("scores are not all finite; the model has diverged")
            prediction = prediction.argmax(-3)
        if prediction.shape != target.shape:
            raise ValueError(f"prediction is {tuple(prediction.shape)} but target {tuple(target.shape)}; resize it")
        target = target.to(prediction.device)
        counted = target != IGNORED
        said, shown = prediction[counted].long(), target[counted].long()
        for name, values in (("prediction", said), ("target", shown)):
            low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
            if low < 0 or high >= self.num_classes:
                expected = f"0 to {self.num_classes - 1}" + f" or {IGNORED} to ignore" * (name == "target")
                raise ValueError(f"{name} holds {low if low < 0 else high}; expected {expected}")
        pairs = torch.bincount(shown * self.num_classes + said, minlength=self.num_classes**2)
        self._parts[self._own] += pairs.reshape(self.num_classes, self.num_classes).cpu()

    def state(self) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in self._parts.items()}

    def merge(self, others: Iterable[dict[str, Tensor]]) -> None:
        for other in others:
            self._parts |= {name: part.clone() for name, part in other.items() if name != self._own}

    def compute(self) -> dict[str, float]:
        """In per cent; nan without pixels. miou and macc are means over the classes that the targets show, so that they
        compare between models; with a single class they are nan: a model that always predicts it is correct."""
        right, shown, said = self._sums()
        there = shown > 0
        iou, accuracy = (_percent(right, whole)[there] for whole in (shown + said - right, shown))
        miou, macc = (part.mean().item() if len(part) > 1 else math.nan for part in (iou, accuracy))
        return {"miou": miou, "aacc": _percent(right.sum(), shown.sum()).item(), "macc": macc}

    def coverage(self) -> tuple[int, int]:
        """Number of classes that the targets show, and of all classes."""
        return int((self.counts.sum(1) > 0).sum()), self.num_classes

    def per_class(self) -> list[dict[str, Any]]:
        """A row for each class; figures are nan without true pixels, precision also if it is never predicted."""
        right, shown, said = self._sums()
        there = shown.where(shown > 0, math.nan)
        iou, precision = _percent(right, there + said - right), _percent(right + 0 * there, said)
        columns = {"pixels": shown.long(), "iou": iou, "acc": _percent(right, there), "precision": precision}
        lists = self.class_names, *(column.tolist() for column in columns.values())
        return [dict(zip(("name", *columns), row, strict=True)) for row in zip(*lists, strict=True)]

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Correct, true and predicted pixels of each class (K,)."""
        counts = self.counts.double()
        return counts.diagonal(), counts.sum(1), counts.sum(0)


def _percent(part: Tensor, whole: Tensor) -> Tensor:
    return 100 * part / whole  # 0 / 0 is nan


class Scorer:
    """Collects the predictions of a model and compares them by a metric.

    Figures are in per cent; `keypoint_offset` is what x and y of keypoints in model and targets exceed those in
    COCO's files by.
    """

    add: Any  # predicts on and scores a batch, given a model in eval mode and the batch; the number of images

    def __init__(
        self,
        task: str,
        metric: Any,
        *,
        views: Views | None = None,
        device: torch.device | str = "cpu",
        flip_pairs: Sequence[tuple[int, int]] = (),
        keypoint_offset: float = 0.0,
    ):
        self.goal, self.metric, self.views, self.device = GOALS[task], metric, views or Views(), device
        self.flip_pairs, self.keypoint_offset = flip_pairs, keypoint_offset

    def reset(self) -> None:
        self.metric.reset()

    def state(self) -> Any:
        """All that was collected, to be sent to other processes."""
        return self.metric.state()

    def merge(self, others: Iterable[Any]) -> None:
        """Add the states of other processes, in any order, with or without one's own."""
        self.metric.merge(others)

    def compute(self) -> dict[str, float]:
        """Figures by name; nan for those that are undefined."""
        return self.metric.compute()


class ObjectScorer(Scorer):
    """Boxes, masks or keypoints of objects against COCO targets; `keep` fills `results` for COCO's result files."""

    def __init__(
        self, task: str, category_ids: dict[int, int], class_names: Sequence[str], *, keep: bool = False, **options: Any
    ):
        super().__init__(task, AveragePrecision(KINDS[task], category_ids, class_names), **options)
        self.keep, self.results = keep, []

    def find(self, model: nn.Module, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Objects in images of bytes (C, H, W)."""
        given = [image.to(self.device).float() / 255 for image in images]
        return detect(model, given, self.views, self.flip_pairs)

    def add(self, model: nn.Module, batch: Any) -> int:
        found = self.find(model, batch.images)
        for image, one, target in zip(batch.images, found, batch.targets, strict=True):
            one, target = (moved_keypoints(objects, -self.keypoint_offset) for objects in (one, target))
            if self.keep:
                self.results += to_results(target["image_id"], one, self.metric.category_ids)
            self.metric.update(target["image_id"], (image.shape[-2], image.shape[-1]), one, target)
        return len(batch.images)


class PixelScorer(Scorer):
    """Classes of pixels against masks, at the size of the masks."""

    def __init__(self, class_names: Sequence[str], **options: Any):
        super().__init__("segment", SegmentationScores(class_names), **options)

    def find(self, model: nn.Module, image: Tensor) -> Tensor:
        """Probabilities (K, H, W) of the classes in an image of bytes (C, H, W)."""
        return segment(model, image.to(self.device).float() / 255, self.views)

    def add(self, model: nn.Module, batch: Any) -> int:
        for image, target in zip(batch.images, batch.targets, strict=True):
            self.metric.update(self.find(model, image), target)  # refuses what is not finite
        return len(batch.images)


class PoseScorer(Scorer):
    """Keypoints in crops of persons, scored in the images that the crops are from; scales of `views` do not apply."""

    def __init__(self, dataset: Any, category_ids: dict[int, int], class_names: Sequence[str], **options: Any):
        super().__init__("keypoints", AveragePrecision(("keypoint",), category_ids, class_names), **options)
        self.dataset = dataset
        self.reset()

    def reset(self) -> None:
        self._crops: dict[tuple[int, int], dict[str, Tensor]] = {}

    def find(self, model: Any, crops: Tensor, matrices: Tensor) -> Tensor:
        """Keypoints (N, K, 3), x, y and score, for crops (N, C, H, W) of bytes and matrices (N, 2, 3) to images."""
        given = crops.to(self.device).float() / 255
        maps = flip_test(model, given, self.flip_pairs) if self.views.flip else model(given)
        points = decode(maps, stride=model.stride).cpu()
        placed = apply_affine(points[..., :2].double(), matrices.double())
        return torch.cat([placed.float(), points[..., 2:]], -1)

    def add(self, model: nn.Module, batch: Any) -> int:
        metas = [target["meta"] for target in batch.targets]
        if not metas:
            return 0
        found = self.find(model, torch.stack(list(batch.images)), torch.stack([meta["matrix"] for meta in metas]))
        for points, meta in zip(found, metas, strict=True):
            # The score of a person: the mean of its keypoints, times that of the box
            person = dict(boxes=meta["box"], labels=torch.tensor(int(meta["label"])), keypoints=points)
            place = int(meta["image"]), int(meta["place"])
            self._crops[place] = person | dict(scores=points[:, 2].mean() * meta["score"])
        return len(metas)

    def state(self) -> dict[tuple[int, int], dict[str, Tensor]]:
        return dict(self._crops)

    def merge(self, others: Iterable[dict[tuple[int, int], dict[str, Tensor]]]) -> None:
        for other in others:
            self._crops.update(other)

    def predictions(self, image: int) -> dict[str, Tensor]:
        """All persons of one image, as a detector of keypoints would give them."""
        persons = [self._crops[key] for key in sorted(self._crops) if key[0] == image]
        none = dict(boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64), scores=torch.zeros(0))
        none["keypoints"] = torch.zeros(0, len(self.dataset.keypoint_names), 3)
        return {name: torch.cat([empty, *(person[name][None] for person in persons)]) for name, empty in none.items()}

    def compute(self) -> dict[str, float]:
        self.metric.reset()
        for image in range(len(self.dataset)):
            target = self.dataset.target(image)
            pair = (moved_keypoints(objects, -self.keypoint_offset) for objects in (self.predictions(image), target))
            self.metric.update(target["image_id"], target["boxes"].canvas_size, *pair)
        return self.metric.compute()


def make_scorer(
    task: str, images: Any, class_names: Sequence[str], *, top_down: bool, keep: bool = False, **options: Any
) -> Scorer:
    """The scorer of a task on labelled images; `top_down` for models that take crops of single objects."""
    if task == "segment":
        return PixelScorer(class_names, **options)
    if top_down:
        return PoseScorer(images, images.category_ids, class_names, **options)
    return ObjectScorer(task, images.category_ids, class_names, keep=keep, **options)


def moved_keypoints(found: dict[str, Any], by: float) -> dict[str, Any]:
    """The same objects with `by` added to x and y of their keypoints, if they have any."""
    if "keypoints" not in found:
        return found
    points = found["keypoints"]
    return {**found, "keypoints": points + points.new_tensor([by, by, 0.0])}


def defined(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Figures without the undefined ones, such as AP of large objects where there are none."""
    return {name: value for name, value in known_or_none(figures).items() if value is not None}


def known_or_none(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with None for undefined numbers."""
    undefined = {name: None for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**figures, **undefined}


def why_missing(name: str, occurring: int) -> str:
    """Why a figure is undefined on images with this number of classes."""
    if name in ("miou", "macc"):
        return f"needs pixels of at least two classes; the masks show {occurring}"
    size = name.rpartition("_")[2]
    return f"there are no {size} objects" if occurring and f"_{size}" in SIZES else "there are no objects"
