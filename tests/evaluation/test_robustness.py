"""Suites of robustness, on classifiers and images whose answers can be worked out by hand."""

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from broadsight.data.corruptions import CORRUPTIONS, corrupt
from broadsight.data.decoding import UnreadableImage
from broadsight.data.loading import EvalOrder, SourceDataset, Transforms, load
from broadsight.data.normalising import Normalise
from broadsight.data.seeds import mixed
from broadsight.evaluation import robustness
from broadsight.evaluation.predictions import collect
from broadsight.evaluation.robustness import ORDERS, SUITES, Choices, Corrupted, Row, direction, run_suite, without
from broadsight.evaluation.saliency import GradCam
from broadsight.surgery.pooling import swap_pool

from ..refusals import refused
from .test_saliency import classifier_of

QUICK = Choices(("contrast", "gaussian_noise"), severities=(1, 5), epsilons=(8,), sides=(0.5,), fractions=(0.5,))


class Arrays:
    """Images (N, H, W, C) of bytes; those in `broken` cannot be read."""

    def __init__(self, images, labels, broken=()):
        self.images, self.labels, self.broken = np.asarray(images, np.uint8), np.asarray(labels), broken
        self.classes = tuple(map(str, range(10)))

    def __len__(self):
        return len(self.labels)

    def label(self, index):
        return int(self.labels[index])

    def name(self, index):
        return f"{index}.png"

    def open(self, index):
        if index in self.broken:
            raise UnreadableImage(f"{index}.png: cut short")
        return Image.fromarray(self.images[index].squeeze())


class Linear:
    """Logits are sums of the normalised values, weighted, and a bias."""

    def __init__(self, weight, bias, size, mean=(0.2,), std=(0.8,)):
        self.weight, self.bias = torch.as_tensor(weight, dtype=torch.float32), torch.as_tensor(bias)
        self.normalise = Normalise(mean, std)
        self.transforms = Transforms(size, len(mean), mean, std, crop_pct=1.0)
        self.num_classes = len(self.bias)

    def logits(self, images):
        return images.flatten(1) @ self.weight.T + self.bias


def finds_bright(size):
    """Class 1 if one pixel is white and the rest have the mean colour, 51: the former counts 1, the latter 0."""
    return Linear(np.stack([np.zeros(size * size), np.ones(size * size)]), [0.5, 0.0], size)


def bright(size, *places):
    images = np.full((len(places), size, size, 1), 51, np.uint8)
    for image, (row, column) in zip(images, places, strict=True):
        image[row, column] = 255
    return Arrays(images, [1] * len(places))


def noise(count, size, channels=3, classes=10, seed=0):
    random = np.random.default_rng(seed)
    return Arrays(random.integers(0, 256, (count, size, size, channels)), random.integers(0, classes, count))


def rows_of(suite):
    return [(row.case, row.at, row.top1) for row in suite.rows]


