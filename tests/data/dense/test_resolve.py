"""What DATA becomes for dense tasks: parts, classes, notes; and what is said of data that is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broadsight.data.dense.loading import DenseDataset
from broadsight.data.dense.resolve import held_out, mirrored, open_dense_part, resolve_dense
from broadsight.data.dense.transforms import DenseTransforms
from tests.refusals import refused

from ...training.dense_runs import write_coco

CATEGORIES = [dict(id=3, name="cat"), dict(id=7, name="dog")]
JOINTS = ["nose", "left_eye", "right_eye"]
PERSON = [dict(id=1, name="person", keypoints=JOINTS, skeleton=[[2, 1], [1, 3], [1, 9]])]
OUTLINE = [[1, 1, 6, 1, 6, 5, 1, 5]]


def box(number: int, image: int = 1, **changes) -> dict:
    """An annotation of a cat at 1 to 6, 1 to 5."""
    own = dict(id=number, image_id=image, category_id=3, bbox=[1, 1, 5, 4], segmentation=OUTLINE, area=20, iscrowd=0)
    return own | changes


def person(number: int, image: int = 1, **changes) -> dict:
    return box(number, image, category_id=1, keypoints=[2, 2, 2, 3, 2, 1, 0, 0, 0]) | changes


def write(folder: Path, annotations, count: int = 4, categories=CATEGORIES, name: str = "coco.json") -> Path:
    """A COCO file and its images of 8 x 6."""
    folder.mkdir(parents=True, exist_ok=True)
    images = [dict(id=n, file_name=f"{n}.png", width=8, height=6) for n in range(1, count + 1)]
    for image in images:
        Image.new("RGB", (8, 6), "red").save(folder / image["file_name"])
    content = dict(images=images, annotations=list(annotations), categories=categories)
    (folder / name).write_text(json.dumps(content))
    return folder / name


def paint(folder: Path, *names: str, values=(0, 1), classes: str = "sky sea") -> Path:
    """Images and masks that hold some values."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text(classes.replace(" ", "\n"))
    for name in names:
        mask = np.resize(np.array(values, np.uint8), (6, 8))
        for place, image in (("images", Image.new("RGB", (8, 6), "red")), ("masks", Image.fromarray(mask))):
            (folder / place / name).parent.mkdir(parents=True, exist_ok=True)
            image.save(folder / place / f"{name}.png")
    return folder


def names(view) -> list[str]:
    return [view.name(i) for i in range(len(view))]


def batch(view, task: str, *, training: bool = False, indices=None):
    """All images as training or evaluation would see them."""
    images = DenseDataset(view, DenseTransforms(task, 8).build(training), training=training)
    return images.__getitems__([(0, i, i) for i in (range(len(view)) if indices is None else indices)])


def test_hold_out__some_of_the_images_by_their_names_at_least_one_and_never_all(tmp_path):
    file = write(tmp_path, [box(n, n) for n in range(1, 41)], 40)
    one, same = resolve_dense(file, "detect"), resolve_dense(tmp_path, "detect")
    assert (len(one.train), len(one.val)) == (36, 4) and names(one.val) == names(same.val)
    assert sorted(names(one.train) + names(one.val)) == sorted(f"{n}.png" for n in range(1, 41))
    assert names(resolve_dense(file, "detect", seed=1).val) != names(one.val)
    assert len(resolve_dense(file, "detect", split=0.5).val) == 20
    assert any("4 of 40 images" in note and "held out" in note for note in one.notes)
    by_name = held_out([f"{n}.png" for n in range(1, 41)], 0.1, 0, "x")  # as old runs have it
    old = resolve_dense(file, "detect", method=1)
    assert names(old.val) == [f"{n}.png" for n in np.flatnonzero(by_name) + 1]
    assert any("held out as when the run began" in note for note in old.notes)
    about = one.description
    assert (about["kind"], about["counts"], about["objects"]) == ("coco", dict(train=36, val=4), dict(train=36, val=4))
    assert json.loads(json.dumps(about)) == about
    assert about["fingerprint"] == same.description["fingerprint"]
    write(tmp_path, [box(n, n) for n in range(1, 40)], 40)  # an object less
    assert resolve_dense(file, "detect").description["fingerprint"] != about["fingerprint"]
    assert [held_out("ab", share, 0, "x").sum() for share in (0.01, 0.99)] == [1, 1]
    assert held_out("abcdefghij", 0.99, 0, "x").sum() == 9
    refused("x has one image, which cannot be divided", held_out, "a", 0.5, 0, "x")
    assert held_out("abcdefghij", 0.3, 3, "").tolist() == held_out("jihgfedcba", 0.3, 3, "").tolist()[::-1]


