"""Scores of models that know the answer, or some of it; mIoU and accuracies of segmentation, computed by hand."""

import math
import pickle

import pytest
import torch
from torch import nn

from broadsight.data.dense.loading import DenseDataset
from broadsight.data.dense.pose_geometry import PoseCrops
from broadsight.data.dense.resolve import resolve_dense
from broadsight.data.dense.transforms import DenseTransforms
from broadsight.dense.inference import Views
from broadsight.dense.scoring import ObjectScorer, PixelScorer, PoseScorer, SegmentationScores, defined, moved_keypoints
from broadsight.visual.metrics import GOALS
from tests.refusals import refused


@pytest.fixture(scope="module")
def scenes():
    return {task: resolve_dense("scenes:16", task, scenes_size=96) for task in ("instances", "segment", "keypoints")}


def batch_of(source, transform=None, count=4):
    return DenseDataset(source, transform).__getitems__([(0, i, i) for i in range(count)])


def whole(task):
    return DenseTransforms(task, 96).build(training=False)


class Knows(nn.Module):
    """Predicts the targets of the images of one batch; of mirrored ones too, mirrored."""

    def __init__(self, batch, wrong_labels=False):
        super().__init__()
        self.wrong, self.known = wrong_labels, {}
        for image, target in zip(batch.images, batch.targets, strict=True):
            self.known[image.flip(-1).numpy().tobytes()] = target, image.shape[-1]
            self.known[image.numpy().tobytes()] = target, None
        self.eval()

    def forward(self, images):
        return [self.answer(*self.known[(image * 255).round().byte().numpy().tobytes()]) for image in images]

    def answer(self, target, width):
        boxes, masks = target["boxes"].clone(), target["masks"].float()[:, None]
        if width:
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
            masks = masks.flip(-1)
        labels = target["labels"] % 10 + 1 if self.wrong else target["labels"]
        return dict(boxes=boxes, labels=labels, scores=torch.full((len(boxes),), 0.9), masks=masks)


@pytest.mark.parametrize("flip", [False, True])
def test_objects__of_who_knows_are_perfect(scenes, flip):
    splits = scenes["instances"]
    batch = batch_of(splits.val, whole("instances"))
    scorer = ObjectScorer("instances", splits.val.category_ids, splits.classes, views=Views(flip=flip), keep=True)
    assert scorer.add(Knows(batch), batch) == 4
    figures = scorer.compute()
    assert figures["mask_ap"] == figures["box_ap"] == pytest.approx(100.0) and scorer.goal == "mask_ap"
    assert len(scorer.results) == sum(len(target["labels"]) for target in batch.targets)
    assert {entry["image_id"] for entry in scorer.results} <= {0, 1, 2, 3}


def test_objects__of_who_is_wrong_score_nothing_and_states_add_up(scenes):
    splits = scenes["instances"]
    batch = batch_of(splits.val, whole("instances"))
    options = ("instances", splits.val.category_ids, splits.classes)
    wrong = ObjectScorer(*options)
    wrong.add(Knows(batch, wrong_labels=True), batch)
    assert wrong.compute()["box_ap"] == 0.0
    parts = [ObjectScorer(*options) for _ in range(2)]
    for part, rows in zip(parts, (slice(0, 1), slice(1, 4)), strict=True):
        some = batch._replace(images=batch.images[rows], targets=batch.targets[rows])
        part.add(Knows(some), some)
    parts[0].merge(part.state() for part in parts)
    assert parts[0].compute()["mask_ap"] == pytest.approx(100.0)
    parts[0].reset()
    assert defined(parts[0].compute()) == {}


class SeesClasses(nn.Module):
    """Scores of the classes of an image's pixels, read off a table by their colour."""

    def __init__(self, batch, classes):
        super().__init__()
        self.table = {}
        for image, target in zip(batch.images, batch.targets, strict=True):
            for colour, label in zip(image.flatten(1).T.tolist(), target.flatten().tolist(), strict=True):
                self.table.setdefault(tuple(colour), label)
        self.classes = classes
        self.eval()

    def forward(self, images):
        rows = (images * 255).round().byte().permute(0, 2, 3, 1).flatten(0, 2).tolist()
        labels = torch.tensor([self.table.get(tuple(row), 0) for row in rows])
        labels = labels.reshape(len(images), *images.shape[-2:])
        return nn.functional.one_hot(labels, self.classes).permute(0, 3, 1, 2).float() * 9


@pytest.mark.parametrize("views", [Views(), Views(flip=True), Views(slide=True, short_side=96)])
def test_pixels__of_who_knows_are_nearly_perfect(scenes, views):
    splits = scenes["segment"]
    batch = batch_of(splits.val, whole("segment"), 1)
    scorer = PixelScorer(splits.classes, views=views)
    assert scorer.add(SeesClasses(batch, len(splits.classes)), batch) == 1
    assert scorer.compute()["aacc"] > 97  # some colours mean two things
    assert scorer.goal == GOALS["segment"] == "miou"


