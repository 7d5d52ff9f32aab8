"""Figures by hand, and beside torchmetrics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchmetrics.functional import classification as theirs

from broadsight.evaluation.classification import (
    METRICS,
    NotEnough,
    accepted_accuracy,
    auroc,
    calibration,
    confusion_matrix,
    coverage,
    figures,
    most_confident_mistakes,
    most_confused,
    per_class,
)
from broadsight.evaluation.predictions import Predictions, answers


def predictions(logits, labels, rows=None):
    logits, labels = torch.as_tensor(logits, dtype=torch.float32), torch.as_tensor(labels)
    found = {name: value.numpy() for name, value in answers(logits, labels).items()}
    rows = np.arange(len(labels)) if rows is None else np.asarray(rows)
    return Predictions(logits.shape[1], rows, labels.numpy(), **found)


def of(found, bins=15):
    return calibration(found.confidence, found.ranks == 0, bins)


@pytest.fixture
def hand():
    """Three classes, five images: right, right, 0 taken for 1, 2 taken for 0, 2 taken for 0."""
    rows = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.6, 0.1], [0.9, 0.06, 0.04], [0.5, 0.1, 0.4]]
    return predictions(np.log(rows), [0, 1, 0, 2, 2])


@pytest.fixture(scope="module")
def many():
    """What a mediocre model says of 400 images of 7 classes, one of which has none."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (400,), generator=generator)
    logits = 2 * torch.randn(400, 7, generator=generator) + 1.5 * torch.nn.functional.one_hot(labels, 7)
    return logits, labels, predictions(logits, labels)


def test_figures__by_hand(hand):
    values, absent = figures(hand, bins=5)
    assert values == pytest.approx(
        {
            "top1": 40,
            "balanced_accuracy": 100 * (1 / 2 + 1 + 0) / 3,
            "loss": -np.log([0.7, 0.8, 0.3, 0.04, 0.4]).mean(),
            "confidence": 100 * (0.7 + 0.8 + 0.6 + 0.9 + 0.5) / 5,
            # F1 of 0: 2 right of 2 + 3 -> 2/5; of 1: 2/3; of 2: 0
            "macro_f1": 100 * (2 / 5 + 2 / 3 + 0) / 3,
            # Class 0: its images have .7 and .3, the others .1, .9, .5: 2 + 1 of 6 pairs; 1: .8 against .2 .6 .06 .1:
            # 4 of 4; 2: .04 and .4 against .1 .1 .1: 0 + 3 of 6
            "auroc": 100 * (3 / 6 + 4 / 4 + 3 / 6) / 3,
            # Bins of a fifth: [.4, .6) holds .5 wrong; [.6, .8) .6 wrong and .7 right; [.8, 1] .8 right and .9 wrong
            "ece": 100 * (1 * 0.5 + 2 * abs(0.65 - 0.5) + 2 * abs(0.85 - 0.5)) / 5,
        }
    )
    assert absent == {"top5": "needs more than 5 classes; 3 given"}


def test_ranks__count_the_first_five_and_of_equals_the_first_wins_as_in_argmax():
    found = predictions([[6.0, 5, 4, 3, 2, 1]] * 6, [0, 1, 2, 3, 4, 5])
    assert found.ranks.tolist() == [0, 1, 2, 3, 4, 5]
    assert figures(found, ["top1", "top5"])[0] == pytest.approx({"top1": 100 / 6, "top5": 500 / 6})
    found = predictions(np.zeros((4, 4)), [0, 1, 2, 3])
    assert (found.ranks.tolist(), found.predicted.tolist()) == ([0, 1, 2, 3], [0, 0, 0, 0])


def test_figures__agree_with_torchmetrics(many):
    logits, labels, found = many
    values, absent = figures(found)
    probabilities, options = logits.softmax(1), dict(num_classes=7)
    present = dict(num_classes=7, average=None)
    expected = {
        "top1": theirs.multiclass_accuracy(probabilities, labels, average="micro", **options),
        "top5": theirs.multiclass_accuracy(probabilities, labels, average="micro", top_k=5, **options),
        "loss": torch.nn.functional.cross_entropy(logits, labels) / 100,
        "balanced_accuracy": theirs.multiclass_accuracy(probabilities, labels, **present)[:6].mean(),
        "macro_f1": theirs.multiclass_f1_score(probabilities, labels, **present)[:6].mean(),
        "auroc": theirs.multiclass_auroc(probabilities, labels, **present)[:6].mean(),
        "ece": theirs.multiclass_calibration_error(probabilities, labels, n_bins=15, **options),
        "confidence": probabilities.amax(1).mean(),
    }
    assert expected.keys() == METRICS.keys() == values.keys() and not absent
    assert values == pytest.approx({name: 100 * float(value) for name, value in expected.items()}, rel=1e-5)
    largest = theirs.multiclass_calibration_error(probabilities, labels, n_bins=15, norm="max", **options)
    assert of(found)["mce"] == pytest.approx(100 * float(largest), rel=1e-5)