def test_hold_out__every_class_that_can_validate_does_and_that_in_one_image_is_told(tmp_path):
    for number in range(20):
        paint(tmp_path / "masks of", f"{number:02d}", values=(0, 1) if number < 2 else (0,))
    rare = [box(n, n, category_id=7 if n in (5, 6) else 3) for n in range(1, 31)]
    file = write(tmp_path / "coco", rare, 30)
    for seed in range(5):
        pixels = resolve_dense(tmp_path / "masks of", "segment", seed=seed)
        found = [resolve_dense(file, task, seed=seed) for task in ("detect", "instances", "segment")]
        for splits in (pixels, *found):
            for view in (splits.train, splits.val):
                shown = {label for i in range(len(view)) for label in view.shown(i)}
                assert shown == {0, 1} if splits is pixels else shown - {0} == {1, 2}, seed
    assert not any("without" in note for note in pixels.notes)
    paint(tmp_path, "a", "b", "c")
    paint(tmp_path, "d", values=(0, 1, 2), classes="sky sea sun")
    splits = resolve_dense(tmp_path, "segment")
    assert "d.png" in names(splits.train)
    assert "classes in a single image keep it for training: sun" in splits.notes
    assert "classes without pixels to validate on: sun (of 3 classes)" in splits.notes
    paint(tmp_path, "a", "b", "c", values=(0,), classes="sky sea sun")
    words = "show sky alone, so mIoU and mAcc have no value"
    assert any(words in note for note in resolve_dense(tmp_path, "segment").notes)


def test_parts__of_the_data_itself_or_another_file_whose_classes_come_in_another_order(tmp_path):
    for key, count in (("train", 3), ("val", 2)):
        write(tmp_path / key, [box(1)], count)
    splits = resolve_dense(tmp_path, "detect")
    assert (len(splits.train), len(splits.val)) == (3, 2)
    words = r"split=0.5, but .*coco.json is set apart to validate; leave split out"
    refused(words, resolve_dense, tmp_path, "detect", split=0.5)
    other = write(tmp_path / "other", [box(1)], 1)
    splits = resolve_dense(tmp_path, "detect", val=other)
    assert len(splits.val) == 1 and any(note.startswith("not used: ") for note in splits.notes)
    assert names(resolve_dense(other, "detect", val=other).train) == names(splits.val) == ["1.png"]
    train = write(tmp_path / "a", [box(1), box(2, category_id=7)])
    other = [dict(id=1, name="dog"), dict(id=2, name="cat")]
    val = write(tmp_path / "b", [box(1, category_id=1), box(2, 2, category_id=2)], categories=other)
    splits = resolve_dense(train, "detect", val=val)
    assert splits.classes == splits.val.classes == ("cat", "dog")
    assert [splits.val.target(i)["labels"].tolist() for i in range(2)] == [[2], [1]]
    assert splits.train.category_ids == {1: 3, 2: 7} and splits.val.category_ids == {1: 2, 2: 1}
    assert splits.description["val"] == str(val) and splits.description["split"] is None
    pixels = resolve_dense(train, "segment", val=val)
    assert pixels.classes == ("background", "cat", "dog") and pixels.val.target(0).unique().tolist() == [0, 2]


