"""mIoU and accuracies of segmentation, computed by hand."""

import math
import pickle

import pytest
import torch

from broadsight.dense.segmentation_scores import SegmentationScores
from tests.refusals import refused

TARGET = torch.tensor([[0, 0, 1], [1, 255, 2]])
SAID = torch.tensor([[0, 1, 1], [1, 0, 1]])
# Five pixels count. Class 0: 1 of 2 right, said once. 1: 2 of 2 right, said four times. 2: 0 of 1 right, never said.
IOU = [1 / 2, 2 / 4, 0 / 1]


def counted(*pairs) -> SegmentationScores:
    scores = SegmentationScores(["sky", "road", "car", "tree"])
    for prediction, target in pairs:
        scores.update(prediction, target)
    return scores


def test_compute__by_hand():
    scores = counted((SAID, TARGET))
    assert scores.counts.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    miou, macc = 100 * sum(IOU) / 3, 100 * (1 / 2 + 1 + 0) / 3  # a class that is nowhere is left out
    assert scores.compute() == pytest.approx({"miou": miou, "aacc": 100 * 3 / 5, "macc": macc})
    sky, road, car, tree = scores.per_class()
    assert sky == dict(name="sky", pixels=2, iou=50, acc=50, precision=100)
    assert road == dict(name="road", pixels=2, iou=50, acc=100, precision=50)
    assert (car["pixels"], car["iou"], car["acc"]) == (1, 0, 0) and math.isnan(car["precision"])
    assert tree["pixels"] == 0 and all(math.isnan(tree[key]) for key in ("iou", "acc", "precision"))


def test_compute__said_but_not_shown__is_missing_from_the_classes_that_are():
    scores = counted((torch.tensor([[0, 3, 1]]), torch.tensor([[0, 0, 1]])))
    assert scores.compute() == {"miou": 75, "aacc": pytest.approx(200 / 3), "macc": 75}  # of sky and road
    assert scores.coverage() == (2, 4)
    tree = scores.per_class()[3]
    assert tree["pixels"] == 0 and all(math.isnan(tree[key]) for key in ("iou", "acc", "precision"))


@pytest.mark.parametrize("said", [0, 3])
def test_compute__one_class_alone_or_none_has_no_means(said):
    scores = counted((torch.full((2, 2), said), torch.zeros(2, 2, dtype=torch.int64)))
    figures = scores.compute()
    assert math.isnan(figures["miou"]) and math.isnan(figures["macc"]) and figures["aacc"] == 100 * (said == 0)
    assert scores.coverage() == (1, 4)
    ignored = counted((SAID, torch.full_like(TARGET, 255)))
    assert all(map(math.isnan, ignored.compute().values())) and ignored.coverage() == (0, 4)


def test_compute__every_class_shown_agrees_with_torchmetrics():
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    generator = torch.Generator().manual_seed(0)
    said, target = (torch.randint(0, 4, (3, 8, 8), generator=generator) for _ in range(2))
    target[0, 0, 0] = 255
    figures = counted((said, target)).compute()
    options = dict(num_classes=4, ignore_index=255)
    assert figures["miou"] == pytest.approx(100 * float(MulticlassJaccardIndex(**options)(said, target)), rel=1e-5)
    macro = MulticlassAccuracy(average="macro", **options)(said, target)
    assert figures["macc"] == pytest.approx(100 * float(macro), rel=1e-5)


def test_compute__over_the_data_set_not_the_mean_of_images():
    first = torch.tensor([[0, 0, 0, 1]]), torch.tensor([[0, 0, 0, 0]])  # IoU of 0 is 3 / 4, of 1 is 0
    second = torch.tensor([[1]]), torch.tensor([[1]])  # IoU of 1 is 1
    figures = counted(first, second).compute()
    assert figures["miou"] == pytest.approx(100 * (3 / 4 + 1 / 2) / 2)  # images' mean: (37.5 + 100) / 2


def test_update__scores_and_batches_are_the_same():
    logits = torch.nn.functional.one_hot(SAID, 4).movedim(-1, 0) * 3.0 - 1
    expected = counted((SAID, TARGET), (SAID, TARGET)).counts
    assert torch.equal(counted((logits, TARGET), (logits.bfloat16(), TARGET)).counts, expected)
    assert torch.equal(counted((logits[None].repeat(2, 1, 1, 1), TARGET.repeat(2, 1, 1))).counts, expected)
    assert torch.equal(counted((SAID.byte(), TARGET.byte()), (SAID.int(), TARGET)).counts, expected)


def test_merge__each_process_counts_once_in_any_order():
    parts = [counted((SAID, TARGET)), counted((TARGET.clamp(max=3), TARGET)), counted()]
    expected = sum(part.counts for part in parts)
    states = [pickle.loads(pickle.dumps(part.state())) for part in parts]
    for place, part in enumerate(parts):
        part.merge(states if place else reversed(states))  # its own is among them
        part.merge(states[:1])
        assert torch.equal(part.counts, expected)
    parts[0].update(SAID, TARGET)
    parts[0].merge(states)  # its own as it was before
    assert parts[0].counts.sum() == expected.sum() + 5
    parts[0].reset()
    assert parts[0].counts.sum() == 0 and math.isnan(parts[0].compute()["miou"])


@pytest.mark.parametrize(
    "prediction, target, words",
    [
        (SAID, TARGET[:1], r"prediction is \(2, 3\) but target \(1, 3\)"),
        (SAID + 3, TARGET, "prediction holds 4; expected 0 to 3$"),
        (SAID, TARGET + 2, "target holds 257; expected 0 to 3 or 255 to ignore"),
        (SAID, TARGET - 1, "target holds -1"),
        (torch.full((4, 2, 3), math.nan), TARGET, "scores are not all finite; the model has diverged"),
        (torch.rand(3, 2, 3), TARGET, r"scores of shape \(3, 2, 3\); expected 4 classes, H, W"),
    ],
)
def test_update__refuses(prediction, target, words):
    refused(words, counted, (prediction, target))
