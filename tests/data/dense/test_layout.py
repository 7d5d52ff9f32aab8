"""Which files and folders are which part of a data set for dense tasks."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from broadsight.data.dense.layout import Dense, find_parts
from tests.refusals import refused

DATA = Path(__file__).parents[4] / "shared" / "data"


def coco(file: Path, *images: Path, names: Sequence[str] = ()) -> Path:
    """A COCO file that lists names, and images by their names, which are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for image in images:
        make_image(image)
    listed = [dict(id=n, file_name=name) for n, name in enumerate([*names, *(image.name for image in images)])]
    file.write_text(json.dumps(dict(images=listed, annotations=[], categories=[])))
    return file


def make_image(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(file)


def found(folder: Path, task: str = "detect") -> dict[str, tuple[str, str, str]]:
    """Kind, folder of images and labels of each part, from the folder."""
    parts = find_parts(folder, task)
    return {
        key: (part.kind, part.images.relative_to(folder).as_posix(), part.labels.relative_to(folder).as_posix())
        for key, part in parts.items()
    }


def test_coco__a_file_or_the_folder_that_it_is_in(tmp_path):
    file = coco(tmp_path / "labels.json", tmp_path / "images" / "a.png")
    assert found(tmp_path) == {"all": ("coco", "images", "labels.json")}
    assert find_parts(file, "segment") == find_parts(tmp_path, "segment") == find_parts(tmp_path, "keypoints")
    assert find_parts(str(file), "detect")["all"].images == tmp_path / "images"


def test_coco__its_own_layout(tmp_path):
    for year in ("train2017", "val2017"):
        for kind in ("instances", "person_keypoints", "panoptic"):
            coco(tmp_path / "annotations" / f"{kind}_{year}.json", tmp_path / year / "a.png")
        (tmp_path / "annotations" / f"captions_{year}.json").write_text('{"images": [], "annotations": []}')
    for task in ("detect", "instances", "segment", "keypoints"):
        kind = "person_keypoints" if task == "keypoints" else "instances"
        files = {key: ("coco", f"{key}2017", f"annotations/{kind}_{key}2017.json") for key in ("train", "val")}
        assert found(tmp_path, task) == files


def test_coco__train_and_val_each_with_a_file(tmp_path):
    for name in ("train", "valid", "test"):
        coco(tmp_path / name / "_annotations.coco.json", tmp_path / name / "a.png")
    places = {"train": "train", "val": "valid"}
    assert found(tmp_path) == {key: ("coco", name, f"{name}/_annotations.coco.json") for key, name in places.items()}


def test_coco__several_of_one_part_are_refused(tmp_path):
    for name in "ab":
        coco(tmp_path / f"{name}.json", tmp_path / "a.png")
    refused(r"has several COCO files: a.json, b.json; give the path of one", find_parts, tmp_path, "detect")
    for name in ("train", "val"):
        coco(tmp_path / "whole" / "train" / f"{name}.json", tmp_path / "whole" / "train" / "a.png")
    words = r"train holds train/train.json, train/val.json; keep one of them there"
    refused(words, find_parts, tmp_path / "whole", "detect")
    for name in ("train", "val", "mini"):  # others beside train and val are told
        coco(tmp_path / "mini" / f"{name}.json", tmp_path / "mini" / "a.png")
    assert found(tmp_path / "mini").keys() == {"train", "val", "unused 1"}
    assert found(tmp_path / "mini")["unused 1"][2] == "mini.json"


@pytest.mark.parametrize(("images", "masks"), [("images", "masks"), ("JPEGImages", "SegmentationClass")])
def test_masks__a_pair_of_folders(tmp_path, images, masks):
    make_image(tmp_path / images / "a.png", tmp_path / masks / "a.png")
    assert found(tmp_path, "segment") == {"all": ("masks", images, masks)}
    refused("holds masks of pixels, which are for segment; detect needs a COCO file", find_parts, tmp_path, "detect")


def test_masks__divided_inside_or_outside(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for name in ("training", "validation"):  # as ADE20K is
        make_image(inside / "images" / name / "a.png", inside / "annotations" / name / "a.png")
    make_image(inside / "images" / "test" / "a.png")
    places = {"train": "training", "val": "validation"}
    pairs = {key: ("masks", f"images/{name}", f"annotations/{name}") for key, name in places.items()}
    assert found(inside, "segment") == pairs
    for name in ("train", "val"):
        make_image(outside / name / "images" / "a.png", outside / name / "masks" / "a.png")
    assert found(outside, "segment") == {key: ("masks", f"{key}/images", f"{key}/masks") for key in ("train", "val")}
    make_image(tmp_path / "images/train/a.png", tmp_path / "images/val/b.png", tmp_path / "masks/train/a.png")
    assert found(tmp_path, "segment") == {"train": ("masks", "images/train", "masks/train")}  # val has no masks


def test_masks__before_a_coco_file_for_segment_alone(tmp_path):
    make_image(tmp_path / "images" / "a.png", tmp_path / "masks" / "a.png")
    coco(tmp_path / "objects.json", tmp_path / "images" / "a.png")
    assert found(tmp_path, "segment")["all"][0] == "masks" and found(tmp_path, "instances")["all"][0] == "coco"
    make_image(tmp_path / "labels" / "a.png")
    refused("more than one pair of images and masks: images, masks, labels", find_parts, tmp_path, "segment")


def test_nothing__is_said_in_one_line(tmp_path):
    make_image(tmp_path / "photos" / "a.png")
    refused("holds no labelled images; expected a COCO JSON file", find_parts, tmp_path, "detect")
    for place, words in (
        (tmp_path / "photo", r"no such data: .*photo; did you mean .*photos\?"),
        ("scene", r"no such data: scene; did you mean scenes\?"),
        (tmp_path / "xyz" / "w", r"give a COCO .json, a folder with images and labels, or scenes"),
    ):
        refused(words, find_parts, place, "detect", error=FileNotFoundError)
    coco(tmp_path / "b" / "x.json", names=["a.png"])
    words = r"x\.json lists a\.png, which is not in .*; move them there"
    refused(words, find_parts, tmp_path / "b", "detect", error=FileNotFoundError)
    (tmp_path / "list.txt").write_text("a")
    refused(r"list.txt is not a COCO file", find_parts, tmp_path / "list.txt", "detect")


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
def test_coco__its_images_wherever_exporters_put_them(tmp_path, file, name, stored, folder):
    found = Dense("coco", tmp_path / folder, coco(tmp_path / file, names=[name]))
    make_image(tmp_path / stored)
    (tmp_path / "settings.json").write_text('{"images": 3}')  # another program's
    (tmp_path / "empty.json").touch()
    assert find_parts(tmp_path, "detect") == find_parts(str(tmp_path / file), "detect") == {"all": found}


@pytest.mark.parametrize(
    ("folder", "task", "kind", "images", "labels"),
    [
        ("coco", "detect", "coco", "images", "instances.json"),
        ("coco_keypoints", "keypoints", "coco", ".", "person_keypoints.json"),
        ("coco_semantic", "segment", "masks", "images", "masks"),
    ],
)
def test_real_data__is_taken_for_what_it_is(folder, task, kind, images, labels):
    if not (DATA / folder).exists():
        pytest.skip(f"{folder} is not beside the repository")
    assert find_parts(DATA / folder, task) == {"all": (kind, DATA / folder / images, DATA / folder / labels)}
