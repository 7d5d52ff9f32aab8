"""Learning to detect, to segment or to find keypoints: the model's own losses, and its scores as COCO has them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...data.dense.loading import DenseBatch
from ...data.loading import Key, TrainOrder, close
from ...dense.scoring import Scorer, known_or_none
from ...inspection.meta_pass import in_eval_mode
from ..processes import gather_objects
from ..run_folder import CLASSES_JUDGED
from .objective import Failed, Step


class DenseWork:
    """The work of an engine that trains a dense model.

    Args:
        model: The model as it is trained: images and targets -> losses.
        train, order: Training batches, and what decides on their order.
        val: Batches of evaluation.
        scorer: Scores them.
        stacked: Images of a batch are of one size and go in as one tensor, with targets likewise.
    """

    counts_correct = False
    stays_in_eval = False  # where detectors give no losses; a backbone freezes its statistics by itself

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        train: DataLoader,
        order: TrainOrder,
        val: DataLoader,
        scorer: Scorer,
        *,
        stacked: bool,
    ):
        self.accelerator, self.model, self.device = accelerator, model, accelerator.device
        self.train, self.order, self.val, self.scorer, self.stacked = train, order, val, scorer, stacked
        self.goal = f"val_{scorer.goal}"
        self.updates, self.batch, self.accumulate = order.updates, order.batch, order.accumulate
        self.evaluations = len(val.dataset)  # ty: ignore[invalid-argument-type]
        self._batches: Iterator[DenseBatch] = iter(())

    def begin_epoch(self, epoch: int, first: int) -> None:
        """Make ready for the batches of an epoch from its update `first` on."""
        self.order.start(epoch, first)
        self._batches = iter(self.train)

    def close(self) -> None:
        """End the processes that prepare batches."""
        self._batches = iter(())
        close(self.train)
        close(self.val)

    def next_batch(self) -> DenseBatch:
        return _readable(next(self._batches))

    def step(self, batch: DenseBatch) -> Step:
        """Sum of the losses of a training batch."""
        images: Any = [image.to(self.device, non_blocking=True).float() / 255 for image in batch.images]
        targets = [self._moved(target) for target in batch.targets]
        if self.stacked:
            images = torch.stack(images)
            targets = _stack(targets)
        losses = self.model(images, targets)
        return Step(torch.stack(list(losses.values())).sum(), len(batch.images), None)

    def _moved(self, target: Any) -> Any:
        if isinstance(target, Tensor):
            return target.to(self.device, non_blocking=True)
        return {key: self._moved(value) for key, value in target.items() if isinstance(value, Tensor)}

    def keys(self, batch: DenseBatch) -> Sequence[Key]:
        return batch.keys

    def names(self, keys: Sequence[Key]) -> list[str]:
        """What the images are called."""
        return [self.order.source.name(index) for _, _, index in keys]

    def skipped(self, batch: DenseBatch) -> Mapping[str, str]:
        return dict(batch.skipped)

    def evaluate(
        self, model: nn.Module, seen: Callable[[int, str], None]
    ) -> tuple[dict[str, float | None], Mapping[str, str]]:
        """Scores over all validation images of all processes, none counted twice.

        Returns:
            The figures, None where nothing is there to be found, and which images could not be read.
        """
        self.scorer.reset()
        skipped: dict[str, str] = {}
        count = 0
        with in_eval_mode(model), torch.inference_mode():
            for batch in self.val:
                skipped.update(_readable(batch).skipped)
                if not len(batch.images):
                    continue
                with self.accelerator.autocast():
                    count += self.scorer.add(model, batch)
                seen(len(batch.images) * self.order.processes, "evaluating")
        if not sum(gather_objects(count)):
            raise Failed(
                f"none of the {self.evaluations} images to validate on can be read; see what is wrong with them"
            )
        self.scorer.merge(gather_objects(self.scorer.state()))
        figures = known_or_none(self.scorer.compute())
        judged = {CLASSES_JUDGED: self.scorer.coverage()[0]}  # over how many classes the means are
        return {**{f"val_{name}": value for name, value in figures.items()}, **judged}, skipped


def _readable(batch: DenseBatch) -> DenseBatch:
    if batch.failure:  # of the user's files, not of the run
        raise ValueError(batch.failure)
    return batch


def _stack(targets: Sequence[Any]) -> Any:
    """Masks (B, H, W), or heat maps and weights of a batch of crops."""
    if isinstance(targets[0], Tensor):
        return torch.stack(list(targets))
    return tuple(torch.stack([target[key] for target in targets]) for key in ("heatmaps", "weights"))