def test_masks__parts_share_the_file_of_classes(tmp_path):
    paint(tmp_path, "train/a", "train/b", values=(0, 1, 255))
    paint(tmp_path, "val/a")
    (tmp_path / "classes.txt").unlink()
    (tmp_path / "classes.yaml").write_text("[sky, sea]")
    splits = resolve_dense(tmp_path, "segment")
    assert (splits.classes, len(splits.train), len(splits.val)) == (("sky", "sea"), 2, 1)
    assert splits.train.target(0).unique().tolist() == [0, 1, 255] and splits.val.target(0).unique().tolist() == [0, 1]
    assert splits.description["kind"] == "masks" and splits.keypoint_names == ()
    (tmp_path / "masks" / "val" / "classes.txt").write_text("sea\nsky\n")
    assert resolve_dense(tmp_path, "segment").val.target(0)[0].tolist() == [1, 0] * 4
    (tmp_path / "masks" / "val" / "classes.txt").write_text("sea\nlake\n")
    refused(r"has classes that .* has not: lake", resolve_dense, tmp_path, "segment")
    folder = paint(tmp_path / "unknown", "a", "b")
    paint(folder, "c", values=(0, 9))  # refused when read
    splits = resolve_dense(folder, "segment", val=folder)
    for training in (False, True):
        failure = batch(splits.train, "segment", training=training).failure
        assert "c.png holds 9, which is none of the 2 classes or 255 to ignore" in failure and "\n" not in failure


@pytest.mark.parametrize("task", ["detect", "instances", "keypoints", "segment"])
def test_scenes(task):
    splits = resolve_dense("scenes:12", task, scenes_size=(24, 32), channels=1)
    assert (len(splits.train), len(splits.val)) == (12, 3)
    assert splits.description["size"] == [24, 32]
    image, target = splits.val[0]
    assert (image.mode, image.size) == ("L", (32, 24))
    assert names(splits.train)[0] == "scenes/train/000000" and names(splits.val)[0] == "scenes/val/000000"
    if task == "segment":
        assert target.shape == (24, 32) and splits.classes[0] == "background"
    else:
        extra = {"instances": {"masks"}, "keypoints": {"keypoints"}}.get(task, set())
        assert target.keys() == {"boxes", "labels", "iscrowd", "area", "image_id"} | extra
        assert splits.classes[0] != "background" and len(splits.train.category_ids) == len(splits.classes)
    assert (splits.flip_pairs, splits.keypoint_offset) == (((4, 5),) if task == "keypoints" else (), 0.0)
    assert len(resolve_dense(None, task, scenes_count=8).train) == 8


def test_keypoints__names_pairs_and_bones(tmp_path):
    file = write(tmp_path, [person(n, n) for n in (1, 2, 3)], categories=PERSON)
    splits = resolve_dense(file, "keypoints")
    assert (splits.keypoint_names, splits.flip_pairs, splits.keypoint_offset) == (tuple(JOINTS), ((1, 2),), 0.5)
    assert splits.skeleton == ((1, 0), (0, 2))  # from 0; the third leads nowhere
    row = splits.train.target(next(i for i, name in enumerate(names(splits.train)) if name != "4.png"))
    assert row["keypoints"].tolist() == [[[2.5, 2.5, 2], [3.5, 2.5, 1], [0, 0, 0]]]
    boxes = resolve_dense(file, "detect")
    assert (boxes.keypoint_names, boxes.flip_pairs, boxes.skeleton) == ((), (), ())
    assert mirrored(("nose", "left_eye", "Right_Eye", "hand left", "hand right", "left_ear")) == ((1, 2), (3, 4))


