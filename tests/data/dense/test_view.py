"""Views of dense data: which images, which numbers of classes, and objects painted as pixels."""

import json

import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from broadsight.data.dense.view import CocoPixels, DenseView
from broadsight.data.scenes import Scenes
from broadsight.data.scenes.targets import SceneMasks
from broadsight.data.sources.coco import CocoDataset


@pytest.fixture
def coco(tmp_path):
    """Three images of 8 x 6; cat is 1, dog 2. In the first a cat lies under a dog, both beside a crowd."""

    def box(number, image, category, x, y, width, height, **more):
        outline = [[x, y, x + width, y, x + width, y + height, x, y + height]]
        return dict(
            id=number, image_id=image, category_id=category, bbox=[x, y, width, height], segmentation=outline, **more
        )

    for name in "abc":
        Image.new("RGB", (8, 6), "red").save(tmp_path / f"{name}.png")
    content = dict(
        images=[dict(id=n, file_name=f"{name}.png", width=8, height=6) for n, name in enumerate("abc", 1)],
        categories=[dict(id=id, name=name, keypoints=["nose", "tail"]) for id, name in ((5, "cat"), (9, "dog"))],
        annotations=[
            box(1, 1, 5, 0, 0, 4, 4, keypoints=[1, 2, 2, 0, 0, 0]),
            box(2, 1, 9, 2, 2, 4, 4),
            box(3, 1, 9, 3, 0, 5, 3, iscrowd=1),
            box(4, 3, 9, 0, 0, 1, 1),
        ],
    )
    (tmp_path / "coco.json").write_text(json.dumps(content))
    return lambda **options: CocoDataset(tmp_path / "coco.json", **options)


def test_view__some_of_the_images(coco):
    view = DenseView(coco(), [2, 0])
    assert len(view) == 2 and [view.name(i) for i in range(2)] == ["c.png", "a.png"]
    assert view.target(0)["image_id"] == 3 and view[1][1]["image_id"] == 1
    assert view[0][0].size == view.open(0).size == (8, 6)
    assert [target["image_id"] for _, target in view] == [3, 1]  # iteration ends
    assert (view.classes, view.category_ids, view.keypoint_names) == (("cat", "dog"), {1: 5, 2: 9}, ("nose", "tail"))
    assert [one["image_id"] for _, one in DenseView(view, [1])] == [1]  # of a view


def test_view__labels_as_another_numbers_them(coco):
    view = DenseView(coco(), classes=("dog", "horse", "cat"), others_ids={1: 1, 2: 2, 3: 3})
    assert view.target(0)["labels"].tolist() == view[0][1]["labels"].tolist() == [3, 1, 1]
    assert view.target(1)["labels"].shape == (0,) and view.target(0)["boxes"].canvas_size == (6, 8)
    assert view.category_ids == {1: 9, 2: 2, 3: 5}  # its own ids, and another's for what it does not have
    assert DenseView(coco(), classes=("dog", "horse", "cat"), others_ids={2: 9}).category_ids == {1: 9, 2: 10, 3: 5}


def test_view__pixels_as_another_numbers_them():
    data = SceneMasks(Scenes(6, size=24))
    classes = ("background", "other", *reversed(data.classes[1:]))
    view = DenseView(data, classes=classes)
    for i in range(6):
        own, other = data.target(i), view.target(i)
        assert isinstance(other, tv_tensors.Mask) and torch.equal(other, view[i][1])
        names = [[names[value] for value in mask.flatten()] for names, mask in ((data.classes, own), (classes, other))]
        assert names[0] == names[1]


def test_view__ignored_pixels_stay(coco):
    view = DenseView(CocoPixels(coco()), classes=("background", "dog", "cat"))
    assert sorted(view.target(0).unique().tolist()) == [0, 1, 2, 255]


def test_view__keypoints_of_pixels_as_coordinates(coco):
    data = coco(masks=False, keypoints=True)
    view = DenseView(data, points=0.5)
    for _ in range(2):  # nothing is added to what the file holds
        assert view.target(0)["keypoints"][0].tolist() == [[1.5, 2.5, 2], [0, 0, 0]]
    assert data.target(0)["keypoints"][0].tolist() == [[1, 2, 2], [0, 0, 0]]


def test_pixels__by_hand(coco):
    data = CocoPixels(coco())
    assert data.classes == ("background", "cat", "dog") and len(data) == 3 and data.name(1) == "b.png"
    mask = data.target(0)
    assert isinstance(mask, tv_tensors.Mask) and mask.dtype == torch.int64
    x = 255
    assert mask.tolist() == [
        [1, 1, 1, 1, x, x, x, x],
        [1, 1, 1, 1, x, x, x, x],
        [1, 1, 2, 2, 2, 2, x, x],
        [1, 1, 2, 2, 2, 2, 0, 0],
        [0, 0, 2, 2, 2, 2, 0, 0],
        [0, 0, 2, 2, 2, 2, 0, 0],
    ]
    assert data.target(1).tolist() == [[0] * 8] * 6
    image, same = data[0]
    assert image.size == (8, 6) and torch.equal(same, mask)
    assert "crowds are ignored" in data.notes[-1]