def test_occlusion__exactly_the_centre_and_counted_by_hand():
    for height, width, side, rows, columns in (
        (4, 4, 0.5, (1, 3), (1, 3)),
        (5, 5, 0.5, (1, 3), (1, 3)),  # 2.5 is rounded to 2
        (5, 5, 0.75, (0, 4), (0, 4)),  # 3.75 to 4, half a pixel up and left
        (7, 5, 0.4, (2, 5), (1, 3)),  # 2.8 and 2
        (6, 6, 0.0, (3, 3), (3, 3)),
        (6, 5, 1.0, (0, 6), (0, 5)),
    ):
        images = torch.rand(2, 3, height, width) + 1
        expected, before = images.clone(), images.clone()
        expected[..., slice(*rows), slice(*columns)] = 0
        assert torch.equal(robustness.occluded(images, side), expected) and torch.equal(images, before)
    # In 8 x 8 the squares are 3:5, 2:6 and 1:7
    source = bright(8, (0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (2, 5), (6, 6), (7, 3))
    suite = run_suite("occlusion", finds_bright(8), source, batch=3)
    assert rows_of(suite) == [("centre", 0, 100), ("centre", 0.25, 75), ("centre", 0.5, 50), ("centre", 0.75, 25)]
    assert suite.summary == {"clean": 100, "half the side": 50}
    assert {row.images for row in suite.rows} == {8}
    assert "half the side" not in run_suite("occlusion", finds_bright(8), source, choices=Choices(sides=(1,))).summary


def test_direction__is_that_of_the_closed_form_also_of_a_sure_answer():
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.4)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3, 3 * 4 * 4, generator=generator) / 10
    subject = Linear(weight, torch.tensor([0.3, -0.2, 0.1]), 4, mean, std)
    photos = torch.randint(0, 256, (5, 3, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 0, 1])
    images = subject.normalise(photos)
    signs, logits = direction(subject.logits, images, labels)
    said = images.flatten(1).double() @ weight.double().T + subject.bias.double()
    gradient = (said.softmax(1) - torch.eye(3, dtype=torch.float64)[labels]) @ weight.double()
    assert torch.equal(signs, gradient.sign().float().view_as(images))
    assert torch.allclose(logits, said.float(), atol=1e-5) and not logits.requires_grad

    found = robustness.stepped(subject.normalise, photos, signs, 8.0)
    moved = (photos.double() / 255 + 8 / 255 * signs.double()).clamp(0, 1)
    expected = (moved - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    assert (moved == 0).any() and (moved == 1).any()  # some were clipped
    inside = (photos >= 8) & (photos <= 247)
    step = (found - images) * inside
    assert torch.allclose(step.abs().amax((0, 2, 3)), 8 / 255 / torch.tensor(std), rtol=1e-4)
    # of two classes it leads to the other
    weight = torch.randn(2, 16)
    signs, _ = direction(Linear(weight, [0.0, 0.0], 4).logits, torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))
    assert torch.equal(signs.flatten(1), torch.stack([weight[1] - weight[0], weight[0] - weight[1]]).sign())
    # in single precision its probability would be 1, and there would be no gradient
    subject = Linear(torch.stack([torch.zeros(4), torch.ones(4)]), [0.0, 30.0], 2)
    signs, _ = direction(subject.logits, torch.zeros(1, 1, 2, 2), torch.tensor([1]))
    assert torch.equal(signs, -torch.ones(1, 1, 2, 2))


@pytest.mark.parametrize("kept", [None, np.array([0, 1])])
def test_fgsm__counted_by_hand(kept):
    """White or black: an even grey is right as long as the step does not carry it past 127.5."""
    # Logits: minus and plus the mean's distance from 127.5, in pixels; a third class that others do not see
    flat = np.ones(16) / 16 * 255 * 0.8
    subject = Linear(np.stack([-flat, flat, 0 * flat]), [127.5 - 51, 51 - 127.5, -500.0 if kept is None else 500.0], 4)
    values, labels = [120, 125, 126, 130, 135, 140, 0, 255], [0, 0, 0, 1, 1, 1, 0, 1]
    images = np.broadcast_to(np.array(values)[:, None, None, None], (8, 4, 4, 1))
    choices = Choices(epsilons=(8, 2, 4, 1))
    suite = run_suite("fgsm", subject, Arrays(images, labels), choices=choices, batch=5, kept=kept)
    # Distances 7.5, 2.5, 1.5, 2.5, 7.5, 12.5, 127.5, 127.5
    assert rows_of(suite) == [("fgsm", at, 100 * right / 8) for at, right in ((0, 8), (1, 8), (2, 7), (4, 5), (8, 3))]
    assert suite.summary == {"clean": 100, "8/255": 37.5}


