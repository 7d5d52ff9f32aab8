"""Learning to detect, to segment or to find keypoints: the model's own losses, and its scores as COCO has them."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...data.dense.loading import DenseBatch
from ...dense.scoring import Scorer, known_or_none
from ..processes import gather_objects
from ..run_folder import CLASSES_JUDGED
from .objective import Step, Work


class DenseWork(Work):
    """The work of an engine that trains a dense model; images that are all of one size, and targets, are `stacked`."""

    unreadable = ValueError  # a mistake in the user's files

    def __init__(self, accelerator: Accelerator, model: nn.Module, scorer: Scorer, *batches: Any, stacked: bool):
        super().__init__(accelerator, *batches)
        self.model, self.scorer, self.stacked, self.goal = model, scorer, stacked, f"val_{scorer.goal}"
        self._begin_scores = scorer.reset

    def step(self, batch: DenseBatch) -> Step:
        """Sum of the losses of a training batch."""
        images: Any = [image.to(self.device, non_blocking=True).float() / 255 for image in batch.images]
        targets: Any = [self._moved(target) for target in batch.targets]
        if self.stacked:
            images = torch.stack(images)
            if isinstance(targets[0], Tensor):  # masks
                targets = torch.stack(targets)
            else:
                targets = tuple(torch.stack([target[key] for target in targets]) for key in ("heatmaps", "weights"))
        losses = self.model(images, targets)
        return Step(torch.stack(list(losses.values())).sum(), len(batch.images), None)

    def _moved(self, target: Any) -> Any:
        if isinstance(target, Tensor):
            return target.to(self.device, non_blocking=True)
        return {key: self._moved(value) for key, value in target.items() if isinstance(value, Tensor)}

    def _score(self, model: nn.Module, batch: DenseBatch) -> int:
        with self.accelerator.autocast():
            return self.scorer.add(model, batch)

    def _scores(self) -> dict[str, float | None]:
        self.scorer.merge(gather_objects(self.scorer.state()))
        figures = {f"val_{name}": value for name, value in known_or_none(self.scorer.compute()).items()}
        return {**figures, CLASSES_JUDGED: self.scorer.metric.coverage()[0]}  # over how many classes the means are