def test_annotations__of_no_area_and_images_damaged_of_another_size_or_missing(tmp_path):
    boxes = ([-3, 1, 5, 4], [1, 1, 0, 4], [20, 1, 5, 4], [6, 4, 9, 9])
    items = [box(number, bbox=corners) for number, corners in enumerate(boxes, 1)]
    splits = resolve_dense(write(tmp_path, items, 1), "detect", val=tmp_path)
    assert splits.notes[:2] == (
        "coco.json: boxes that reached out of their image clipped to it: 2 (first: annotation 1)",
        "coco.json: annotations of no area inside of their image dropped: 2 (first: annotation 2)",
    )
    for training in (False, True):
        boxes = batch(splits.train, "detect", training=training).targets[0]["boxes"]
        assert len(boxes) == 2 and (boxes[:, 2:] > boxes[:, :2]).all() and boxes.min() >= 0
    splits = resolve_dense(write(tmp_path, [box(n, n) for n in (1, 2, 3, 4)]), "detect", val=tmp_path)
    (tmp_path / "2.png").write_bytes(b"no image")
    judged, learned = batch(splits.val, "detect"), batch(splits.train, "detect", training=True, indices=[1])
    assert [key[2] for key in judged.keys] == [0, 2, 3] and judged.skipped[0][0] == "2.png"
    assert [key[2] for key in learned.keys] == [2]
    Image.new("RGB", (9, 6)).save(tmp_path / "4.png")
    assert "4.png has 9x6 pixels but coco.json says 8x6" in batch(splits.val, "detect").failure
    (tmp_path / "3.png").unlink()
    words = r"3.png, image 3 of coco.json, is missing \(1 of 4 are\)"
    refused(words, resolve_dense, tmp_path, "detect", error=FileNotFoundError)


def test_images__with_crowds_without_objects_or_a_labelled_person_stay(tmp_path):
    crowd = box(2, iscrowd=1, segmentation=dict(size=[6, 8], counts=[24, 24]), bbox=[4, 0, 4, 6])
    file = write(tmp_path, [box(1), crowd], 1)
    for task in ("detect", "instances"):
        splits = resolve_dense(file, task, val=file)
        assert batch(splits.val, task).targets[0]["iscrowd"].tolist() == [0, 1]
        assert batch(splits.train, task, training=True).targets[0]["iscrowd"].tolist() == [0]
    pixels = resolve_dense(file, "segment", val=file)
    assert batch(pixels.val, "segment").targets[0][2].tolist() == [0, 1, 1, 1, 1, 1, 255, 255]
    file = write(tmp_path / "a", [person(1), person(2, 2, keypoints=[0] * 9)], 3, PERSON)
    people = resolve_dense(file, "keypoints", val=file).train
    assert [len(people.target(i)["labels"]) for i in range(len(people))] == [1, 1, 0]
    splits = resolve_dense(write(tmp_path, [box(1)], 3), "instances", val=tmp_path)
    assert "images without objects to train on: 2 of 3" in splits.notes
    assert "classes without objects to train on: dog (of 2 classes)" in splits.notes
    for training in (False, True):
        seen = batch(splits.train, "instances", training=training)
        assert [len(target["boxes"]) for target in seen.targets] == [1, 0, 0]
        assert seen.targets[1]["masks"].shape == (0, *seen.images[1].shape[1:])


def coco_of(*annotations, count: int = 4, categories=CATEGORIES):
    return lambda folder: write(folder, annotations, count, categories)


def masks(*names: str, **options):
    return lambda folder: paint(folder, *names, **options)


CROWD = box(1, iscrowd=1, segmentation=dict(size=[6, 8], counts=[0, 48]))
BLIND = coco_of(person(2, 2, keypoints=[0] * 9), categories=PERSON)
TRAIN, PEOPLE = coco_of(*(box(n, n) for n in (1, 2, 3))), coco_of(person(1), person(2, 2), categories=PERSON)
NOSES = coco_of(person(1, keypoints=[2, 2, 2]), categories=[PERSON[0] | dict(keypoints=["nose"])])
COWS = coco_of(categories=[dict(id=1, name="cow"), dict(id=2, name="cat")])
TWICE, ONCE = (coco_of(box(1), categories=[dict(id=id, name="cat") for id in ids]) for ids in ((3, 4), (3,)))
NOTHING = "val/coco.json has no objects to validate on; expected annotations"


