"""What images show, by their labels: of objects, of pixels, of views with other numbers."""

import pytest

from broadsight.data.dense.presence import labels_of_images, told_quickly, without_labels
from broadsight.data.dense.resolve import resolve_dense
from broadsight.data.dense.view import DenseView

from .test_resolve import PERSON, box, paint, person, write


def test_labels__objects_that_count(tmp_path):
    crowd = box(3, 2, iscrowd=1, segmentation=dict(size=[6, 8], counts=[0, 48]))
    file = write(tmp_path, [box(1), box(2, 1, category_id=7), crowd, box(4, 3, category_id=7)])
    view = resolve_dense(file, "detect", val=file).val
    assert labels_of_images(view) == [[1, 2], [], [2], []]
    assert labels_of_images(resolve_dense(file, "segment", val=file).val) == [[0, 2], [], [0, 2], [0]]
    hidden = write(tmp_path / "b", [box(1), box(2, category_id=7), box(3, 2)])  # a dog before the cat
    assert labels_of_images(resolve_dense(hidden, "segment", val=hidden).val) == [[0, 2], [0, 1], [0], [0]]
    other = DenseView(DenseView(view, [2, 0]), classes=("dog", "cat"))
    assert labels_of_images(other) == [[1], [1, 2]]  # as another numbers them


def test_labels__persons_with_labelled_keypoints(tmp_path):
    file = write(tmp_path, [person(1), person(2, 2), person(3, 3, keypoints=[0] * 9)], categories=PERSON)
    view = resolve_dense(file, "keypoints", val=file).val
    assert labels_of_images(view) == [[1], [1], [], []]
    with pytest.raises(ValueError, match="x has no labelled keypoint to evaluate on; every visibility is 0"):
        without_labels(view, [[], []], "evaluate on", "x")


def test_labels__pixels_that_are_not_ignored(tmp_path):
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
    notes = without_labels(view, [[1], [1]], "evaluate on", "x")
    assert notes[0] == "classes without pixels to evaluate on: sky, sun (of 3 classes)"
    assert notes[1].startswith("the images to evaluate on show sea alone, so mIoU and mAcc have no value")


def test_labels__scenes():
    view = resolve_dense("scenes:12", "segment", scenes_size=32).val
    assert told_quickly(view) and all(labels[0] == 0 and len(labels) > 1 for labels in labels_of_images(view))
    assert not told_quickly(DenseView(view, [0] * 300))
