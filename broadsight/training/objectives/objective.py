"""What an engine works on: what is learned, how far a run is, and how it may end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


class Step(NamedTuple):
    """What a pass over a batch gives: the loss to minimise, over how many images, and how many it got right."""

    loss: Tensor
    count: int
    correct: Tensor | None


class Work(Protocol):
    """What is learned: batches in their order, what a pass over one computes, and how good the model is.

    `updates` are those of an epoch, `goal` the metric that the best weights have most of, None where it has no value;
    `counts_correct` says whether steps count right answers, `stays_in_eval` whether the model learns in eval mode.
    """

    updates: int
    accumulate: int
    batch: int
    evaluations: int
    goal: str
    counts_correct: bool
    stays_in_eval: bool

    def begin_epoch(self, epoch: int, first: int) -> None: ...
    def next_batch(self) -> Any: ...
    def step(self, batch: Any) -> Step: ...
    def keys(self, batch: Any) -> Any: ...
    def names(self, keys: Any) -> list[str]: ...
    def skipped(self, batch: Any) -> Mapping[str, str]: ...
    def close(self) -> None: ...
    def evaluate(self, model: nn.Module, seen: Any) -> tuple[dict[str, float | None], Mapping[str, str]]: ...


class Interrupted(Exception):
    """The run was asked to stop, has saved itself and can be continued."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.code = 128 + signal_number


class Failed(RuntimeError):
    """The run cannot go on; its last checkpoint is whole."""


@dataclass
class Progress:
    """Where a run is, as its checkpoints keep it.

    Args:
        epoch, update, updates: Epochs finished, updates of the present one, updates in all.
        evaluated: Nothing was learned since the last evaluation.
        interval: Sum of losses and number of images since the last line of the metrics.
        total: Sum of losses, right answers and number of images of the present epoch.
        best, best_epoch, stale: The best of the goal, when it was reached, and for how many epochs it was not; None and
            0 as long as no epoch has a value of it, of which the last one's weights are kept.
        best_weights: The digest of the file of weights that are kept.
        skipped: Images that could not be read, and why.
        metrics_size: Bytes of the metrics that belong to this.
        finished: There is nothing left to do.
        run: Which run it is, as `identity` has it.
    """

    epoch: int = 0
    update: int = 0
    updates: int = 0
    evaluated: bool = False
    interval: list[float] = field(default_factory=lambda: [0.0, 0.0])
    total: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    best: float | None = None
    best_epoch: int = 0
    stale: int = 0
    best_weights: str | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    metrics_size: int = 0
    finished: bool = False
    scheduler: dict[str, Any] = field(default_factory=dict)
    run: str | None = None

    @property
    def keeps_present(self) -> bool:
        """Whether the weights that are kept are those of this moment."""
        return self.evaluated and (self.best is None or self.best_epoch == self.epoch)