@pytest.mark.parametrize(
    ("task", "words", "make", "make_val"),
    [
        ("detect", "a/coco.json has one image, which cannot be divided; give", coco_of(box(1), count=1), None),
        ("detect", "too few labelled images to hold some out.*give the images", coco_of(box(1)), None),
        ("detect", "a/coco.json has no objects to train on", coco_of(), None),
        *((task, NOTHING, TRAIN, coco_of()) for task in ("detect", "instances", "segment")),
        *((task, NOTHING, TRAIN, coco_of(CROWD)) for task in ("detect", "instances")),
        ("instances", "coco.json: annotation 5: ", coco_of(box(1), box(5, category_id=4)), None),
        ("keypoints", "no labelled keypoint to train on; every visibility is 0", BLIND, None),
        ("keypoints", "no labelled keypoint to validate on; every visibility is 0", PEOPLE, BLIND),
        ("keypoints", "val/.* has keypoints nose but .* nose, left_eye, right_eye; both need", PEOPLE, NOSES),
        ("detect", "val/coco.json has classes that .*a/coco.json has not: cow; add them there", TRAIN, COWS),
        ("detect", "a/coco.json has two classes called 'cat'", TWICE, ONCE),
        ("segment", "no pixels of any class to train on; every pixel is ignored", masks("a", "b", values=(255,)), None),
        ("segment", "no pixels of any class to validate on", masks("a", "b"), masks("a", values=(255,))),
        ("segment", "one class only, 'sky'; segmentation", masks("a", "b", values=(0,), classes="sky"), None),
        ("segment", "has 256 classes; segment takes 255", masks("a", classes=" ".join(map(str, range(256)))), None),
    ],
)
def test_data__refused_in_one_line(tmp_path, task, words, make, make_val):
    refused(words, resolve_dense, make(tmp_path / "a"), task, val=make_val and make_val(tmp_path / "val"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(task="classify"), "unknown task 'classify'; .*one of detect, instances, segment, keypoints"),
        (dict(split=1.5), "split=1.5 is not between 0 and 1"),
        (dict(data="scenes", split=0.5), "scenes validate on scenes of their own"),
        (dict(data="scenes:2"), "2 scenes are too few"),
        (dict(), r"has a part to validate, .*coco.json, but none to train on; add train/"),
    ],
)
def test_options__refused_in_one_line(tmp_path, options, message):
    write(tmp_path / "val", [box(1)])
    refused(message, resolve_dense, **{"data": tmp_path, "task": "detect", **options})


MODEL = dict(classes=("blue", "green", "red"), category_ids={1: 1, 2: 3, 3: 7})


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"), count=10)


def test_part__classes_are_numbered_as_the_models_and_held_out_as_training_does(coco):
    part = open_dense_part(str(coco), "detect", **MODEL)
    assert part.images.classes == MODEL["classes"] and len(part.images) == 10
    assert [part.images.target(i)["labels"].tolist() for i in range(3)] == [[2], [3], [2]]  # green, red, green
    assert part.images.category_ids == {1: 1, 2: 3, 3: 7}
    assert (part.description["part"], part.description["kind"]) == ("all", "coco")
    parts = [open_dense_part(str(coco), "detect", key, split=0.3, seed=2, **MODEL) for key in ("val", "train")]
    held, rest = (set(names(one.images)) for one in parts)
    assert (len(held), len(rest), len(held | rest)) == (3, 7, 10)
    for task, key, part in (("segment", "auto", "val"), ("detect", "test", "test")):
        found = open_dense_part("scenes:40", task, key, classes=(), category_ids={})
        assert (len(found.images), found.description["part"]) == (10, part)
        assert found.images.name(0) == f"scenes/{part}/000000"


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
