"""mIoU, accuracy of pixels and accuracy of classes over a whole dataset."""

import math
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

IGNORED = 255  # target pixels that do not count


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
        """All counts, to be sent to other processes."""
        return {name: part.clone() for name, part in self._parts.items()}

    def merge(self, others: Iterable[dict[str, Tensor]]) -> None:
        """Add the states of other processes, in any order, with or without one's own."""
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