@pytest.mark.parametrize("shape", [(4, 5), (7, 7)])
def test_removal__takes_exactly_so_many_the_most_salient_first(shape):
    saliency = torch.rand(3, *shape)
    saliency[1] = (saliency[1] > 0.5).float()  # many ties
    saliency[2] = 0
    ranks = robustness.removal_ranks(saliency, [4, 5, 6], seed=1)
    images, pixels = torch.rand(3, 2, *shape) + 1, shape[0] * shape[1]
    for order, tenth in itertools.product(ORDERS, range(11)):
        count = round(tenth / 10 * pixels)
        gone = without(images, ranks[order], tenth / 10) == 0
        assert (gone[:, 0] == gone[:, 1]).all() and (gone[:, 0].sum((1, 2)) == count).all()
        if order != "random" and 0 < count < pixels:
            first = saliency if order == ORDERS[0] else -saliency
            assert all(one[mask].min() >= one[~mask].max() for one, mask in zip(first, gone[:, 0], strict=True))
    for rank in ranks.values():
        assert (rank.flatten(1).sort(1).values == torch.arange(pixels)).all()


def test_removal__chance_depends_on_the_image_alone_and_takes_squares():
    saliency = torch.rand(3, 4, 4).round()
    together = robustness.removal_ranks(saliency, [0, 1, 2])
    for order in ORDERS:
        alone = [robustness.removal_ranks(saliency[i : i + 1], [i])[order][0] for i in (2, 1, 0)][::-1]
        assert torch.equal(together[order], torch.stack(alone))
    assert not torch.equal(together["random"][0], together["random"][1])
    assert not torch.equal(together["random"], robustness.removal_ranks(saliency, [0, 1, 2], seed=1)["random"])
    blank = robustness.removal_ranks(torch.zeros(2, 28, 42), [3, 4])
    assert not torch.equal(blank["salient first"], blank["random"])  # ties are another draw than the control
    for one in blank["random"]:
        assert sorted(one.flatten().tolist()) == list(range(28 * 42))
        for number in range(14 * 21):  # square after square of two by two pixels
            square = (one // 4 == number).nonzero()
            assert (square.amax(0) - square.amin(0)).tolist() == [1, 1] and (square.amin(0) % 2 == 0).all()


def test_salient__counted_by_hand():
    source = bright(4, (0, 0), (1, 3), (2, 2), (3, 1))
    options = dict(choices=Choices(fractions=(0.25, 0.5)), saliency=lambda images, batch: images[:, 0])
    suite = run_suite("salient", finds_bright(4), source, **options, batch=3, seed=7)
    for order, (middle, last) in (("salient first", (0, 0)), ("least salient first", (100, 100))):
        assert suite.curve(order) == [(0, 100), (0.25, middle), (0.5, last)]
    left = []
    for index, place in enumerate((0, 7, 10, 13)):
        generator = torch.Generator().manual_seed(mixed(7, index))
        torch.randperm(16, generator=generator)  # for ties
        left.append(torch.randperm(16, generator=generator)[place])
    middle, last = (100 * sum(rank >= 16 * at for rank in left).item() / 4 for at in (0.25, 0.5))
    assert suite.curve("random") == [(0, 100.0), (0.25, middle), (0.5, last)]
    random = (100 + middle) / 4 + (middle + last) / 4  # salient first: half of the way falls from 100 to 0
    areas = {"area, salient first": 25, "area, random": random, "area, least salient first": 100}
    gaps = {"gap to random": random - 25, "gap to least salient": 75}
    assert suite.summary == pytest.approx({"clean": 100} | areas | gaps)
    assert robustness.area([0, 0.5, 1], [100, 50, 0]) == 50
    assert robustness.area([0, 0.1, 0.5], [100, 60, 20]) == pytest.approx((80 * 0.1 + 40 * 0.4) / 0.5)
    assert robustness.area([0.3], [40]) == 40


@pytest.mark.parametrize("channels", [1, 3])
def test_corrupted__is_what_corrupt_makes_of_the_crop(channels):
    source, transforms = noise(5, 40, channels), Transforms(16, channels, crop_pct=0.5, interpolation="bilinear")
    if channels == 1:
        transforms = replace(transforms, mean=(0.5,), std=(0.5,))
    corrupted = Corrupted(source, transforms, "fog", 3, seed=2)
    found = {index: robustness.as_bytes(corrupted.open(index)) for index in (3, 0, 4, 1, 2)}
    for index in range(5):
        resized = source.open(index).resize((32, 32), Image.Resampling.BILINEAR).crop((8, 8, 24, 24))
        pixels = np.array(resized).reshape(16, 16, channels)
        expected = corrupt(pixels, "fog", 3, seed=mixed(2, index))
        assert found[index].shape == (channels, 16, 16) and found[index].dtype == torch.uint8
        assert np.array_equal(found[index].permute(1, 2, 0), expected)
        assert corrupted.label(index) == source.label(index) and corrupted.name(index) == f"{index}.png"
    again = pickle.loads(pickle.dumps(corrupted))  # as worker processes get it
    assert torch.equal(robustness.as_bytes(again.open(3)), found[3])
    batch = next(iter(load(SourceDataset(corrupted, robustness.as_bytes), EvalOrder(corrupted, 5))))
    assert torch.equal(batch.images, torch.stack([found[index] for index in range(5)]))


def test_corruptions__counted_by_hand():
    source = noise(12, 16, classes=3)
    subject = Linear(torch.randn(3, 3 * 256), [0.0] * 3, 16, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
    suite = run_suite("corruptions", subject, source, choices=QUICK, batch=5, seed=3)
    by_hand = {}
    for case, at in [("clean", 0), *itertools.product(("gaussian_noise", "contrast"), (1, 5))]:
        pixels = list(source.images)
        if at:
            pixels = [corrupt(image, case, at, seed=mixed(3, index)) for index, image in enumerate(pixels)]
        images = subject.normalise(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))
        by_hand[case, at] = 100 * float((subject.logits(images).argmax(1).numpy() == source.labels).mean())
    assert {(row.case, row.at): row.top1 for row in suite.rows} == pytest.approx(by_hand)
    noisy = (by_hand["gaussian_noise", 1] + by_hand["gaussian_noise", 5]) / 2
    flat = (by_hand["contrast", 1] + by_hand["contrast", 5]) / 2
    clean, mean = by_hand["clean", 0], (noisy + flat) / 2
    expected = {"clean": clean, "mean": mean, "noise": noisy, "digital": flat, "mean, of clean": 100 * mean / clean}
    assert suite.summary == pytest.approx(expected)
    never_right = robustness.summary_of("corruptions", [Row("clean", 0, 0.0, 3), Row("fog", 1, 0.0, 3)])
    assert never_right["mean, of clean"] is None


def test_choices__cases_and_what_is_refused():
    assert [len(Choices().cases(name)) for name in SUITES] == [4, 4, 30, 76]
    assert Choices().cases("corruptions") == [("clean", 0), *itertools.product(CORRUPTIONS, range(1, 6))]
    assert Choices(severities=(5, 1, 5)).cases("corruptions")[1:3] == [("gaussian_noise", 1), ("gaussian_noise", 5)]
    for name, values, message in (
        ("sides", (0.5, 1.5), "1.5 among sides; expected numbers between 0 and 1"),
        ("fractions", (-0.1,), "-0.1 among fractions"),
        ("epsilons", (-1,), "-1 among epsilons; expected numbers between 0 and 255"),
        ("epsilons", (float("nan"),), "nan among epsilons"),
        ("sides", (), "sides are empty"),
        ("corruptions", ("mist",), "unknown corruption 'mist'; corruptions are gaussian_noise, "),
        ("severities", (6,), "severity 6; expected some of 1, 2, 3, 4, 5"),
    ):
        refused(message, Choices, **{name: values})


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "pooled"])
def test_suites__leave_a_model_as_it_was(name):
    torch.manual_seed(0)
    if name == "pooled":
        model = swap_pool("test_resnet", "map", groups=2, tokens=1, dim=24, heads=4, num_classes=10)
    else:
        model = timm.create_model(name, num_classes=10)
    model.train()
    next(module for module in model.modules() if not list(module.children())).eval()  # somebody froze it
    subject, source = classifier_of(model), noise(5, 32)
    flags = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    suites, options = {}, dict(choices=QUICK, saliency=GradCam(subject), batch=3)
    for name in SUITES:
        done = []
        suites[name] = run_suite(name, subject, source, **options, seen=lambda count, _, done=done: done.append(count))
        assert sum(done) == 5 * len(QUICK.cases(name))
    assert "Grad-CAM" in suites["salient"].about
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    model.eval()
    images = SourceDataset(source, subject.transforms.build(False))
    said = collect(subject, load(images, EvalOrder(source, 3)), count=5)
    assert {suite.summary["clean"] for suite in suites.values()} == {100 * float((said.ranks == 0).mean())}
    for suite in suites.values():
        assert all(row.images == 5 and 0 <= row.top1 <= 100 for row in suite.rows)


