"""COCO files: what targets hold, computed by hand, and what is said of files that are wrong."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2

from broadsight.data.decoding import UnreadableImage
from broadsight.data.sources.coco import CocoDataset
from tests.refusals import refused

from ..reading import shared

CATEGORIES = [dict(id=7, name="dog"), dict(id=3, name="cat"), dict(id=90, name="brush")]
BOX = dict(id=1, image_id=10, category_id=3, bbox=[1, 2, 3, 4])


def annotation(**changes) -> dict:
    return {**BOX, "segmentation": [[1, 2, 4, 2, 4, 6, 1, 6]], "area": 12, "iscrowd": 0, **changes}


@pytest.fixture
def write(tmp_path):
    """Writes a COCO file beside images of 8x6 (width x height) that are all there, and returns its path."""

    def write(annotations=(), images=None, categories=CATEGORIES, **changes) -> Path:
        images = [dict(id=10, file_name="a.png", width=8, height=6)] if images is None else images
        for image in images:
            if "file_name" in image:
                Image.new("RGB", (8, 6), (200, 10, 10)).save(tmp_path / image["file_name"])
        content = dict(images=images, annotations=list(annotations), categories=categories, **changes)
        (tmp_path / "coco.json").write_text(json.dumps(content))
        return tmp_path / "coco.json"

    return write


def test_target__by_hand(write):
    crowd = dict(size=[6, 8], counts=[6, 6, 36])
    second = annotation(id=2, bbox=[1, 0, 1, 6], category_id=3, segmentation=crowd, iscrowd=1, area=6.5, ignore=1)
    data = CocoDataset(write([annotation(category_id=90, ignore=0), second]))
    told = (
        "crowds, which nothing is learned from: 1 (first: annotation 2)",
        'annotations marked "ignore", which COCO does not know, taken as any other: 1 (first: annotation 2)',
    )
    assert (len(data), data.name(0), data.notes) == (1, "a.png", told)
    assert data.classes == ("cat", "dog", "brush") and data.category_ids == {1: 3, 2: 7, 3: 90}
    image, target = data[0]
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (8, 6), (200, 10, 10))
    assert target.keys() == {"boxes", "labelled_boxes", "labels", "iscrowd", "area", "image_id", "masks"}
    assert target["boxes"].tolist() == [[1, 2, 4, 6], [1, 0, 2, 6]] and target["boxes"].canvas_size == (6, 8)
    assert target["boxes"].format is tv_tensors.BoundingBoxFormat.XYXY and target["image_id"] == 10
    numbers = dict(labels=([3, 1], torch.int64), iscrowd=([0, 1], torch.int64), area=([12, 6.5], torch.float32))
    assert {key: (target[key].tolist(), target[key].dtype) for key in numbers} == numbers
    assert isinstance(target["masks"], tv_tensors.Mask) and target["masks"].dtype == torch.uint8
    expected = torch.zeros(2, 6, 8, dtype=torch.uint8)
    expected[0, 2:6, 1:4] = 1
    expected[1, :, 1] = 1
    assert torch.equal(target["masks"], expected)


def test_target__objects_go_to_their_image_in_the_order_of_the_file(write):
    images = [dict(id=key, file_name=f"{key}.png", width=8, height=6) for key in (5, 2, 9)]
    items = [annotation(id=n, image_id=key, bbox=[n, 0, 1, 1]) for n, key in enumerate((9, 5, 9, 5, 9))]
    data = CocoDataset(write(items, images), masks=False)
    assert [data.name(i) for i in range(3)] == ["5.png", "2.png", "9.png"]
    assert [data.target(i)["boxes"][:, 0].tolist() for i in range(3)] == [[1, 3], [], [0, 2, 4]]
    assert data.target(-1)["image_id"] == 9
    assert [target["image_id"] for _, target in data] == [5, 2, 9]  # iteration ends


def test_target__keypoints_or_empty_shapes_without_objects(write):
    categories = [dict(id=1, name="person", keypoints=["nose", "tail"]), dict(id=2, name="stone")]
    target = CocoDataset(write([], categories=categories), keypoints=True).target(0)
    shapes = {key: tuple(value.shape) for key, value in target.items() if key != "image_id"}
    lists = dict(boxes=(0, 4), labelled_boxes=(0, 4), labels=(0,), iscrowd=(0,), area=(0,))
    assert shapes == lists | dict(masks=(0, 6, 8), keypoints=(0, 2, 3))
    assert (target["boxes"].dtype, target["labels"].dtype) == (torch.float32, torch.int64)
    items = [
        annotation(id=1, category_id=1, keypoints=[1, 2, 2, 0, 0, 0]),
        annotation(id=2, category_id=2),
        annotation(id=3, category_id=1, keypoints=[3.5, 4.5, 1, 7, 5, 2]),
    ]
    file = write(items, categories=categories)
    data = CocoDataset(file, masks=False, keypoints=True)
    assert data.keypoint_names == ("nose", "tail")
    expected = [[[1, 2, 2], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[3.5, 4.5, 1], [7, 5, 2]]]
    assert data.target(0)["keypoints"].tolist() == expected
    assert "keypoints" not in CocoDataset(file).target(0) and "masks" not in data.target(0)


def test_boxes__outside_are_clipped_and_those_of_no_area_dropped(write):
    boxes = [[-3, -2, 5, 4], [6, 4, 9, 9], [1, 1, 0, 3], [9, 1, 3, 3], [5, 1, -2, 3]]
    boxes += [[7, 1, 1e-9, 3], [0, 0, 8.4, 6]]  # none in single precision; rounding, not worth a note
    data = CocoDataset(write(annotation(id=number, bbox=box) for number, box in enumerate(boxes, 1)))
    target = data.target(0)
    assert target["boxes"].tolist() == [[0, 0, 2, 2], [6, 4, 8, 6], [0, 0, 8, 6]]
    assert len(target["masks"]) == len(target["labels"]) == 3
    assert CocoDataset(write([BOX, annotation(area=0)]), masks=False).target(0)["area"].tolist() == [12, 12]
    assert data.notes == (
        "boxes that reached out of their image clipped to it: 2 (first: annotation 1)",
        "annotations of no area inside of their image dropped: 4 (first: annotation 3)",
    )


def test_masks__missing_ones(write):
    items = [annotation(id=1), annotation(id=2, segmentation=[]), {**BOX, "id": 3}]
    data = CocoDataset(write(items))
    assert data.notes == ("annotations without a mask dropped: 2 (first: annotation 2)",)
    assert [len(one.target(0)["boxes"]) for one in (data, CocoDataset(write(items), masks=False))] == [1, 3]
    refused(r"has no masks, only boxes; open it with masks=False", CocoDataset, write([BOX]))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (annotation(id=5, category_id=4), "annotation 5: category_id 4 is the id of no category"),
        (annotation(id=5, category_id="3"), "annotation 5: category_id 3 is the id of no category"),
        (annotation(id=5, image_id=11), "annotation 5: image_id 11 is the id of no image"),
        (annotation(id=5, image_id=[1]), r"annotation 5: image_id \[1\] is the id of no image"),
        (dict(id=5, image_id=10, category_id=3), 'annotation 5 has no "bbox"'),
        (dict(image_id=10, category_id=3), 'annotation number 1 has no "bbox"'),
        (annotation(id=5, bbox=[1, 2, 3]), r"annotation 5: bbox is \[1, 2, 3\]; expected \[x, y, width, height\]"),
        (annotation(id=5, bbox=[1, 2, float("nan"), 3]), "annotation 5: bbox is .*nan"),
        (annotation(id=5, bbox=None), "annotation 5: "),
        (annotation(id=5, bbox=["a"] * 4), "annotation 5: "),
        (annotation(id=5, segmentation=dict(size=[8, 6], counts=[48])), r"annotation 5: mask has size \[8, 6\]"),
        ("text", "annotation number 1 is text; expected a dict"),
    ],
)
def test_annotation__error_names_the_file_and_it(write, item, message):
    refused(rf"coco\.json: {message}", CocoDataset, write([item]))


def test_keypoints__errors(write):
    people, birds = (dict(id=3, name="a", keypoints=["nose", "tail"]), dict(id=4, name="bird", keypoints=["beak"]))
    for words, kinds in (
        ("annotation 1: keypoints are 3 numbers; expected .* of 2 keypoints", [people]),
        ("no list of keypoints in its categories", CATEGORIES),
        ("different lists of keypoints", [people, birds]),
    ):
        refused(words, CocoDataset, write([annotation(keypoints=[1, 2, 2])], categories=kinds), keypoints=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(categories=[]), "has 0 categories"),
        (dict(categories=[dict(id=1, name="a"), dict(id=1, name="b")]), "has 2 categories of 1 different ids"),
        (dict(categories=[dict(id="1", name="a")]), 'a category has no "id"'),
        (dict(categories=[dict(id=1)]), 'a category has no "id" .* or no "name"'),
        (dict(categories=["cat"]), "a category has no"),
        (dict(images=[]), "lists no images"),
        (dict(images=[dict(id=1)]), 'image 0 has no "id" or no "file_name"'),
        (dict(images=[dict(id=1, file_name="a.png", width=0, height=6)]), r"image 1 has height, width = \(6, 0\)"),
        (dict(images=[dict(id=1, file_name=f"{n}.png", width=8, height=6) for n in "ab"]), "two images of id 1"),
    ],
)
def test_file__errors(write, changes, message):
    refused(message, CocoDataset, write(**changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is not JSON"),
        ("", "is not JSON"),
        ("\xff\xfe\x00", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", 'no list "images"'),
        ('{"images": [], "categories": []}', 'has no list "annotations"; expected a COCO file'),
        ('{"images": [], "annotations": {}, "categories": []}', 'has no list "annotations"'),
    ],
)
def test_file__not_coco(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text, "latin-1")
    refused(rf"x\.json {message}|x\.json has {message}", CocoDataset, tmp_path / "x.json")
    refused(r"y\.json is not a file", CocoDataset, tmp_path / "y.json", error=FileNotFoundError)


def test_images__missing_ones_are_named_on_construction(write, tmp_path):
    file = write(images=[dict(id=key, file_name=f"{key}.png", width=8, height=6) for key in (1, 2, 3)])
    (tmp_path / "2.png").unlink()
    refused(r"2\.png, image 2 of coco\.json, is missing \(1 of 3 are\)", CocoDataset, file, error=FileNotFoundError)
    (tmp_path / "elsewhere").mkdir()
    words = r"elsewhere.1\.png, image 1 of coco\.json, is missing \(3 of 3 are\)"
    refused(words, CocoDataset, file, tmp_path / "elsewhere", error=FileNotFoundError)


def test_images__in_subfolders_and_grey_or_as_coco_lays_them_out(write, tmp_path):
    for folder in ("train", "annotations", "val2017"):
        (tmp_path / folder).mkdir()
    file = write(images=[dict(id=1, file_name="train/a.png", width=8, height=6)])
    for channels, mode in ((3, "RGB"), (1, "L")):
        image = CocoDataset(file, channels=channels).open(0)
        assert (image.mode, image.size) == (mode, (8, 6))
    file = write([annotation()]).rename(tmp_path / "annotations" / "instances_val2017.json")
    (tmp_path / "a.png").rename(tmp_path / "val2017" / "a.png")
    assert CocoDataset(file).images == tmp_path / "val2017"


def test_images__damaged_or_of_another_size_or_of_none(write, tmp_path):
    file = write([annotation()])
    Image.new("RGB", (16, 12)).save(tmp_path / "a.png")
    refused(r"a\.png has 16x12 pixels but coco\.json says 8x6", CocoDataset(file).open, 0)
    (tmp_path / "a.png").write_bytes(b"nothing")
    refused(r"a\.png: not an image", CocoDataset(file).open, 0, error=UnreadableImage)
    file = write([annotation()], images=[dict(id=10, file_name="a.png")])  # whose size is read
    assert CocoDataset(file).target(0)["masks"].shape == (1, 6, 8)
    (tmp_path / "a.png").write_bytes(b"nothing")
    refused(r"a\.png cannot be read for its size", CocoDataset, file)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_exif__the_box_stays_on_its_object(write, tmp_path, orientation, suffix):
    """A red rectangle in a black image: its box, given for the stored or for the turned image, is red."""
    stored = Image.new("RGB", (48, 32))
    stored.paste((255, 0, 0), (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation

    def inside(image_size, box) -> tuple:
        width, height = image_size
        listed = [dict(id=10, file_name=f"turned.{suffix}", width=width, height=height)]
        file = write([annotation(bbox=box)], listed)
        stored.save(tmp_path / f"turned.{suffix}", exif=exif, quality=100, subsampling=0)
        image, target = CocoDataset(file, masks=False)[0]
        assert image.size == image_size == target["boxes"].canvas_size[::-1]
        assert ImageOps.exif_transpose(image).tobytes() == image.tobytes()  # no one turns it again
        crop = image.crop(tuple(map(int, target["boxes"][0].tolist())))
        inner, whole = (one.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)) for one in (crop, image))
        return inner[0] > 250, round(whole[0] / 255, 2)

    assert inside((48, 32), [0, 0, 16, 8]) == (True, round(16 * 8 / (48 * 32), 2))
    if orientation >= 5:  # sides change places, so that the size tells that the turned image was labelled
        corner = {5: (0, 0), 6: (24, 0), 7: (24, 32), 8: (0, 32)}[orientation]
        assert inside((32, 48), [*corner, 8, 16]) == (True, round(16 * 8 / (48 * 32), 2))


def test_target__goes_through_pickle_workers_and_transforms_and_can_be_changed(write):
    data = CocoDataset(write([annotation()]))
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again.target(0)["masks"], data.target(0)["masks"])
    loaded = next(iter(DataLoader(data, batch_size=None, num_workers=1)))
    assert torch.equal(loaded[1]["boxes"], data.target(0)["boxes"])
    _, target = v2.RandomHorizontalFlip(1.0)(*data[0])
    assert target["boxes"].tolist() == [[4, 2, 7, 6]]
    assert target["masks"][0].nonzero()[:, 1].unique().tolist() == [4, 5, 6]
    for key in ("boxes", "labels"):
        data.target(0)[key].zero_()
    assert data.target(0)["boxes"].tolist() == [[1, 2, 4, 6]] and data.target(0)["labels"].tolist() == [1]


def test_real__instances():
    file = shared("coco/instances.json")
    content = json.loads(file.read_text())
    data = CocoDataset(file)
    assert (len(data), len(data.classes), data.classes[0], data.category_ids[80]) == (128, 80, "person", 90)
    assert len(data.notes) == 2 and re.match(r"boxes .* clipped to it: 1 \(first: annotation 1463315\)", data.notes[1])
    assert data.notes[0].startswith("crowds, which nothing is learned from: 13 ")
    boxes, objects, apart = CocoDataset(file, masks=False), 0, []
    for i, entry in enumerate(content["images"]):
        target = boxes.target(i)
        mine = [item for item in content["annotations"] if item["image_id"] == entry["id"]]
        assert [data.category_ids[label] for label in target["labels"].tolist()] == [a["category_id"] for a in mine]
        assert target["iscrowd"].tolist() == [a["iscrowd"] for a in mine]
        torch.testing.assert_close(target["area"], torch.tensor([float(a["area"]) for a in mine]))
        objects += len(mine)
    for target in map(data.target, range(0, 128, 8)):
        drawn = (target["masks"].flatten(1).sum(1) > 100) & (target["iscrowd"] == 0)
        around = masks_to_boxes(target["masks"][drawn]) + torch.tensor([0, 0, 1, 1])
        apart += (around - target["boxes"][drawn]).abs().flatten(1).amax(1).tolist()
    assert objects == 900
    # boxes are those of the masks up to the pixel grid, but for a few with thin tips, which vanish on it
    assert len(apart) > 80 and sum(distance < 2 for distance in apart) > 0.95 * len(apart)
    image, target = data[3]
    assert image.size == target["boxes"].canvas_size[::-1] == target["masks"].shape[:0:-1]


def test_real__keypoints():
    data = CocoDataset(shared("coco_keypoints/person_keypoints.json"), keypoints=True)
    assert (len(data), len(data.keypoint_names), data.keypoint_names[0]) == (4, 17, "nose")
    assert sum(len(target["keypoints"]) for _, target in data) == 14
    target = data.target(0)
    assert target["keypoints"].shape == (1, 17, 3) and target["keypoints"][0, 0].tolist() == [367, 81, 2]
    x1, y1, x2, y2 = target["boxes"][0].tolist()
    x, y = target["keypoints"][0, :, :2].unbind(1)
    assert x1 <= x.min() and x.max() <= x2 and y1 <= y.min() and y.max() <= y2
