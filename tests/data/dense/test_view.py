"""Views of dense data: which images, which numbers of classes, and objects painted as pixels."""

import pytest
import torch
from torchvision import tv_tensors

from broadsight.data.dense.resolve import resolve_dense
from broadsight.data.dense.view import CocoPixels, DenseView, labels_are_quick, labels_of_images, without_labels
from broadsight.data.scenes import Scenes
from broadsight.data.scenes.targets import SceneMasks
from broadsight.data.sources.coco import CocoDataset
from tests.refusals import refused

from .test_resolve import PERSON, box, paint, person, write


@pytest.fixture
def coco(tmp_path):
    """Three images of 8 x 6; cat is 1, dog 2. In the first a cat lies under a dog, both beside a crowd."""

    def at(x, y, width, height, category=9, **more):
        outline = [[x, y, x + width, y, x + width, y + height, x, y + height]]
        return dict(category_id=category, bbox=[x, y, width, height], segmentation=outline, **more)

    cat = at(0, 0, 4, 4, 5, keypoints=[1, 2, 2, 0, 0, 0])
    first = [cat, at(2, 2, 4, 4), at(3, 0, 5, 3, iscrowd=1)]
    objects = [*(box(number, **one) for number, one in enumerate(first, 1)), box(4, 3, **at(0, 0, 1, 1))]
    kinds = [dict(id=number, name=name, keypoints=["nose", "tail"]) for number, name in ((5, "cat"), (9, "dog"))]
    file = write(tmp_path, objects, 3, kinds)
    return lambda **options: CocoDataset(file, **options)


def test_view__of_some_images_with_labels_and_pixels_as_another_numbers_them(coco):
    view = DenseView(coco(), [2, 0])
    assert [view.name(i) for i in range(len(view))] == ["3.png", "1.png"]
    assert view.target(0)["image_id"] == 3 and view[0][0].size == view.open(0).size == (8, 6)
    assert [target["image_id"] for _, target in view] == [3, 1]  # iteration ends
    assert (view.classes, view.category_ids, view.keypoint_names) == (("cat", "dog"), {1: 5, 2: 9}, ("nose", "tail"))
    assert [one["image_id"] for _, one in DenseView(view, [1])] == [1]  # of a view
    view = DenseView(coco(), classes=("dog", "horse", "cat"), others_ids={1: 1, 2: 2, 3: 3})
    assert view.target(0)["labels"].tolist() == view[0][1]["labels"].tolist() == [3, 1, 1]
    assert view.target(1)["labels"].shape == (0,) and view.target(0)["boxes"].canvas_size == (6, 8)
    assert view.category_ids == {1: 9, 2: 2, 3: 5}  # its own ids, and another's for what it does not have
    assert DenseView(coco(), classes=("dog", "horse", "cat"), others_ids={2: 9}).category_ids == {1: 9, 2: 10, 3: 5}
    data = coco(masks=False, keypoints=True)
    view = DenseView(data, points=0.5)
    for _ in range(2):  # nothing is added to what the file holds
        assert view.target(0)["keypoints"][0].tolist() == [[1.5, 2.5, 2], [0, 0, 0]]
    assert data.target(0)["keypoints"][0].tolist() == [[1, 2, 2], [0, 0, 0]]
    data = SceneMasks(Scenes(6, size=24))
    classes = ("background", "other", *reversed(data.classes[1:]))
    view = DenseView(data, classes=classes)
    for i in range(6):
        own, other = data.target(i), view.target(i)
        assert isinstance(other, tv_tensors.Mask) and torch.equal(other, view[i][1])
        names = [[names[value] for value in mask.flatten()] for names, mask in ((data.classes, own), (classes, other))]
        assert names[0] == names[1]


def test_pixels__by_hand(coco):
    data = CocoPixels(coco())
    assert data.classes == ("background", "cat", "dog") and len(data) == 3 and data.name(1) == "2.png"
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
    view = DenseView(data, classes=("background", "dog", "cat"))  # ignored pixels stay
    assert sorted(view.target(0).unique().tolist()) == [0, 1, 2, 255]


def test_labels__of_objects_that_count_and_persons_with_labelled_keypoints(tmp_path):
    crowd = box(3, 2, iscrowd=1, segmentation=dict(size=[6, 8], counts=[0, 48]))
    file = write(tmp_path, [box(1), box(2, 1, category_id=7), crowd, box(4, 3, category_id=7)])
    view = resolve_dense(file, "detect", val=file).val
    assert labels_of_images(view) == [[1, 2], [], [2], []]
    assert labels_of_images(resolve_dense(file, "segment", val=file).val) == [[0, 2], [], [0, 2], [0]]
    hidden = write(tmp_path / "b", [box(1), box(2, category_id=7), box(3, 2)])  # a dog before the cat
    assert labels_of_images(resolve_dense(hidden, "segment", val=hidden).val) == [[0, 2], [0, 1], [0], [0]]
    other = DenseView(DenseView(view, [2, 0]), classes=("dog", "cat"))
    assert labels_of_images(other) == [[1], [1, 2]]  # as another numbers them
    file = write(tmp_path, [person(1), person(2, 2), person(3, 3, keypoints=[0] * 9)], categories=PERSON)
    view = resolve_dense(file, "keypoints", val=file).val
    assert labels_of_images(view) == [[1], [1], [], []]
    words = "x has no labelled keypoint to evaluate on; every visibility is 0"
    refused(words, without_labels, view, [[], []], "evaluate on", "x")


def test_labels__of_scenes_and_pixels_that_are_not_ignored(tmp_path):
    paint(tmp_path, "a", "b", values=(0, 1))
    paint(tmp_path, "c", values=(255, 1))
    paint(tmp_path, "d", values=(255,))
    (tmp_path / "classes.txt").write_text("sky\nsea\nsun\n")
    view = resolve_dense(tmp_path, "segment", val=tmp_path).val
    assert labels_of_images(view) == [[0, 1], [0, 1], [1], []]
    paint(tmp_path, "d", values=(2, 2, 1))  # another file of that name
    assert labels_of_images(view)[3] == [1, 2]
    (tmp_path / "masks" / "d.png").write_bytes(b"no mask")
    assert labels_of_images(view)[3] == []
    lost, alone = without_labels(view, [[1], [1]], "evaluate on", "x")
    assert lost == "classes without pixels to evaluate on: sky, sun (of 3 classes)"
    assert alone.startswith("the images to evaluate on show sea alone, so mIoU and mAcc have no value")
    view = resolve_dense("scenes:12", "segment", scenes_size=32).val
    assert labels_are_quick(view) and all(labels[0] == 0 and len(labels) > 1 for labels in labels_of_images(view))
    assert not labels_are_quick(DenseView(view, [0] * 300))
