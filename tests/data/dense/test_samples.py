"""What a folder is taken for."""

import json
from pathlib import Path

import pytest

from broadsight.data.dense.layout import Dense, find_parts
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
def test_coco(tmp_path, file, name, stored, folder):
    found = Dense("coco", tmp_path / folder, coco(tmp_path / file, name))
    put(tmp_path / stored)
    (tmp_path / "settings.json").write_text('{"images": 3}')  # another program's
    (tmp_path / "empty.json").touch()
    assert find_parts(tmp_path, "detect") == find_parts(str(tmp_path / file), "detect") == {"all": found}


def test_coco_whose_images_are_elsewhere(tmp_path):
    coco(tmp_path / "x.json", "a.png")
    words = r"x\.json lists a\.png, which is not in .*; move them there"
    refused(words, find_parts, tmp_path, "detect", error=FileNotFoundError)


@pytest.mark.parametrize(
    ("folder", "task", "kind", "images", "labels"),
    [
        ("coco", "detect", "coco", "images", "instances.json"),
        ("coco_keypoints", "keypoints", "coco", ".", "person_keypoints.json"),
        ("coco_semantic", "segment", "masks", "images", "masks"),
    ],
)
def test_real(folder, task, kind, images, labels):
    if not (DATA / folder).exists():
        pytest.skip(f"{folder} is not beside the repository")
    assert find_parts(DATA / folder, task) == {"all": (kind, DATA / folder / images, DATA / folder / labels)}
