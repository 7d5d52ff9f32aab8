"""Figures of a classifier from what it said of every image; all of them in per cent, but for the loss.

Written out on arrays, since images, tables and curves are made from the same ones; torchmetrics agrees (see tests).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import unknown
from .predictions import MOST, Predictions

BINS = 15  # of confidence, as calibration is usually measured


class NotEnough(ValueError):
    """There are too few images or classes for a figure to mean anything."""


@dataclass(frozen=True)
class Calibration:
    """How far confidence can be trusted, by bins of equal width over 0 to 1.

    Args:
        edges: (M + 1,) between which the bins lie; a confidence on an edge belongs to the bin above it.
        counts: (M,) images.
        confidence: (M,) mean of theirs, nan where there is none.
        accuracy: (M,) share of right answers, likewise.
    """

    edges: np.ndarray
    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def gaps(self) -> np.ndarray:
        return np.abs(np.nan_to_num(self.confidence - self.accuracy))

    @property
    def expected_error(self) -> float:
        """ECE: the gap between confidence and accuracy, averaged over the images; nan without any."""
        return float((self.counts * self.gaps).sum() / self.counts.sum()) if self.counts.any() else math.nan

    @property
    def largest_error(self) -> float:
        """MCE: the largest gap of a bin that holds images; nan without any."""
        return float(self.gaps.max()) if self.counts.any() else math.nan


def calibration(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> Calibration:
    """Confidences (N,) between 0 and 1, and whether each answer (N,) was right."""
    if bins < 1:
        raise ValueError(f"bins={bins}; expected 1 or more")
    edges = np.linspace(0, 1, bins + 1).astype(confidence.dtype)  # or 0.6 might not lie on the edge 0.6
    place = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(place, confidence, minlength=bins) / counts
        right = np.bincount(place, correct, minlength=bins) / counts
    return Calibration(edges, counts, mean, right)


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(C, C) counts: rows are what images show, columns what was said of them."""
    return np.bincount(labels * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The chance that a positive image gets a higher score (N,) than a negative one; equal ones count half."""
    order = np.argsort(scores, kind="stable")
    _, place, ties = np.unique(scores[order], return_inverse=True, return_counts=True)
    ends = np.cumsum(ties)
    ranks = ((2 * ends - ties + 1) / 2)[place]  # from 1, the mean of those that are equal
    count = int(positive.sum())
    others = len(scores) - count
    if not count or not others:
        raise NotEnough("needs images of at least two classes")
    return float((ranks[positive[order]].sum() - count * (count + 1) / 2) / (count * others))


def _top1(found: Predictions, bins: int) -> float:
    return 100 * float((found.ranks == 0).mean())


def _top5(found: Predictions, bins: int) -> float:
    return 100 * float((found.ranks < 5).mean())


def _loss(found: Predictions, bins: int) -> float:
    return float(found.losses.mean(dtype=np.float64))


def _balanced_accuracy(found: Predictions, bins: int) -> float:
    counts = np.bincount(found.labels, minlength=found.classes)
    right = np.bincount(found.labels[found.ranks == 0], minlength=found.classes)
    return 100 * float((right / np.maximum(counts, 1))[counts > 0].mean())


def _macro_f1(found: Predictions, bins: int) -> float:
    scores = [row["f1"] for row in per_class(found) if row["images"]]
    return float(np.mean(scores))


def _ece(found: Predictions, bins: int) -> float:
    return 100 * calibration(found.confidence, found.ranks == 0, bins).expected_error


def _confidence(found: Predictions, bins: int) -> float:
    return 100 * float(found.confidence.mean(dtype=np.float64))


def _auroc(found: Predictions, bins: int) -> float:
    """Of each class against all others, averaged over the classes that are there."""
    assert found.all_probabilities is not None
    scores = [auroc(found.all_probabilities[:, one], found.labels == one) for one in np.unique(found.labels)]
    return 100 * float(np.mean(scores))


METRICS: dict[str, Callable[[Predictions, int], float]] = {
    "top1": _top1,
    "top5": _top5,
    "loss": _loss,
    "balanced_accuracy": _balanced_accuracy,
    "macro_f1": _macro_f1,
    "auroc": _auroc,
    "ece": _ece,
    "confidence": _confidence,
}


def check_metrics(names: Sequence[str]) -> None:
    """A ValueError for a figure that is not known."""
    for name in names:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)


def shortage(name: str, images: int, classes: int, present: int, bins: int = BINS) -> str | None:
    """Why so many images, of `present` of the `classes` that compete, are too few for a figure; None if not."""
    if not images:
        return "needs images; none given"
    if name == "top5" and classes <= 5:
        return f"needs more than 5 classes; {classes} given"
    if name == "ece" and images < bins:
        return f"needs at least as many images as bins, {bins}; {images} given"
    if name in ("auroc", "balanced_accuracy", "macro_f1") and present < 2:
        return f"needs images of at least two classes; {present} given"
    if name == "auroc" and images * classes > MOST:
        return f"needs the probabilities of all classes, too many to keep: {images:,} x {classes:,}"
    return None


def refuse_short(names: Sequence[str], images: int, classes: int, present: int, bins: int = BINS) -> None:
    """Raises `NotEnough` for the first figure that so many images cannot give; see `shortage`."""
    for name in names:
        if why := shortage(name, images, classes, present, bins):
            raise NotEnough(f"{name} {why}")


def figures(
    found: Predictions, names: Sequence[str] | None = None, bins: int = BINS, refuse: bool = True
) -> tuple[dict[str, float], dict[str, str]]:
    """The figures asked for, or all that mean something.

    Args:
        names: Some of METRICS. One that needs more than there is raises `NotEnough` then.
        bins: Of the calibration error.
        refuse: Whether it does; else it is among those without a value, since the work is done.

    Returns:
        Values, and why others have none.
    """
    check_metrics(names or ())
    occurring, competing = coverage(found)
    there = (len(found), competing, occurring, bins)
    if refuse:
        refuse_short(names or (), *there)
    absent = {name: why for name in names or METRICS if (why := shortage(name, *there))}
    return {name: METRICS[name](found, bins) for name in names or METRICS if name not in absent}, absent


def coverage(found: Predictions) -> tuple[int, int]:
    """How many classes have images, over which means of classes are taken, and how many compete."""
    return len(np.unique(found.labels)), found.classes if found.competing is None else found.competing


def per_class(found: Predictions, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """A row for each class: images, recall, precision, F1, and what it is most often taken for.

    What cannot be said is None: all of a class without images, precision of one that was never answered.
    """
    matrix = confusion_matrix(found.labels, found.predicted, found.classes)
    names = names or [str(number) for number in range(found.classes)]
    shown, said, right = matrix.sum(1), matrix.sum(0), matrix.diagonal()
    wrong = matrix - np.diag(right)
    rows = []
    for one, name in enumerate(names):
        other = int(wrong[one].argmax()) if wrong[one].any() else None
        rows.append(
            {
                "class": name,
                "images": int(shown[one]),
                "answers": int(said[one]),
                "recall": _percent(right[one], shown[one]),
                "precision": _percent(right[one], said[one]) if shown[one] else None,
                "f1": _percent(2 * right[one], shown[one] + said[one]) if shown[one] else None,
                "most_confused_with": None if other is None else names[other],
                "confused": 0 if other is None else int(wrong[one, other]),
            }
        )
    return rows


def _percent(part: Any, whole: Any) -> float | None:
    return 100 * float(part) / float(whole) if whole else None


def most_confused(found: Predictions, names: Sequence[str], most: int = 20) -> list[dict[str, Any]]:
    """The pairs of classes that are confused most often: what images show, what is said, how often."""
    matrix = confusion_matrix(found.labels, found.predicted, found.classes)
    shown = matrix.sum(1)
    np.fill_diagonal(matrix, 0)
    order = np.argsort(-matrix, axis=None, kind="stable")[:most]
    pairs = [divmod(int(place), found.classes) for place in order]
    return [
        {
            "class": names[one],
            "as": names[other],
            "count": int(matrix[one, other]),
            "share": 100 * float(matrix[one, other]) / float(shown[one]),
        }
        for one, other in pairs
        if matrix[one, other]
    ]


def calibration_record(found: Predictions, bins: int = BINS) -> dict[str, Any]:
    """Calibration as plain types, in per cent; empty bins have no means."""
    result = calibration(found.confidence, found.ranks == 0, bins)
    rows = zip(result.edges[:-1], result.edges[1:], result.counts, result.confidence, result.accuracy, strict=True)
    return {
        "ece": 100 * result.expected_error if len(found) else None,
        "mce": 100 * result.largest_error if len(found) else None,
        "bins": [
            {
                "low": float(low),
                "high": float(high),
                "count": int(count),
                "confidence": 100 * float(mean) if count else None,
                "accuracy": 100 * float(right) if count else None,
            }
            for low, high, count, mean, right in rows
        ],
    }


def most_confident_mistakes(found: Predictions, most: int = 24) -> np.ndarray:
    """Places (M,) of wrong answers in the predictions, the most confident first."""
    wrong = np.flatnonzero(found.ranks > 0)
    return wrong[np.argsort(-found.confidence[wrong], kind="stable")][:most]


def accepted_accuracy(found: Predictions, accepted: Mapping[int, Sequence[int]]) -> tuple[float, int]:
    """Share of images whose answer is one of several right ones; those without any are left out.

    Args:
        accepted: By row of the source, the classes that count as right.

    Returns:
        Per cent, and how many images count.
    """
    judged = [(int(row), int(said)) for row, said in zip(found.rows, found.predicted, strict=True)]
    judged = [(row, said) for row, said in judged if accepted.get(row)]
    if not judged:
        raise NotEnough("needs images with accepted labels; none given")
    return 100 * sum(said in accepted[row] for row, said in judged) / len(judged), len(judged)
