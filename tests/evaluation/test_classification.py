"""Figures by hand, and beside torchmetrics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_auroc,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
    multiclass_f1_score,
    multiclass_precision,
)

from broadsight.evaluation.classification import (
    METRICS,
    NotEnough,
    accepted_accuracy,
    auroc,
    calibration,
    calibration_record,
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
    whole = found.pop("all")
    return Predictions(logits.shape[1], rows, labels.numpy(), **found, all_probabilities=whole)


def of_probabilities(rows, labels):
    return predictions(np.log(np.array(rows)), labels)


@pytest.fixture
def hand():
    """Three classes, five images: right, right, 0 taken for 1, 2 taken for 0, 2 taken for 0."""
    rows = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.6, 0.1], [0.9, 0.06, 0.04], [0.5, 0.1, 0.4]]
    return of_probabilities(rows, [0, 1, 0, 2, 2])


@pytest.fixture(scope="module")
def many():
    """What a mediocre model says of 400 images of 7 classes, one of which has none."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (400,), generator=generator)
    logits = 2 * torch.randn(400, 7, generator=generator) + 1.5 * torch.nn.functional.one_hot(labels, 7)
    return logits, labels, predictions(logits, labels)


def test_figures__by_hand(hand):
    values, absent = figures(hand, bins=5)
    assert values["top1"] == pytest.approx(40)
    assert values["balanced_accuracy"] == pytest.approx(100 * (1 / 2 + 1 + 0) / 3)
    assert values["loss"] == pytest.approx(-np.log([0.7, 0.8, 0.3, 0.04, 0.4]).mean(), rel=1e-5)
    assert values["confidence"] == pytest.approx(100 * (0.7 + 0.8 + 0.6 + 0.9 + 0.5) / 5)
    # F1 of 0: 2 right of 2 + 3 -> 2/5; of 1: 2/3; of 2: 0
    assert values["macro_f1"] == pytest.approx(100 * (2 / 5 + 2 / 3 + 0) / 3)
    # Class 0: its images have .7 and .3, the others .1, .9, .5: 2 + 1 of 6 pairs; 1: .8 against .2 .6 .06 .1: 4 of 4;
    # 2: .04 and .4 against .1 .1 .1: 0 + 3 of 6
    assert values["auroc"] == pytest.approx(100 * (3 / 6 + 4 / 4 + 3 / 6) / 3)
    # Bins of a fifth: [.4, .6) holds .5 wrong; [.6, .8) .6 wrong and .7 right; [.8, 1] .8 right and .9 wrong
    assert values["ece"] == pytest.approx(100 * (1 * 0.5 + 2 * abs(0.65 - 0.5) + 2 * abs(0.85 - 0.5)) / 5)
    assert absent == {"top5": "needs more than 5 classes; 3 given"}


def test_top5__counts_the_first_five():
    found = predictions([[6.0, 5, 4, 3, 2, 1]] * 6, [0, 1, 2, 3, 4, 5])
    assert found.ranks.tolist() == [0, 1, 2, 3, 4, 5]
    values, _ = figures(found, ["top1", "top5"])
    assert values == pytest.approx({"top1": 100 / 6, "top5": 500 / 6})


def test_ranks__of_equals_the_first_wins_as_in_argmax():
    found = predictions(np.zeros((4, 4)), [0, 1, 2, 3])
    assert found.ranks.tolist() == [0, 1, 2, 3]
    assert found.predicted.tolist() == [0, 0, 0, 0]


