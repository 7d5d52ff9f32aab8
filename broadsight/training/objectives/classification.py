"""Learning to classify: batches to the device, augmentation there, the task, and top-1 and top-5 accuracy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.task import TrainingTask
from torch import nn
from torch.utils.data import DataLoader

from ...data.loading import Batch, Key, TrainOrder, close
from ...data.normalising import Normalise
from ...inspection.meta_pass import in_eval_mode
from ..augmentation import BatchAugmentation
from ..processes import sum_over_processes
from ..recipes import Recipe
from .objective import Failed, Step


class Classification:
    """The work of an engine that trains a classifier.

    Args:
        task: Images and labels -> loss and logits.
        train, order: Training batches, and what decides on their order.
        val: Batches of evaluation.
        mean, std: Normalise images whose values are between 0 and 1.
        classes: How many.
        comparable: Whether top-1 tells epochs apart; not where all validation images are of one class, since whoever
            always says that is right.
    """

    goal = "val_top1"

    def __init__(
        self,
        accelerator: Accelerator,
        task: TrainingTask,
        recipe: Recipe,
        train: DataLoader,
        order: TrainOrder,
        val: DataLoader,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        classes: int,
        comparable: bool = True,
    ):
        self.accelerator, self.task, self.recipe, self.comparable = accelerator, task, recipe, comparable
        self.train, self.order, self.val = train, order, val
        self.classes, self.device, self.stays_in_eval = classes, accelerator.device, recipe.frozen_stats
        self.updates, self.batch, self.accumulate = order.updates, order.batch, order.accumulate
        self.evaluations = len(val.dataset)  # ty: ignore[invalid-argument-type]
        layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self._normalised = Normalise(mean, std, self.device, layout)
        size = self.batch // (self.accumulate * order.processes)
        self._augment = BatchAugmentation(recipe, classes, size, self.device)
        self.counts_correct = not self._augment.mixes
        self._batches: Iterator[Batch] = iter(())

    def begin_epoch(self, epoch: int, first: int) -> None:
        """Make ready for the batches of an epoch from its update `first` on."""
        self.order.start(epoch, first)
        self._augment.begin_epoch(epoch)
        self._batches = iter(self.train)

    def close(self) -> None:
        """End the processes that prepare batches."""
        self._batches = iter(())
        close(self.train)
        close(self.val)

    def next_batch(self) -> Batch:
        return self._readable(next(self._batches))

    def _readable(self, batch: Batch) -> Batch:
        if batch.failure:
            raise Failed(batch.failure)
        return batch

    def step(self, batch: Batch) -> Step:
        """Loss of a training batch."""
        images, labels = self._normalised(batch.images), batch.labels.to(self.device, non_blocking=True)
        images, target = self._augment(images, labels)
        result = self.task(images, target)
        correct = None if self._augment.mixes else (result["output"].detach().argmax(-1) == labels).sum()
        return Step(result["loss"], len(labels), correct)

    def keys(self, batch: Batch) -> Sequence[Key]:
        return batch.keys

    def names(self, keys: Sequence[Key]) -> list[str]:
        """What the images are called."""
        return [self.order.source.name(index) for _, _, index in keys]

    def skipped(self, batch: Batch) -> Mapping[str, str]:
        return dict(batch.skipped)

    def evaluate(
        self, model: nn.Module, seen: Callable[[int, str], None]
    ) -> tuple[dict[str, float | None], Mapping[str, str]]:
        """Loss, top-1 and top-5 over all validation images of all processes, none counted twice.

        Returns:
            The figures, None if some answers are no numbers, and which images could not be read.
        """
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        options: dict[str, Any] = dict(num_classes=self.classes, average="micro", validate_args=False)
        metrics: dict[str, Any] = {"val_loss": MeanMetric(), "val_top1": MulticlassAccuracy(**options)}
        if self.classes > 5:
            metrics["val_top5"] = MulticlassAccuracy(top_k=5, **options)
        metrics = {name: metric.to(self.device) for name, metric in metrics.items()}
        skipped: dict[str, str] = {}
        count = broken = 0
        with in_eval_mode(model), torch.inference_mode():
            for batch in self.val:
                skipped.update(self._readable(batch).skipped)
                if not len(batch.labels):
                    continue
                images, labels = self._normalised(batch.images), batch.labels.to(self.device, non_blocking=True)
                with self.accelerator.autocast():
                    logits = model(images)
                logits = logits.float()
                count += len(labels)
                seen(len(labels) * self.order.processes, "evaluating")
                if not logits.isfinite().all():
                    broken += 1
                    continue
                metrics["val_loss"].update(F.cross_entropy(logits, labels, reduction="none"))
                for name in metrics.keys() - {"val_loss"}:
                    metrics[name].update(logits, labels)
        count, broken = sum_over_processes(torch.tensor([count, broken], device=self.device)).tolist()
        if not count:
            raise Failed(
                f"none of the {self.evaluations} images to validate on can be read; see what is wrong with them"
            )
        if broken:  # torchmetrics would leave losses that are no numbers out, and count the argmax of such answers
            return dict.fromkeys(metrics), skipped
        values = {name: float(metric.compute()) for name, metric in metrics.items()}
        return {name: value if name == "val_loss" else 100 * value for name, value in values.items()}, skipped