def test_confusion_and_precision__agree_with_torchmetrics_and_ties_count_half(many):
    logits, labels, found = many
    matrix = theirs.multiclass_confusion_matrix(logits, labels, num_classes=7)
    assert confusion_matrix(found).tolist() == matrix.tolist()
    precision = 100 * theirs.multiclass_precision(logits, labels, num_classes=7, average=None)
    rows = per_class(found)
    assert [row["precision"] for row in rows[:6]] == pytest.approx(precision.tolist()[:6], rel=1e-5)
    absent = rows[6]  # torchmetrics says 0 of what has no images
    assert absent["answers"] > 0 and (absent["recall"], absent["precision"], absent["f1"]) == (None, None, None)
    assert coverage(found) == (6, 7)
    assert auroc(np.array([0.1, 0.5, 0.5, 0.9]), np.array([False, True, False, True])) == pytest.approx(3.5 / 4)
    with pytest.raises(NotEnough, match="at least two classes"):
        auroc(np.array([0.1, 0.5]), np.array([True, True]))


@pytest.mark.parametrize("value", [0.2, 0.6, 0.8, 1.0, 0.0])
def test_calibration__an_edge_belongs_to_the_bin_above_as_in_torchmetrics(value):
    confidence = np.array([value, value - 0.05 if value else 0.05], np.float32)
    result = calibration(confidence, np.array([True, False]), 5)
    assert result["bins"][min(4, round(5 * value))]["count"] >= 1
    rows = torch.tensor([[float(c), 1 - float(c)] for c in confidence], dtype=torch.float32)
    rows = torch.where(rows.amax(1, keepdim=True) == rows[:, :1], rows, rows.flip(1))
    labels = torch.tensor([0, 1])
    expected = theirs.multiclass_calibration_error(rows, labels, num_classes=2, n_bins=5)
    ours = calibration(rows.amax(1).numpy(), (rows.argmax(1) == labels).numpy(), 5)["ece"]
    assert ours == pytest.approx(100 * float(expected), abs=1e-4)


def test_calibration_and_per_class__by_hand(hand):
    record = of(hand, 5)
    assert [row["count"] for row in record["bins"]] == [0, 0, 1, 2, 2]
    assert record["bins"][0] == {"low": 0, "high": pytest.approx(0.2), "count": 0, "confidence": None, "accuracy": None}
    assert (record["bins"][4]["confidence"], record["bins"][4]["accuracy"]) == pytest.approx((85, 50))
    assert record["mce"] == pytest.approx(50)
    with pytest.raises(ValueError, match="bins=0; expected 1 or more"):
        of(hand, 0)
    names = ("class", "images", "answers", "recall", "precision", "f1", "most_confused_with", "confused")
    rows = [tuple(row[name] for name in names) for row in per_class(hand, ["a", "b", "c"])]
    assert rows[0] == ("a", 2, 3, 50, pytest.approx(100 / 3), pytest.approx(40), "b", 1)
    assert rows[2] == ("c", 2, 0, 0, None, 0, "a", 2)
    absent = per_class(predictions([[2.0, 1, 0]], [0]))[1]
    assert absent == dict(zip(names, ("1", 0, 0, None, None, None, None, 0), strict=True))


def test_mistakes__the_most_frequent_and_the_most_confident_first_and_what_is_none_by_accepted_labels(hand):
    confused = [{"class": "c", "as": "a", "count": 2, "share": 100}, {"class": "a", "as": "b", "count": 1, "share": 50}]
    assert most_confused(hand, "abc") == confused
    assert len(most_confused(hand, "abc", 1)) == 1
    assert most_confident_mistakes(hand).tolist() == [3, 2, 4]
    assert most_confident_mistakes(hand, 1).tolist() == [3]
    # Answers are 0 1 1 0 0; the second is judged by nobody
    assert accepted_accuracy(hand, {0: [0], 1: [], 2: [0, 1], 3: [2], 4: [1, 2]}) == (50, 4)
    with pytest.raises(NotEnough, match="accepted labels; none given"):
        accepted_accuracy(hand, {})
    found = predictions([[1.0, 0], [0, 1.0]], [0, 0], rows=[7, 3])
    assert accepted_accuracy(found, {3: [1], 7: [1]}) == (50, 2)


def test_figures__that_cannot_be_said_are_missing(hand, many):
    few = dict(ece="needs at least as many images as bins, 6; 5 given", top5="needs more than 5 classes; 3 given")
    assert figures(hand, ["top5", "ece"], 6) == ({}, few)
    shortage = "needs images of at least two classes; 1 given"
    assert figures(predictions([[2.0, 1, 0]], [0]), ["top1", "auroc"]) == ({"top1": 100}, {"auroc": shortage})
    values, absent = figures(predictions([[2.0, 1, 0, 0, 0, 0], [1.0, 2, 0, 0, 0, 0]], [0, 0]))
    assert values.keys() == {"top1", "top5", "loss", "confidence"} and values["top1"] == 50
    assert absent["balanced_accuracy"] == absent["macro_f1"] == shortage
    found = replace(many[2], competing=5)  # five of the model's seven: the right one is always among them
    assert figures(found)[1]["top5"] == "needs more than 5 classes; 5 given" and coverage(found) == (6, 5)
    found = predictions(np.zeros((0, 7)), np.zeros(0, np.int64))
    assert figures(found) == ({}, dict.fromkeys(METRICS, "needs images; none given"))
    record = of(found)
    assert (record["ece"], record["mce"]) == (None, None) and not any(row["count"] for row in record["bins"])
    assert most_confused(found, "abcdefg") == [] and all(row["recall"] is None for row in per_class(found))
