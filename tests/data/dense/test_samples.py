"""What a folder is taken for."""

import json
from pathlib import Path

import pytest

from broadsight.data.dense.samples import Dense, find_dense
from tests.refusals import refused

from ..reading import put

DATA = Path(__file__).parents[4] / "shared" / "data"


def coco(path: Path, name: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [dict(id=1, file_name=name, width=2, height=2)]
    path.write_text(json.dumps(dict(categories=[dict(id=1, name="a")], annotations=[], images=images)))
    return path


@pytest.mark.parametrize(
    ("file", "name", "stored", "folder"),
    [
        ("instances.json", "a.png", "a.png", "."),
        ("instances.json", "a.png", "images/a.png", "images"),
        ("instances.json", "images/ä.png", "images/ä.png", "."),
        ("train.json", "a.png", "train/a.png", "train"),
        ("annotations/instances_val2017.json", "a.png", "val2017/a.png", "val2017"),
        ("annotations/instances_val2017.json", "a.png", "images/val2017/a.png", "images/val2017"),
        ("annotations/train.json", "train/a.png", "images/train/a.png", "images"),
    ],
)
def test_find_dense__coco(tmp_path, file, name, stored, folder):
    found = Dense("coco", tmp_path / folder, coco(tmp_path / file, name))
    put(tmp_path / stored)
    (tmp_path / "settings.json").write_text('{"images": 3}')  # another program's
    (tmp_path / "empty.json").touch()
    assert find_dense(tmp_path) == find_dense(str(tmp_path / file)) == found


@pytest.mark.parametrize("folders", [("images", "masks"), ("imgs", "labels"), ("JPEGImages", "SegmentationClass")])
def test_find_dense__pair(tmp_path, folders):
    for folder in folders:
        put(tmp_path / folder / "train" / "a.png")
    assert find_dense(tmp_path) == Dense("masks", tmp_path / folders[0], tmp_path / folders[1])


def test_find_dense__several_things(tmp_path):
    put(tmp_path / "images" / "a.png")
    coco(tmp_path / "annotations" / "train.json", "a.png")
    coco(tmp_path / "annotations" / "val.json", "a.png")
    refused(r"holds annotations.train\.json, annotations.val\.json; give the path", find_dense, tmp_path)
    (tmp_path / "annotations" / "val.json").unlink()
    put(tmp_path / "masks" / "a.png")
    refused(r"holds annotations.train\.json and the masks in masks; give the path", find_dense, tmp_path)
    (tmp_path / "annotations" / "train.json").unlink()
    put(tmp_path / "labels" / "a.png")
    refused("more than one pair of images and masks: images, masks, labels", find_dense, tmp_path)


def test_find_dense__nothing(tmp_path):
    put(tmp_path / "images" / "a.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 1 1")
    refused("holds no labelled images; expected a COCO JSON file beside its images, or", find_dense, tmp_path)
    refused("nowhere does not exist", find_dense, tmp_path / "nowhere", error=FileNotFoundError)
    refused(r"a\.txt is not a COCO file", find_dense, tmp_path / "labels" / "a.txt")


def test_find_dense__coco_whose_images_are_elsewhere(tmp_path):
    coco(tmp_path / "x.json", "a.png")
    refused(r"x\.json lists a\.png, which is not in .*; move them there", find_dense, tmp_path, error=FileNotFoundError)


@pytest.mark.parametrize(
    ("folder", "kind", "images", "labels"),
    [
        ("coco", "coco", "images", "instances.json"),
        ("coco_keypoints", "coco", ".", "person_keypoints.json"),
        ("coco_semantic", "masks", "images", "masks"),
    ],
)
def test_find_dense__real(folder, kind, images, labels):
    if not (DATA / folder).exists():
        pytest.skip(f"{folder} is not beside the repository")
    assert find_dense(DATA / folder) == (kind, DATA / folder / images, DATA / folder / labels)
