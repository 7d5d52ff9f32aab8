"""What a classifier says of every image, as arrays: everything that is reported is computed from these."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.loading import Batch

TOP = 5  # classes kept of every image
MOST = 50_000_000  # probabilities that are kept of all images and classes: 200 MB


class Subject(Protocol):
    """What is evaluated."""

    @property
    def normalise(self) -> Callable[[Tensor], Tensor]: ...  # bytes (B, C, H, W) -> normalised, on the device
    @property
    def num_classes(self) -> int: ...
    def logits(self, images: Tensor, /) -> Tensor: ...  # of normalised images (B, num_classes), finite


@dataclass(frozen=True)
class Predictions:
    """N images, C classes."""

    classes: int  # C, those of the model
    rows: np.ndarray  # (N,) which images of the source these are
    labels: np.ndarray  # (N,) what they show
    ranks: np.ndarray  # (N,) how many classes came before that one; 0 is a right answer
    top: np.ndarray  # (N, K) the most probable classes, the first first
    probabilities: np.ndarray  # (N, K) theirs
    losses: np.ndarray  # (N,) cross-entropy
    all_probabilities: np.ndarray | None  # (N, C), unless that is too much to keep
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read, and why
    competing: int | None = None  # how many classes could be answered, where not all of the model's may

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def predicted(self) -> np.ndarray:
        return self.top[:, 0]

    @property
    def confidence(self) -> np.ndarray:
        return self.probabilities[:, 0]


def collect(
    subject: Subject,
    batches: Iterable[Batch],
    *,
    count: int,
    kept: np.ndarray | None = None,
    seen: Callable[[int], None] = lambda count: None,
) -> Predictions:
    """Ask about `count` images, among the classes that are `kept`, or all; `seen` is told how many more are done."""
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    skipped: dict[str, str] = {}
    for batch in batches:
        if batch.failure:
            raise RuntimeError(batch.failure)
        skipped.update(batch.skipped)
        if not len(batch.labels):
            continue
        with torch.inference_mode():
            logits = restricted(subject.logits(subject.normalise(batch.images)), kept)
        parts["rows"].append(np.array([index for _, _, index in batch.keys]))
        parts["labels"].append(batch.labels.numpy())
        for name, found in answers(logits, batch.labels).items():
            if name != "all_probabilities" or count * subject.num_classes <= MOST:
                parts[name].append(found.cpu().numpy())
        seen(len(batch.labels))
    if not parts:
        raise RuntimeError(f"none of the {count} images can be read; see what is wrong with them")
    arrays: dict[str, Any] = dict(all_probabilities=None) | {name: np.concatenate(x) for name, x in parts.items()}
    competing = None if kept is None else len(kept)
    return Predictions(subject.num_classes, **arrays, skipped=skipped, competing=competing)


def restricted(logits: Tensor, kept: np.ndarray | None) -> Tensor:
    """Logits (B, C) in which the classes that do not compete cannot win."""
    if kept is None:
        return logits
    index = torch.as_tensor(kept, device=logits.device)
    return torch.full_like(logits, -torch.inf).index_copy(1, index, logits[:, index])


def answers(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Ranks (B,), the top classes and their probabilities (B, K), cross-entropies (B,), all probabilities (B, C)."""
    labels = labels.to(logits.device)
    truth = logits.gather(1, labels[:, None])
    before = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    # Of equals the first class wins, as in argmax: a model that says the same of all is right as often as chance
    ranks = ((logits > truth) | ((logits == truth) & before)).sum(1)
    probabilities = logits.softmax(1)
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :TOP]
    losses = F.cross_entropy(logits, labels, reduction="none")
    found = dict(ranks=ranks, top=order, probabilities=probabilities.gather(1, order), losses=losses)
    return found | dict(all_probabilities=probabilities)