def points_of(batch):
    """A model that gives the heat maps that were to be learned, for the crops of one batch."""
    model = nn.Module().eval()
    model.stride, model.forward = 4, lambda crops: torch.stack([target["heatmaps"] for target in batch.targets])
    return model


def test_pose__heat_maps_come_back_as_keypoints_of_the_images(scenes):
    """Through crop, heat map, decoding and back, nothing is lost but fractions of a cell."""
    splits = scenes["keypoints"]
    crops = PoseCrops(splits.val, training=False, input_size=(128, 96), pairs=splits.flip_pairs, sigma=1.5)
    batch = batch_of(crops, count=len(crops))
    scorer = PoseScorer(splits.val, splits.val.category_ids, splits.classes)
    assert scorer.add(points_of(batch), batch) == len(crops)
    assert scorer.compute()["keypoint_ap50"] > 95
    places = [target["meta"] for target in batch.targets]
    found = scorer.find(points_of(batch), torch.stack(batch.images), torch.stack([meta["matrix"] for meta in places]))
    for points, meta in zip(found, places, strict=True):
        target = splits.val.target(meta["image"])["keypoints"][meta["place"]]
        learned = target[:, 2] > 0
        cell = 4 * meta["matrix"][0, 0].abs()  # pixels of the image
        assert ((points[learned, :2] - target[learned, :2]).abs().amax() <= cell).item()
    halves = [PoseScorer(splits.val, splits.val.category_ids, splits.classes) for _ in range(2)]
    for half, rows in zip(halves, (slice(0, 3), slice(3, None)), strict=True):
        some = batch._replace(images=batch.images[rows], targets=batch.targets[rows])
        half.add(points_of(some), some)
    halves[1].merge(half.state() for half in halves)
    assert halves[1].compute() == pytest.approx(scorer.compute(), nan_ok=True)
    found = dict(keypoints=torch.tensor([[[1.0, 2.0, 0.9]]]), boxes=torch.zeros(1, 4))
    assert moved_keypoints(found, -0.5)["keypoints"].tolist() == [[[0.5, 1.5, pytest.approx(0.9)]]]
    assert found["keypoints"][0, 0, 0] == 1.0
    assert moved_keypoints(dict(boxes=found["boxes"]), 1.0).keys() == {"boxes"}


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
    scores = counted((torch.tensor([[0, 3, 1]]), torch.tensor([[0, 0, 1]])))
    assert scores.compute() == {"miou": 75, "aacc": pytest.approx(200 / 3), "macc": 75}  # of sky and road
    assert scores.coverage() == (2, 4)
    tree = scores.per_class()[3]
    assert tree["pixels"] == 0 and all(math.isnan(tree[key]) for key in ("iou", "acc", "precision"))
    first = torch.tensor([[0, 0, 0, 1]]), torch.tensor([[0, 0, 0, 0]])  # IoU of 0 is 3 / 4, of 1 is 0
    second = torch.tensor([[1]]), torch.tensor([[1]])  # IoU of 1 is 1
    figures = counted(first, second).compute()
    assert figures["miou"] == pytest.approx(100 * (3 / 4 + 1 / 2) / 2)  # images' mean: (37.5 + 100) / 2
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    generator = torch.Generator().manual_seed(0)
    said, target = (torch.randint(0, 4, (3, 8, 8), generator=generator) for _ in range(2))
    target[0, 0, 0] = 255
    figures = counted((said, target)).compute()
    options = dict(num_classes=4, ignore_index=255)
    assert figures["miou"] == pytest.approx(100 * float(MulticlassJaccardIndex(**options)(said, target)), rel=1e-5)
    macro = MulticlassAccuracy(average="macro", **options)(said, target)
    assert figures["macc"] == pytest.approx(100 * float(macro), rel=1e-5)


@pytest.mark.parametrize("said", [0, 3])
def test_compute__one_class_alone_or_none_has_no_means(said):
    scores = counted((torch.full((2, 2), said), torch.zeros(2, 2, dtype=torch.int64)))
    figures = scores.compute()
    assert math.isnan(figures["miou"]) and math.isnan(figures["macc"]) and figures["aacc"] == 100 * (said == 0)
    assert scores.coverage() == (1, 4)
    ignored = counted((SAID, torch.full_like(TARGET, 255)))
    assert all(map(math.isnan, ignored.compute().values())) and ignored.coverage() == (0, 4)


def test_counts__of_scores_batches_and_processes():
    logits = torch.nn.functional.one_hot(SAID, 4).movedim(-1, 0) * 3.0 - 1
    expected = counted((SAID, TARGET), (SAID, TARGET)).counts
    assert torch.equal(counted((logits, TARGET), (logits.bfloat16(), TARGET)).counts, expected)
    assert torch.equal(counted((logits[None].repeat(2, 1, 1, 1), TARGET.repeat(2, 1, 1))).counts, expected)
    assert torch.equal(counted((SAID.byte(), TARGET.byte()), (SAID.int(), TARGET)).counts, expected)
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
