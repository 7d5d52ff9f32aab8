"""Learning to classify: batches to the device, augmentation there, the task, and top-1 and top-5 accuracy."""

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.task import TrainingTask
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...data.loading import Batch, TrainOrder
from ...data.normalising import Normalise
from ..augmentation import BatchAugmentation
from ..processes import gather_objects
from ..recipes import Recipe
from .objective import Step, Work


class Classification(Work):
    """The work of an engine that trains a classifier; `comparable` if not all validation images are of one class."""

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
        super().__init__(accelerator, train, order, val)
        self.task, self.classes, self.comparable, self.stays_in_eval = task, classes, comparable, recipe.frozen_stats
        layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self._normalised = Normalise(mean, std, self.device, layout)
        size = self.batch // (self.accumulate * order.processes)
        self._augment = BatchAugmentation(recipe, classes, size, self.device)
        self.counts_correct = not self._augment.mixes

    def begin_epoch(self, epoch: int, first: int) -> None:
        super().begin_epoch(epoch, first)
        self._augment.begin_epoch(epoch)

    def step(self, batch: Batch) -> Step:
        images, labels = self._on_device(batch)
        images, target = self._augment(images, labels)
        result = self.task(images, target)
        correct = (result["output"].detach().argmax(-1) == labels).sum() if self.counts_correct else None
        return Step(result["loss"], len(labels), correct)

    def _on_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._normalised(batch.images), batch.labels.to(self.device, non_blocking=True)

    def _begin_scores(self) -> None:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        options: dict[str, Any] = dict(num_classes=self.classes, average="micro", validate_args=False)
        self._loss: Any = MeanMetric(nan_strategy="disable").to(self.device)  # which would wait for a GPU
        tops = {"val_top1": 1, "val_top5": 5} if self.classes > 5 else {"val_top1": 1}
        self._tops = {name: MulticlassAccuracy(top_k=k, **options).to(self.device) for name, k in tops.items()}
        self._broken = torch.zeros((), dtype=torch.int64, device=self.device)

    def _score(self, model: nn.Module, batch: Batch) -> int:
        images, labels = self._on_device(batch)
        with self.accelerator.autocast():
            logits = model(images).float()
        self._broken += ~logits.isfinite().all()
        self._loss.update(F.cross_entropy(logits, labels, reduction="none"))
        for accuracy in self._tops.values():
            accuracy.update(logits, labels)
        return len(labels)

    def _scores(self) -> dict[str, float | None]:
        if sum(gather_objects(int(self._broken))):  # torchmetrics would count the argmax of nan
            return dict.fromkeys(("val_loss", *self._tops))
        tops = {name: 100 * float(accuracy.compute()) for name, accuracy in self._tops.items()}
        return {"val_loss": float(self._loss.compute()), **tops}
