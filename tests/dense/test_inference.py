"""Several views of an image: models that do not care about views answer as they did, and others by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broadsight.dense.inference import Views, detect, resize_factor, segment, slide, window_starts
from tests.refusals import refused


def pointwise(classes: int = 3) -> nn.Module:
    """A segmenter whose answer depends on a pixel alone, in whole numbers, so that sums are exact."""
    model = nn.Conv2d(3, classes, 1)
    model.weight.data = torch.randint(-3, 4, model.weight.shape).float()
    model.bias.data = torch.randint(-3, 4, (classes,)).float()
    return model.eval()


class Columns(nn.Module):
    """Says that every pixel has its column's number, and remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.given: list[tuple[int, ...]] = []
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        self.given.append(tuple(images.shape))
        columns = torch.arange(images.shape[-1]).expand(len(images), 1, *images.shape[-2:]).float()
        return torch.cat([columns, 0 * columns], 1)


@pytest.mark.parametrize("size", [(20, 31), (7, 40), (5, 6)])
@pytest.mark.parametrize("views", [Views(flip, slide=slide) for flip in (False, True) for slide in (False, True)])
def test_segment__pointwise_model__is_the_plain_forward(size, views):
    model, image = pointwise(), torch.randint(0, 5, (3, *size)).float()
    expected = model(image[None]).softmax(1)[0]
    assert torch.equal(segment(model, image, views), expected)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_slide__counts_by_hand(batch):
    # Windows of 4 over 7 columns by steps of 2 begin at 0, 2 and 3; how far a window's own column is that of the image
    # says where it began.
    scores = slide(Columns(), torch.zeros(1, 3, 3, 7), 4, 2, batch)
    columns = [0, 1, (2 + 0) / 2, (3 + 1 + 0) / 3, (2 + 1) / 2, (3 + 2) / 2, 3]
    assert torch.allclose(scores, torch.tensor([[columns] * 3, [[0.0] * 7] * 3]))


def test_models__see_windows_of_one_size_together_and_resized_views():
    model = Columns()
    assert slide(model, torch.zeros(1, 3, 10, 12), 6, 4, window_batch=4).shape == (1, 2, 10, 12)
    slide(model, torch.zeros(1, 3, 5, 12), 6, 4)
    assert model.given == [(4, 3, 6, 6), (2, 3, 6, 6), (3, 3, 5, 6)]  # 2 x 3 windows; no higher than the image
    model = Columns()
    found = segment(model, torch.rand(3, 30, 50), Views(True, (0.5, 1.0), 60, 80))
    segment(model, torch.rand(3, 30, 45), Views(slide=True))
    assert model.given == [(1, 3, 24, 40)] * 2 + [(1, 3, 48, 80)] * 2 + [(2, 3, 30, 30)]
    assert found.shape == (2, 30, 50) and torch.allclose(found.sum(0), torch.ones(30, 50))


def test_window_starts_and_resize_factor__by_hand():
    expected = {(12, 6, 4): [0, 4, 6], (14, 6, 4): [0, 4, 8], (6, 6, 4): [0], (3, 6, 4): [0], (7, 6, 4): [0, 1]}
    expected |= {(853, 512, 341): [0, 341]}
    assert {sides: window_starts(*sides) for sides in expected} == expected
    assert resize_factor((480, 640), None, None) == 1
    assert resize_factor((480, 640), 240, None) == 0.5
    assert resize_factor((100, 1000), 512, 2048) == 2.048
    assert resize_factor((480, 640), 512, 2048) == 512 / 480
    assert resize_factor((480, 640), None, 320) == 0.5
    assert resize_factor((480, 640), None, 6400) == 1  # a limit does not enlarge
    refused("short_side=0; expected pixels", resize_factor, (480, 640), 0, None)


def test_segment__averages_probabilities_of_views_and_refuses_training_mode():
    found = segment(Columns(), torch.rand(3, 1, 4), Views(flip=True))
    plain = torch.tensor([0.0, 1, 2, 3]).sigmoid()  # of two classes, the second with score 0
    assert torch.allclose(found[0, 0], (plain + plain.flip(0)) / 2)
    for scales in ((), (1, 0)):
        refused("expected one or more factors above 0", segment, pointwise(), torch.rand(3, 8, 8), Views(scales=scales))
    refused(r"call model.eval\(\) first", segment, pointwise().train(), torch.rand(3, 8, 8), Views())
    refused(r"call model.eval\(\) first", detect, Spots().train(), [], Views())


@pytest.mark.parametrize("views", [Views(short_side=8), Views(scales=(0.5,))])
def test_segment__resized_answers_come_back_by_bilinear_resizing(views):
    model, image = pointwise(), torch.rand(3, 16, 24)
    small = F.interpolate(image[None], (8, 12), mode="bilinear", antialias=True)
    expected = F.interpolate(model(small), (16, 24), mode="bilinear").softmax(1)[0]
    assert torch.allclose(segment(model, image, views), expected, atol=1e-6)


