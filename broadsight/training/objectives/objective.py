"""What an engine works on: what is learned, how far a run is, and how it may end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...data.loading import Key, TrainOrder, close
from ...inspection.meta_pass import in_eval_mode
from ..processes import gather_objects


class Step(NamedTuple):
    """Result of a pass over a batch: the loss to minimise, the number of images, and how many were right."""

    loss: Tensor
    count: int
    correct: Tensor | None


class Interrupted(Exception):
    """The run was asked to stop, has saved itself and can be continued."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.code = 128 + signal_number


class Failed(RuntimeError):
    """The run cannot go on; its last checkpoint is whole."""


class Work:
    """What is learned: batches in their order, what a pass over one computes, and how good the model is."""

    goal: str  # metric by which the best weights are chosen; an epoch may have no value of it
    comparable = True  # whether the goal tells epochs apart; otherwise the last weights are kept
    counts_correct = False  # whether steps count correct answers
    stays_in_eval = False  # whether the model learns in eval mode
    unreadable: type[Exception] = Failed  # is raised for a batch that could not be prepared
    # What a task defines
    step: Any  # the Step over a batch
    _begin_scores: Any  # forgets the batches of earlier evaluations
    _score: Any  # adds a batch to the figures of a model; returns its number of images
    _scores: Any  # the figures over all processes, None where one has no value

    def __init__(self, accelerator: Accelerator, train: DataLoader, order: TrainOrder, val: DataLoader):
        self.accelerator, self.device = accelerator, accelerator.device
        self.train, self.order, self.val = train, order, val
        self.updates, self.batch, self.accumulate = order.updates, order.batch, order.accumulate  # of an epoch, update
        self.evaluations = len(val.dataset)  # ty: ignore[invalid-argument-type]
        self._batches: Iterator[Any] = iter(())

    def begin_epoch(self, epoch: int, first: int) -> None:
        """Make ready for the batches of an epoch from its update `first` on."""
        self.order.start(epoch, first)
        self._batches = iter(self.train)

    def close(self) -> None:
        """End the processes that prepare batches."""
        self._batches = iter(())
        close(self.train)
        close(self.val)

    def next_batch(self) -> Any:
        return self._readable(next(self._batches))

    def _readable(self, batch: Any) -> Any:
        if batch.failure:
            raise self.unreadable(batch.failure)
        return batch

    def names(self, keys: Sequence[Key]) -> list[str]:
        """Names of the images."""
        return [self.order.source.name(index) for _, _, index in keys]

    def evaluate(
        self, model: nn.Module, seen: Callable[[int], None]
    ) -> tuple[dict[str, float | None], Mapping[str, str]]:
        """Metrics over all validation images of all processes, none counted twice; which images could not be read."""
        skipped: dict[str, str] = {}
        count = 0
        self._begin_scores()
        with in_eval_mode(model), torch.inference_mode():
            for batch in self.val:
                skipped.update(self._readable(batch).skipped)
                if len(batch.images):
                    count += self._score(model, batch)
                    seen(len(batch.images) * self.order.processes)
        if not sum(gather_objects(count)):
            what = f"none of the {self.evaluations} images to validate on can be read"
            raise Failed(f"{what}; see what is wrong with them")
        return self._scores(), skipped


@dataclass
class Progress:
    """Where a run is, as its checkpoints keep it."""

    epoch: int = 0  # epochs that are finished
    update: int = 0  # updates of the present epoch
    updates: int = 0  # in all
    evaluated: bool = False  # since the last update
    interval: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum of losses, images since the last metrics
    total: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # sum of losses, correct, images of the epoch
    best: float | None = None  # of the goal; while no epoch has a value, the last weights are kept
    best_epoch: int = 0
    stale: int = 0  # epochs since then
    best_weights: str | None = None  # digest of the file of weights that are kept
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read, and why
    metrics_size: int = 0  # bytes
    finished: bool = False
    scheduler: dict[str, Any] = field(default_factory=dict)
    run: str | None = None  # which one; see `identity`

    @property
    def keeps_present(self) -> bool:
        """Whether the weights kept are the present ones."""
        return self.evaluated and (self.best is None or self.best_epoch == self.epoch)
