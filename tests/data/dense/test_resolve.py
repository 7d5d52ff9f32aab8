"""What DATA becomes for dense tasks: parts, classes, notes; and what is said of data that is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
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


def paint(folder: Path, *names: str, values=(0, 1)) -> None:
    """Images and masks that hold some values."""
    for name in names:
        mask = np.resize(np.array(values, np.uint8), (6, 8))
        for place, image in (("images", Image.new("RGB", (8, 6), "red")), ("masks", Image.fromarray(mask))):
            (folder / place / name).parent.mkdir(parents=True, exist_ok=True)
            image.save(folder / place / f"{name}.png")


def names(view) -> list[str]:
    return [view.name(i) for i in range(len(view))]


def batch(view, task: str, *, training: bool = False, indices=None):
    """All images as training or evaluation would see them."""
    images = DenseDataset(view, DenseTransforms(task, 8).build(training), training=training)
    return images.__getitems__([(0, i, i) for i in (range(len(view)) if indices is None else indices)])


def test_hold_out__some_of_the_images_by_their_names(tmp_path):
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


def test_hold_out__at_least_one_and_never_all():
    assert [held_out("ab", share, 0, "x").sum() for share in (0.01, 0.99)] == [1, 1]
    assert held_out("abcdefghij", 0.99, 0, "x").sum() == 9
    refused("x has one image, which cannot be divided", held_out, "a", 0.5, 0, "x")
    assert held_out("abcdefghij", 0.3, 3, "").tolist() == held_out("jihgfedcba", 0.3, 3, "").tolist()[::-1]


def test_hold_out__every_class_that_can_validate_does(tmp_path):
    for number in range(20):
        paint(tmp_path / "masks of", f"{number:02d}", values=(0, 1) if number < 2 else (0,))
    (tmp_path / "masks of" / "classes.txt").write_text("sky\nsea\n")
    rare = [box(n, n, category_id=7 if n in (5, 6) else 3) for n in range(1, 31)]
    file = write(tmp_path / "coco", rare, 30)
    for seed in range(5):
        pixels = resolve_dense(tmp_path / "masks of", "segment", seed=seed)
        assert {label for view in (pixels.val,) for i in range(len(view)) for label in view.shown(i)} == {0, 1}
        assert {label for i in range(len(pixels.train)) for label in pixels.train.shown(i)} == {0, 1}
        for task in ("detect", "instances", "segment"):
            splits = resolve_dense(file, task, seed=seed)
            for view in (splits.train, splits.val):
                assert {label for i in range(len(view)) for label in view.shown(i)} - {0} == {1, 2}, (task, seed)
    assert not any("without" in note for note in pixels.notes)


def test_hold_out__a_class_in_one_image_is_told(tmp_path):
    paint(tmp_path, "a", "b", "c")
    paint(tmp_path, "d", values=(0, 1, 2))
    (tmp_path / "classes.txt").write_text("sky\nsea\nsun\n")
    splits = resolve_dense(tmp_path, "segment")
    assert "d.png" in names(splits.train)
    assert "classes in a single image keep it for training: sun" in splits.notes
    assert "classes without pixels to validate on: sun (of 3 classes)" in splits.notes
    paint(tmp_path, "a", "b", "c", values=(0,))
    words = "show sky alone, so mIoU and mAcc have no value"
    assert any(words in note for note in resolve_dense(tmp_path, "segment").notes)


@pytest.mark.parametrize("task", ["detect", "instances", "segment"])
def test_val__without_any_label_is_refused(tmp_path, task):
    train = write(tmp_path / "a", [box(n, n) for n in (1, 2, 3)])
    for number, labels in enumerate(([], [box(1, iscrowd=1, segmentation=dict(size=[6, 8], counts=[0, 48]))])):
        if labels and task == "segment":
            continue
        val = write(tmp_path / f"val{number}", labels)
        words = r"val\d/coco.json has no objects to validate on; expected annotations"
        refused(words, resolve_dense, train, task, val=val)


def test_val__nothing_to_hold_out_is_refused(tmp_path):
    single = write(tmp_path / "a", [box(1)], 1)
    splits = resolve_dense(single, "detect", val=single)
    assert names(splits.train) == names(splits.val) == ["1.png"]
    refused(r"coco.json has one image, which cannot be divided; give the images", resolve_dense, single, "detect")
    file = write(tmp_path, [box(1)])
    refused(r"too few labelled images to hold some out.*give the images", resolve_dense, file, "detect")
    people = write(tmp_path / "b", [person(1), person(2, 2)], categories=PERSON)
    blind = write(tmp_path / "c", [person(1, keypoints=[0] * 9)], categories=PERSON)
    words = "has no labelled keypoint to validate on; every visibility is 0"
    refused(words, resolve_dense, people, "keypoints", val=blind)


def test_masks__all_ignored_or_one_class_are_refused(tmp_path):
    paint(tmp_path / "a", "a", "b", values=(255,))
    (tmp_path / "a" / "classes.txt").write_text("sky\nsea\n")
    words = "masks has no pixels of any class to train on; every pixel is ignored"
    refused(words, resolve_dense, tmp_path / "a", "segment")
    paint(tmp_path / "b", "train/a", "train/b")
    paint(tmp_path / "b", "val/a", values=(255,))
    (tmp_path / "b" / "classes.txt").write_text("sky\nsea\n")
    refused("val has no pixels of any class to validate on", resolve_dense, tmp_path / "b", "segment")
    paint(tmp_path / "c", "a", "b", values=(0,))
    (tmp_path / "c" / "classes.txt").write_text("sky\n")
    refused("has one class only, 'sky'; segmentation needs two", resolve_dense, tmp_path / "c", "segment")
    (tmp_path / "c" / "classes.txt").write_text("\n".join(f"c{n}" for n in range(256)))
    refused("has 256 classes; segment takes 255", resolve_dense, tmp_path / "c", "segment")


def test_val__another_file_whose_classes_come_in_another_order(tmp_path):
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


def test_val__unknown_classes_are_refused(tmp_path):
    train = write(tmp_path / "a", [box(1)])
    val = write(tmp_path / "b", [], categories=[dict(id=1, name="cow"), dict(id=2, name="cat")])
    words = r"b/coco.json has classes that .*a/coco.json has not: cow; add them there"
    refused(words, resolve_dense, train, "detect", val=val)
    twice = write(tmp_path / "c", [box(1)], categories=[dict(id=3, name="cat"), dict(id=4, name="cat")])
    alone = write(tmp_path / "d", [box(1)], categories=[dict(id=3, name="cat")])
    refused(r"c/coco.json has two classes called 'cat'", resolve_dense, twice, "detect", val=alone)
    assert len(resolve_dense(twice, "detect", val=twice).classes) == 2


def test_parts__of_the_data_itself(tmp_path):
    write(tmp_path / "val", [box(1)], 2)
    refused(r"has a part to validate, .*coco.json, but none to train on; add train/", resolve_dense, tmp_path, "detect")
    write(tmp_path / "train", [box(1)], 3)
    splits = resolve_dense(tmp_path, "detect")
    assert (len(splits.train), len(splits.val)) == (3, 2)
    words = r"split=0.5, but .*coco.json is set apart to validate; leave split out"
    refused(words, resolve_dense, tmp_path, "detect", split=0.5)
    other = write(tmp_path / "other", [box(1)], 1)
    splits = resolve_dense(tmp_path, "detect", val=other)
    assert len(splits.val) == 1 and any(note.startswith("not used: ") for note in splits.notes)


def test_masks__parts_share_the_file_of_classes(tmp_path):
    paint(tmp_path, "train/a", "train/b", values=(0, 1, 255))
    paint(tmp_path, "val/a")
    (tmp_path / "classes.yaml").write_text("[sky, sea]")
    splits = resolve_dense(tmp_path, "segment")
    assert (splits.classes, len(splits.train), len(splits.val)) == (("sky", "sea"), 2, 1)
    assert splits.train.target(0).unique().tolist() == [0, 1, 255] and splits.val.target(0).unique().tolist() == [0, 1]
    assert splits.description["kind"] == "masks" and splits.keypoint_names == ()
    (tmp_path / "masks" / "val" / "classes.txt").write_text("sea\nsky\n")
    assert resolve_dense(tmp_path, "segment").val.target(0)[0].tolist() == [1, 0] * 4
    (tmp_path / "masks" / "val" / "classes.txt").write_text("sea\nlake\n")
    refused(r"has classes that .* has not: lake", resolve_dense, tmp_path, "segment")


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
    assert splits.keypoint_names == tuple(JOINTS)
    assert splits.flip_pairs == ((1, 2),)
    assert splits.skeleton == ((1, 0), (0, 2))  # from 0; the third leads nowhere
    assert splits.keypoint_offset == 0.5
    rows = {splits.train.name(i): splits.train.target(i) for i in range(len(splits.train))}
    row = next(row["keypoints"] for name, row in rows.items() if name != "4.png")
    assert row.tolist() == [[[2.5, 2.5, 2], [3.5, 2.5, 1], [0, 0, 0]]]
    boxes = resolve_dense(file, "detect")
    assert (boxes.keypoint_names, boxes.flip_pairs, boxes.skeleton) == ((), (), ())
    assert mirrored(("nose", "left_eye", "Right_Eye", "hand left", "hand right", "left_ear")) == ((1, 2), (3, 4))


def test_keypoints__images_without_a_labelled_person_stay(tmp_path):
    nobody = person(2, 2, keypoints=[0] * 9)
    file = write(tmp_path, [person(1), nobody], 3, PERSON)
    splits = resolve_dense(file, "keypoints", val=file)
    assert len(splits.train) == 3 and [len(splits.train.target(i)["labels"]) for i in range(3)] == [1, 1, 0]
    words = "has no labelled keypoint to train on; every visibility is 0"
    refused(words, resolve_dense, write(tmp_path / "b", [nobody], 3, PERSON), "keypoints")
    words = r"coco.json has no list of keypoints in its categories"
    refused(words, resolve_dense, write(tmp_path / "c", [box(1)]), "keypoints")
    others = [PERSON[0] | dict(keypoints=["nose"])]
    val = write(tmp_path / "d", [person(1, keypoints=[2, 2, 2])], categories=others)
    words = r"d/coco.json has keypoints nose but .* nose, left_eye, right_eye; both need"
    refused(words, resolve_dense, file, "keypoints", val=val)


def test_boxes__outside_and_of_no_area(tmp_path):
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


def test_annotations__that_cannot_be_meant_are_refused_by_their_id(tmp_path):
    """As CocoDataset says of the file, which has tests of each mistake."""
    for number, item in enumerate((box(5, category_id=4), box(5, segmentation=dict(size=[6, 9], counts=[54])))):
        refused(r"coco.json: annotation 5: ", resolve_dense, write(tmp_path / str(number), [box(1), item]), "instances")
    file = write(tmp_path, [box(1, segmentation=None)])
    refused(r"coco.json has no masks, only boxes", resolve_dense, file, "instances")
    assert len(resolve_dense(file, "detect", val=file).train) == 4


def test_images__missing(tmp_path):
    file = write(tmp_path, [box(1)])
    (tmp_path / "3.png").unlink()
    words = r"3.png, image 3 of coco.json, is missing \(1 of 4 are\)"
    refused(words, resolve_dense, file, "detect", error=FileNotFoundError)


def test_images__damaged_or_of_another_size(tmp_path):
    splits = resolve_dense(write(tmp_path, [box(n, n) for n in (1, 2, 3, 4)]), "detect", val=tmp_path)
    (tmp_path / "2.png").write_bytes(b"no image")
    judged, learned = batch(splits.val, "detect"), batch(splits.train, "detect", training=True, indices=[1])
    assert [key[2] for key in judged.keys] == [0, 2, 3] and judged.skipped[0][0] == "2.png"
    assert [key[2] for key in learned.keys] == [2]
    Image.new("RGB", (9, 6)).save(tmp_path / "4.png")
    assert "4.png has 9x6 pixels but coco.json says 8x6" in batch(splits.val, "detect").failure


@pytest.mark.parametrize("kind", ["polygon", "runs", "compressed"])
def test_masks__polygons_and_run_lengths(tmp_path, kind):
    runs = dict(size=[6, 8], counts=[7, 4, 2, 4, 2, 4, 2, 4, 2, 4, 13])
    if kind == "compressed":
        mask = pytest.importorskip("pycocotools.mask")
        runs = mask.frPyObjects(runs, 6, 8)
        runs["counts"] = runs["counts"].decode()
    item = box(1) if kind == "polygon" else box(1, segmentation=runs)
    expected = torch.zeros(6, 8)
    expected[1:5, 1:6] = 1
    file = write(tmp_path, [item], 1)
    splits = resolve_dense(file, "instances", val=file)
    assert torch.equal(batch(splits.train, "instances").targets[0]["masks"][0].float(), expected)
    pixels = resolve_dense(file, "segment", val=file)
    assert torch.equal(batch(pixels.train, "segment").targets[0].float(), expected)
    assert any("pixels have the class of the last object there" in note for note in pixels.notes)


def test_crowds__are_judged_but_not_learned(tmp_path):
    crowd = box(2, iscrowd=1, segmentation=dict(size=[6, 8], counts=[24, 24]), bbox=[4, 0, 4, 6])
    file = write(tmp_path, [box(1), crowd], 1)
    for task in ("detect", "instances"):
        splits = resolve_dense(file, task, val=file)
        assert batch(splits.val, task).targets[0]["iscrowd"].tolist() == [0, 1]
        assert batch(splits.train, task, training=True).targets[0]["iscrowd"].tolist() == [0]
    pixels = resolve_dense(file, "segment", val=file)
    assert batch(pixels.val, "segment").targets[0][2].tolist() == [0, 1, 1, 1, 1, 1, 255, 255]


def test_images__without_objects_stay(tmp_path):
    splits = resolve_dense(write(tmp_path, [box(1)], 3), "instances", val=tmp_path)
    assert "images without objects to train on: 2 of 3" in splits.notes
    assert "classes without objects to train on: dog (of 2 classes)" in splits.notes
    for training in (False, True):
        seen = batch(splits.train, "instances", training=training)
        assert [len(target["boxes"]) for target in seen.targets] == [1, 0, 0]
        assert seen.targets[1]["masks"].shape == (0, *seen.images[1].shape[1:])
    refused(r"coco.json has no objects to train on", resolve_dense, write(tmp_path / "b", []), "detect")


def test_masks__with_unknown_values_are_refused_when_read(tmp_path):
    paint(tmp_path, "a", "b")
    paint(tmp_path, "c", values=(0, 9))
    (tmp_path / "classes.txt").write_text("sky\nsea\n")
    splits = resolve_dense(tmp_path, "segment", val=tmp_path)
    for training in (False, True):
        failure = batch(splits.train, "segment", training=training).failure
        assert "c.png holds 9, which is none of the 2 classes or 255 to ignore" in failure and "\n" not in failure


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(task="classify"), "task='classify' is not known; choose one of detect, instances, segment, keypoints"),
        (dict(split=1.5), "split=1.5 is not between 0 and 1"),
        (dict(split=0.5, val="x"), "split=0.5 and val=x are two ways to validate"),
        (dict(channels=4), "channels=4 is neither 1"),
        (dict(data="scenes", split=0.5), "scenes validate on scenes of their own"),
        (dict(data="scenes:2"), "2 scenes are too few"),
        (dict(data="scenes:few"), "'few' is not a count"),
    ],
)
def test_options__refused_in_one_line(tmp_path, options, message):
    write(tmp_path, [box(1)])
    refused(message, resolve_dense, **{"data": tmp_path, "task": "detect", **options})


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