class Spots(nn.Module):
    """Finds what is bright in each channel: its box, its mask, the middles of its upper corners as keypoints.

    Exactly as equivariant as a detector can be. The score is the brightness; label 1 is the first channel.
    """

    def __init__(self):
        super().__init__()
        self.eval()

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.find(image) for image in images]

    def find(self, image: Tensor) -> dict[str, Tensor]:
        rows = []
        for label, channel in enumerate(image, 1):
            if channel.max() > 0.1:
                y, x = (channel > channel.max() / 2).nonzero().T
                box = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1]).float()
                points = torch.tensor([[x.min() + 0.5, y.min() + 0.5, 1.0], [x.max() + 0.5, y.min() + 0.5, 1.0]])
                rows.append((box, label, channel.max(), channel[None] / channel.max(), points))
        if not rows:
            return {key: value[:0] for key, value in self.find(torch.ones_like(image)).items()}
        boxes, labels, scores, masks, keypoints = zip(*rows, strict=True)
        found = dict(boxes=boxes, scores=scores, masks=masks, keypoints=keypoints)
        found = {name: torch.stack(values) for name, values in found.items()}
        sure = torch.tensor([[1.0, 2.0]]).repeat(len(labels), 1)
        return found | dict(labels=torch.tensor(labels), keypoints_scores=sure)


@pytest.mark.parametrize(("views", "blur"), [(Views(flip=True), 0), (Views(scales=(2.0,)), 0.51)])
def test_detect__equivariant_model__changes_nothing(views, blur):
    image = torch.zeros(3, 20, 32)
    image[0, 4:8, 2:10] = 0.5
    image[2, 10:18, 12:30] = 0.75
    plain = Spots().find(image)
    found, none = detect(Spots(), [image, torch.zeros(3, 9, 11)], views, [(0, 1)])
    assert found.keys() == plain.keys()
    for key in plain.keys() - {"keypoints_scores", "masks"}:  # resizing blurs the border
        torch.testing.assert_close(found[key], plain[key].flip(0), atol=blur, rtol=0)  # best first: label 3, then 1
    assert found["masks"].shape == (2, 1, 20, 32)
    assert torch.equal(found["masks"] > 0.5, plain["masks"].flip(0) > 0.5)
    assert blur or torch.equal(found["masks"], plain["masks"].flip(0))
    assert none["boxes"].shape == (0, 4) and none["masks"].shape == (0, 1, 9, 11) and none["scores"].shape == (0,)


class Told(nn.Module):
    """Gives answers in turn, one a call."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)
        self.eval()

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.answers.pop(0)]


def answer(*rows, **more) -> dict[str, Tensor]:
    """Of x1, y1, x2, y2, label, score."""
    table = torch.tensor(rows)
    return dict(boxes=table[:, :4], labels=table[:, 4].long(), scores=table[:, 5], **more)


def merged(*answers, flip: bool = True) -> dict[str, Tensor]:
    return detect(Told(*answers), [torch.zeros(3, 50, 100)], Views(flip), [(0, 1)])[0]


def test_detect__merged_by_class_with_the_best_score_but_one_view_is_the_models_own():
    """Both see the first object (shifted by a pixel), the plain view alone the second; a third of another class."""
    plain = answer((10.0, 10, 30, 30, 1, 0.6), (60.0, 10, 90, 30, 1, 0.7))
    mirrored = answer((71.0, 10, 91, 30, 1, 0.8), (70.0, 10, 90, 30, 2, 0.3))  # at 9 to 29, and 10 to 30
    found = merged(plain, mirrored)
    assert found["boxes"].tolist() == [[9, 10, 29, 30], [60, 10, 90, 30], [10, 10, 30, 30]]
    assert found["labels"].tolist() == [1, 1, 2]
    assert found["scores"].tolist() == pytest.approx([0.8, 0.7, 0.3])
    many = answer(*((x, 0.0, x + 1, 5, 1, 0.5) for x in range(98)))
    assert len(merged(many, many | {"labels": many["labels"] + 1})["scores"]) == 100  # the most of an image
    two_on_each_other = answer((10.0, 10, 30, 30, 1, 0.6), (10.0, 10, 30, 30, 1, 0.7))
    assert merged(two_on_each_other, flip=False) is two_on_each_other
    mirrored = answer(
        (10.0, 20, 30, 40, 1, 0.9),
        keypoints=torch.tensor([[[0.5, 5, 1], [99.5, 6, 1], [51, 7, 1]]]),
        keypoints_scores=torch.tensor([[1.0, 2, 3]]),
        masks=torch.arange(100.0).expand(1, 1, 50, 100),
    )
    found = merged({key: value[:0] for key, value in mirrored.items()}, mirrored)
    assert found["boxes"].tolist() == [[70, 20, 90, 40]]
    assert found["keypoints"].tolist() == [[[0.5, 6, 1], [99.5, 5, 1], [49, 7, 1]]]  # left and right are swapped
    assert found["keypoints_scores"].tolist() == [[2, 1, 3]]
    assert found["masks"][0, 0, 0, :3].tolist() == [99, 98, 97]