def test_figures__agree_with_torchmetrics(many):
    logits, labels, found = many
    values, absent = figures(found)
    probabilities, options = logits.softmax(1), dict(num_classes=7)
    present = dict(num_classes=7, average=None)
    expected = {
        "top1": multiclass_accuracy(probabilities, labels, average="micro", **options),
        "top5": multiclass_accuracy(probabilities, labels, average="micro", top_k=5, **options),
        "loss": torch.nn.functional.cross_entropy(logits, labels) / 100,
        "balanced_accuracy": multiclass_accuracy(probabilities, labels, **present)[:6].mean(),
        "macro_f1": multiclass_f1_score(probabilities, labels, **present)[:6].mean(),
        "auroc": multiclass_auroc(probabilities, labels, **present)[:6].mean(),
        "ece": multiclass_calibration_error(probabilities, labels, n_bins=15, **options),
        "confidence": probabilities.amax(1).mean(),
    }
    assert expected.keys() == METRICS.keys() == values.keys() and not absent
    assert values == pytest.approx({name: 100 * float(value) for name, value in expected.items()}, rel=1e-5)
    largest = multiclass_calibration_error(probabilities, labels, n_bins=15, norm="max", **options)
    assert calibration_record(found)["mce"] == pytest.approx(100 * float(largest), rel=1e-5)


def test_confusion_and_precision__agree_with_torchmetrics(many):
    logits, labels, found = many
    matrix = multiclass_confusion_matrix(logits, labels, num_classes=7)
    assert confusion_matrix(found.labels, found.predicted, 7).tolist() == matrix.tolist()
    precision = 100 * multiclass_precision(logits, labels, num_classes=7, average=None)
    rows = per_class(found)
    assert [row["precision"] for row in rows[:6]] == pytest.approx(precision.tolist()[:6], rel=1e-5)
    absent = rows[6]  # torchmetrics says 0 of what has no images
    assert absent["answers"] > 0 and (absent["recall"], absent["precision"], absent["f1"]) == (None, None, None)
    assert coverage(found) == (6, 7)


def test_auroc__ties_count_half():
    assert auroc(np.array([0.1, 0.5, 0.5, 0.9]), np.array([False, True, False, True])) == pytest.approx(3.5 / 4)
    with pytest.raises(NotEnough, match="at least two classes"):
        auroc(np.array([0.1, 0.5]), np.array([True, True]))


@pytest.mark.parametrize("value", [0.2, 0.6, 0.8, 1.0, 0.0])
def test_calibration__an_edge_belongs_to_the_bin_above_as_in_torchmetrics(value):
    confidence = np.array([value, value - 0.05 if value else 0.05], np.float32)
    correct = np.array([True, False])
    result = calibration(confidence, correct, 5)
    assert result.counts[min(4, round(5 * value))] >= 1
    rows = torch.tensor([[float(c), 1 - float(c)] for c in confidence], dtype=torch.float32)
    rows = torch.where(rows.amax(1, keepdim=True) == rows[:, :1], rows, rows.flip(1))
    labels = torch.tensor([0, 1])
    theirs = multiclass_calibration_error(rows, labels, num_classes=2, n_bins=5)
    ours = calibration(rows.amax(1).numpy(), (rows.argmax(1) == labels).numpy(), 5).expected_error
    assert ours == pytest.approx(float(theirs), abs=1e-6)


def test_calibration__record_by_hand(hand):
    record = calibration_record(hand, 5)
    assert [row["count"] for row in record["bins"]] == [0, 0, 1, 2, 2]
    assert record["bins"][0] == {"low": 0, "high": pytest.approx(0.2), "count": 0, "confidence": None, "accuracy": None}
    assert record["bins"][4]["confidence"] == pytest.approx(85)
    assert record["bins"][4]["accuracy"] == pytest.approx(50)
    assert record["mce"] == pytest.approx(50)
    with pytest.raises(ValueError, match="bins=0; expected 1 or more"):
        calibration_record(hand, 0)


def test_per_class__by_hand(hand):
    rows = per_class(hand, ["a", "b", "c"])
    assert rows[0] == {
        "class": "a",
        "images": 2,
        "answers": 3,
        "recall": 50,
        "precision": pytest.approx(100 / 3),
        "f1": pytest.approx(40),
        "most_confused_with": "b",
        "confused": 1,
    }
    assert (rows[2]["recall"], rows[2]["precision"], rows[2]["most_confused_with"]) == (0, None, "a")


