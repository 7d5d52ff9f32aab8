"""Figures of a classifier from what it said of every image; all of them in per cent, but for the loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .predictions import MOST, Predictions

BINS = 15  # of confidence, as calibration is usually measured


class NotEnough(ValueError):
    """There are too few images or classes for a figure to mean anything."""


def calibration(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> dict[str, Any]:
    """How far confidence (N,) can be trusted, in per cent, by bins of equal width over 0 to 1; `correct` is (N,).

    An edge belongs to the upper bin. "ece" is the mean gap to the accuracy, "mce" the largest; None without images.
    """
    if bins < 1:
        raise ValueError(f"bins={bins}; expected 1 or more")
    edges = np.linspace(0, 1, bins + 1).astype(confidence.dtype)  # or 0.6 might not lie on the edge 0.6
    place = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = np.bincount(place, confidence, minlength=bins) / counts
        right = np.bincount(place, correct, minlength=bins) / counts
    gaps, images = np.abs(np.nan_to_num(means - right)), counts.sum()
    rows = []
    for low, high, count, *shares in zip(edges[:-1], edges[1:], counts, means, right, strict=True):
        known = [100 * float(share) if count else None for share in shares]
        rows.append(dict(low=float(low), high=float(high), count=int(count), confidence=known[0], accuracy=known[1]))
    ece, mce = (100 * float((counts * gaps).sum() / images), 100 * float(gaps.max())) if images else (None, None)
    return {"ece": ece, "mce": mce, "bins": rows}


def confusion_matrix(found: Predictions) -> np.ndarray:
    """(C, C) counts: rows are what images show, columns what was said of them."""
    count = found.classes
    return np.bincount(found.labels * count + found.predicted, minlength=count * count).reshape(count, count)


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The chance that a positive image gets a higher score (N,) than a negative one; equal ones count half."""
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]  # from 1, the mean of those that are equal
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        raise NotEnough("needs images of at least two classes")
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def _balanced_accuracy(found: Predictions, bins: int) -> float:
    counts = np.bincount(found.labels, minlength=found.classes)
    right = np.bincount(found.labels[found.ranks == 0], minlength=found.classes)
    return 100 * float((right / np.maximum(counts, 1))[counts > 0].mean())


def _auroc(found: Predictions, bins: int) -> float:
    """Of each class against all others, averaged over the classes that are there."""
    assert found.all_probabilities is not None
    scores = [auroc(found.all_probabilities[:, one], found.labels == one) for one in np.unique(found.labels)]
    return 100 * float(np.mean(scores))


METRICS: dict[str, Callable[[Predictions, int], float]] = {
    "top1": lambda found, bins: 100 * float((found.ranks == 0).mean()),
    "top5": lambda found, bins: 100 * float((found.ranks < 5).mean()),
    "loss": lambda found, bins: float(found.losses.mean(dtype=np.float64)),
    "balanced_accuracy": _balanced_accuracy,
    "macro_f1": lambda found, bins: float(np.mean([row["f1"] for row in per_class(found) if row["images"]])),
    "auroc": _auroc,
    "ece": lambda found, bins: calibration(found.confidence, found.ranks == 0, bins)["ece"],
    "confidence": lambda found, bins: 100 * float(found.confidence.mean(dtype=np.float64)),
}


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


def figures(
    found: Predictions, names: Sequence[str] | None = None, bins: int = BINS
) -> tuple[dict[str, float], dict[str, str]]:
    """The figures asked for, all of METRICS if none are, that mean something; and why others have no value."""
    present, competing = coverage(found)
    whys = {name: shortage(name, len(found), competing, present, bins) for name in names or METRICS}
    values = {name: METRICS[name](found, bins) for name, why in whys.items() if why is None}
    return values, {name: why for name, why in whys.items() if why is not None}


def coverage(found: Predictions) -> tuple[int, int]:
    """How many classes have images, over which means of classes are taken, and how many compete."""
    return len(np.unique(found.labels)), found.classes if found.competing is None else found.competing


def per_class(found: Predictions, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """A row for each class: images, recall, precision, F1 (None where unknown), and what it is most often taken for."""
    matrix = confusion_matrix(found)
    names = names or [str(number) for number in range(found.classes)]
    shown, said, right = matrix.sum(1), matrix.sum(0), matrix.diagonal()
    wrong = matrix - np.diag(right)
    rows = []
    for one, name in enumerate(names):
        other = int(wrong[one].argmax()) if wrong[one].any() else None
        wholes = dict(recall=shown[one], precision=said[one], f1=(shown[one] + said[one]) / 2)
        shares = {key: 100 * float(right[one]) / float(x) if shown[one] and x else None for key, x in wholes.items()}
        taken_for, count = (None, 0) if other is None else (names[other], int(wrong[one, other]))
        counts = {"class": name, "images": int(shown[one]), "answers": int(said[one])}
        rows.append({**counts, **shares, "most_confused_with": taken_for, "confused": count})
    return rows


def most_confused(found: Predictions, names: Sequence[str], most: int = 20) -> list[dict[str, Any]]:
    """The pairs of classes that are confused most often: what images show, what is said, how often."""
    matrix = confusion_matrix(found)
    shown = matrix.sum(1)
    np.fill_diagonal(matrix, 0)
    rows = []
    for place in np.argsort(-matrix, axis=None, kind="stable")[:most].tolist():
        one, other = divmod(place, found.classes)
        if count := int(matrix[one, other]):
            share = 100 * float(count) / float(shown[one])
            rows.append({"class": names[one], "as": names[other], "count": count, "share": share})
    return rows


def most_confident_mistakes(found: Predictions, most: int = 24) -> np.ndarray:
    """Places (M,) of wrong answers in the predictions, the most confident first."""
    wrong = np.flatnonzero(found.ranks > 0)
    return wrong[np.argsort(-found.confidence[wrong], kind="stable")][:most]


def accepted_accuracy(found: Predictions, accepted: Mapping[int, Sequence[int]]) -> tuple[float, int]:
    """Per cent of images whose answer is one of several right ones, `accepted` by row, and how many have any."""
    said = zip(found.rows.tolist(), found.predicted.tolist(), strict=True)
    right = [one in accepted[row] for row, one in said if accepted.get(row)]
    if not right:
        raise NotEnough("needs images with accepted labels; none given")
    return 100 * sum(right) / len(right), len(right)
