"""Labelled images that a dense model is evaluated on."""

import json

import pytest

from broadsight.data.dense.resolve import open_dense_part
from tests.refusals import refused

from ...training.dense_runs import write_coco

MODEL = dict(classes=("blue", "green", "red"), category_ids={1: 1, 2: 3, 3: 7})


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"), count=10)


def test_part__classes_are_numbered_as_the_models(coco):
    part = open_dense_part(str(coco), "detect", **MODEL)
    assert part.images.classes == MODEL["classes"] and len(part.images) == 10
    assert [part.images.target(i)["labels"].tolist() for i in range(3)] == [[2], [3], [2]]  # green, red, green
    assert part.images.category_ids == {1: 1, 2: 3, 3: 7}
    assert (part.description["part"], part.description["kind"]) == ("all", "coco")


def test_part__held_out_as_training_does(coco):
    held = open_dense_part(str(coco), "detect", "val", split=0.3, seed=2, **MODEL).images
    rest = open_dense_part(str(coco), "detect", "train", split=0.3, seed=2, **MODEL).images
    names = [{view.name(i) for i in range(len(view))} for view in (held, rest)]
    assert len(names[0]) == 3 and len(names[1]) == 7 and not names[0] & names[1]


def test_part__of_scenes():
    part = open_dense_part("scenes:40", "segment", classes=(), category_ids={})
    assert len(part.images) == 10 and part.description["part"] == "val"
    assert part.images.name(0) == "scenes/val/000000"
    test = open_dense_part("scenes:40", "detect", "test", classes=(), category_ids={})
    assert test.images.name(0) == "scenes/test/000000"


@pytest.fixture
def changed(coco, tmp_path):
    """The same file with other content."""
    (tmp_path / "images").symlink_to(coco.parent / "images")

    def write(**content) -> str:
        (tmp_path / "other.json").write_text(json.dumps(json.loads(coco.read_text("utf-8")) | content), "utf-8")
        return str(tmp_path / "other.json")

    return write


def test_part__refusals(coco, changed):
    words = "has classes that the model has not: red; remove them"
    refused(words, open_dense_part, str(coco), "detect", classes=("green",), category_ids={1: 3})
    words = "has no part 'val'; it has all; leave --part out, or give --split"
    refused(words, open_dense_part, str(coco), "detect", "val", **MODEL)
    refused("scenes have the parts train, val and test", open_dense_part, "scenes", "detect", "all", **MODEL)
    refused("no such data: nowhere", open_dense_part, "nowhere", "detect", error=FileNotFoundError, **MODEL)
    kinds = [{**one, "keypoints": ["tip"]} for one in json.loads(coco.read_text("utf-8"))["categories"]]
    words = "has keypoints tip but the model nose; expected the same"
    refused(words, open_dense_part, changed(categories=kinds), "keypoints", keypoint_names=("nose",), **MODEL)
    words, classes = "has no objects to evaluate on; expected annotations with masks", ("background", "green", "red")
    refused(words, open_dense_part, changed(annotations=[]), "segment", classes=classes, category_ids={})