def test_per_class__without_images_has_no_recall():
    rows = per_class(predictions([[2.0, 1, 0]], [0]))
    assert rows[1] == {
        "class": "1",
        "images": 0,
        "answers": 0,
        "recall": None,
        "precision": None,
        "f1": None,
        "most_confused_with": None,
        "confused": 0,
    }


def test_most_confused__the_most_frequent_first(hand):
    assert most_confused(hand, "abc") == [
        {"class": "c", "as": "a", "count": 2, "share": 100},
        {"class": "a", "as": "b", "count": 1, "share": 50},
    ]
    assert len(most_confused(hand, "abc", 1)) == 1


def test_mistakes__the_most_confident_first(hand):
    assert most_confident_mistakes(hand).tolist() == [3, 2, 4]
    assert most_confident_mistakes(hand, 1).tolist() == [3]


def test_accepted__one_of_several_and_none_left_out(hand):
    # Answers are 0 1 1 0 0; the second is judged by nobody
    assert accepted_accuracy(hand, {0: [0], 1: [], 2: [0, 1], 3: [2], 4: [1, 2]}) == (50, 4)
    with pytest.raises(NotEnough, match="accepted labels; none given"):
        accepted_accuracy(hand, {})


def test_accepted__by_row_of_the_source():
    found = predictions([[1.0, 0], [0, 1.0]], [0, 0], rows=[7, 3])
    assert accepted_accuracy(found, {3: [1], 7: [1]}) == (50, 2)


@pytest.mark.parametrize(
    ("names", "bins", "message"),
    [
        (["top5"], 5, "top5 needs more than 5 classes; 3 given"),
        (["ece"], 6, "ece needs at least as many images as bins, 6; 5 given"),
        (["top_1"], 5, r"unknown metric 'top_1'; did you mean 'top1'\? expected one of top1"),
    ],
)
def test_figures__asked_for_what_cannot_be_said(hand, names, bins, message):
    with pytest.raises(ValueError, match=message):
        figures(hand, names, bins)


def test_figures__one_class_has_no_auroc():
    with pytest.raises(NotEnough, match="auroc needs images of at least two classes; 1 given"):
        figures(predictions([[1.0, 0], [2, 0]], [0, 0]), ["auroc"])


def test_figures__of_no_images():
    found = predictions(np.zeros((0, 7)), np.zeros(0, np.int64))
    values, absent = figures(found)
    assert not values and absent == dict.fromkeys(METRICS, "needs images; none given")
    record = calibration_record(found)
    assert (record["ece"], record["mce"]) == (None, None) and not any(row["count"] for row in record["bins"])
    assert most_confused(found, "abcdefg") == [] and all(row["recall"] is None for row in per_class(found))


def test_figures__of_one_class_are_those_that_are_not_means_over_classes():
    values, absent = figures(predictions([[2.0, 1, 0, 0, 0, 0], [1.0, 2, 0, 0, 0, 0]], [0, 0]))
    assert values.keys() == {"top1", "top5", "loss", "confidence"} and values["top1"] == 50
    assert absent["balanced_accuracy"] == absent["macro_f1"] == "needs images of at least two classes; 1 given"


def test_figures__top5_of_classes_that_compete(many):
    """Five of the model's seven: the right one is always among them."""
    found = replace(many[2], competing=5)
    assert figures(found)[1]["top5"] == "needs more than 5 classes; 5 given" and coverage(found) == (6, 5)


def test_figures__found_short_after_the_work_are_missing():
    found = predictions([[2.0, 1, 0]], [0])
    with pytest.raises(NotEnough, match="auroc needs images of at least two classes"):
        figures(found, ["top1", "auroc"])
    values, absent = figures(found, ["top1", "auroc"], refuse=False)
    assert values == {"top1": 100} and absent.keys() == {"auroc"}