def test_suites__after_a_pass_in_inference_mode():
    """A model may keep what it computed there; through that no gradient goes."""

    class Keeps(nn.Module):
        num_classes = 2

        def __init__(self):
            super().__init__()
            self.weight, self.kept = nn.Parameter(torch.randn(3 * 32 * 32, 2)), None

        def train(self, mode=True):
            self.kept = None if mode else self.kept
            return super().train(mode)

        def forward(self, images):
            self.kept = self.weight * 2 if self.kept is None else self.kept
            return images.flatten(1) @ self.kept

    model = Keeps().eval().requires_grad_(False)
    with torch.inference_mode():
        model(torch.zeros(1, 3, 32, 32))
    assert model.kept.is_inference()
    run_suite("fgsm", classifier_of(model), noise(3, 32, classes=2))


def test_images_that_cannot_be_read():
    source = bright(8, (0, 0), (3, 3), (4, 4))
    source.broken = (1,)
    suite = run_suite("occlusion", finds_bright(8), source, batch=1)
    assert [(row.top1, row.images) for row in suite.rows] == [(100, 2), (50, 2), (50, 2), (50, 2)]
    assert suite.skipped == {"1.png": "cut short"}
    for broken, strict, words in (((1,), True, "1.png cannot be read"), ((0, 1, 2), False, "none of the 3 images")):
        source.broken = broken
        with pytest.raises(RuntimeError, match=words):
            run_suite("fgsm", finds_bright(8), source, strict=strict)


def test_run_suite__refused():
    bright_one, empty = bright(8, (0, 0)), np.zeros((1, 8, 8, 1))
    for name, source, options, message in (
        ("fog", bright_one, {}, "unknown suite 'fog'; suites are occlusion, fgsm, salient, corruptions"),
        ("fgsm", Arrays(empty[:0], []), {}, "no images"),
        ("fgsm", Arrays(empty, [2]), {}, "labels go from 2 to 2, but the model has 2 classes"),
        ("fgsm", bright_one, dict(kept=np.array([0])), "classes that do not compete"),
        ("fgsm", bright_one, dict(batch=0), "batch=0"),
        ("salient", bright_one, dict(saliency=lambda images, _: images), r"expected \(B, H, W\) = \(1, 8, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run_suite(name, finds_bright(8), source, **options)
    for found, message in (
        (torch.zeros(2, 1, 4, 4), r"is \(2, 1, 4, 4\); expected \(B, H, W\) = \(2, 4, 4\)"),
        (np.zeros((2, 4, 4)), "is a ndarray; expected"),
        (torch.full((2, 4, 4), torch.nan), "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            robustness.checked_saliency(found, torch.zeros(2, 3, 4, 4))
