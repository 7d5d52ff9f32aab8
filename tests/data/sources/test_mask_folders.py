"""Folders of masks: values as stored, whatever kind of PNG, and what is said of folders that are wrong."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from broadsight.data.decoding import UnreadableImage
from broadsight.data.sources.mask_folders import MaskFolder, read_indices
from tests.refusals import refused

from ..reading import raw_png, shared

CLASSES = ["sky", "tree", "dog"]
COLOURS = r"a\.png holds colours \(mode MODE\).*save it as grey or palette PNG"
VALUES = np.array([[0, 1, 2, 255], [2, 1, 0, 0]], np.uint8)


@pytest.fixture
def pair(tmp_path):
    """Folders with one image of 4x2 (width x height) and its mask."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (4, 2), (200, 10, 10)).save(tmp_path / "images" / "a.jpg")
    Image.fromarray(VALUES).save(tmp_path / "masks" / "a.png")
    return tmp_path / "images", tmp_path / "masks"


def first(*folders: Path, **options) -> tuple[Image.Image, torch.Tensor]:
    return MaskFolder(*folders, **options)[0]


def test_getitem__by_hand(pair):
    data = MaskFolder(*pair, classes=CLASSES)
    image, mask = data[0]
    assert (len(data), data.name(0), data.classes, data.notes) == (1, "a.jpg", tuple(CLASSES), ())
    assert (image.mode, image.size) == ("RGB", (4, 2))
    assert isinstance(mask, tv_tensors.Mask) and mask.dtype == torch.int64
    assert mask.tolist() == VALUES.tolist() and data.open(0).size == (4, 2)
    assert torch.equal(pickle.loads(pickle.dumps(data)).target(0), mask) and len(list(data)) == 1
    assert MaskFolder(*pair, classes=CLASSES, channels=1).open(0).mode == "L"


def test_masks__with_a_palette_or_16_bits_are_read_as_indices(pair):
    mask = Image.fromarray(VALUES).convert("P")
    mask.putdata(VALUES.ravel().tolist())
    mask.putpalette([50, 60, 70] * 256)
    mask.save(pair[1] / "a.png")
    assert Image.open(pair[1] / "a.png").mode == "P"
    assert first(*pair, classes=CLASSES)[1].tolist() == VALUES.tolist()
    values = np.array([[0, 300, 999, 65535]] * 2, np.uint16)
    Image.fromarray(values).save(pair[1] / "a.png")
    assert first(*pair, classes=[*map(str, range(1000))], ignore=65535)[1].tolist() == values.tolist()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_masks__of_few_bits_are_not_stretched(tmp_path, bits):
    values = np.arange(2**bits).reshape(2, -1) if bits > 1 else np.array([[0, 1, 1], [1, 0, 0]])
    digits = (values[..., None] >> np.arange(bits)[::-1]) & 1
    rows = np.packbits(digits.reshape(2, -1), axis=1).tobytes()
    (tmp_path / "a.png").write_bytes(raw_png(values.shape[1], 2, bits, 0, rows))
    assert read_indices(tmp_path / "a.png").tolist() == values.tolist()


@pytest.mark.parametrize(
    ("mask", "words", "options"),
    [
        *((Image.new(mode, (4, 2)), COLOURS.replace("MODE", mode), {}) for mode in ("RGB", "RGBA", "LA")),
        (VALUES, r"a\.png holds 2, which is none of the 2 classes or 255 to ignore", dict(classes=CLASSES[:2])),
        (VALUES, r"a\.png holds 255, which is none of the 3 classes;", dict(ignore=None)),
        (VALUES, r"a\.png holds 255, which is none of the 3 classes or 254 to", dict(ignore=254)),
        (VALUES[:1], r"a\.jpg has 4x2 pixels but its mask a\.png 4x1", {}),
        (b"nothing", r"a\.png: not an image", dict(error=UnreadableImage)),
    ],
)
def test_masks__refused(pair, mask, words, options):
    if isinstance(mask, bytes):
        (pair[1] / "a.png").write_bytes(mask)
    else:
        (mask if isinstance(mask, Image.Image) else Image.fromarray(mask)).save(pair[1] / "a.png")
    refused(words, first, *pair, **{"classes": CLASSES, **options})


def test_masks__black_and_white_are_not_ignored_silently(pair):
    Image.fromarray(np.where(VALUES == 1, 255, 0).astype(np.uint8)).save(pair[1] / "a.png")
    words = r"hold 0 and 255 but never dog \(1\), and 255 is ignored; save the object as 1"
    refused(words, MaskFolder, *pair, classes=["none", "dog"])
    assert len(MaskFolder(*pair, classes=CLASSES)) == 1  # with more classes, 255 is a border


def test_pairs__in_subfolders_by_suffix_or_left_out_and_told(pair):
    images, masks = pair
    for name in "bc":
        Image.new("RGB", (4, 2)).save(images / f"{name}.jpg")
    Image.fromarray(VALUES).save(masks / "d.png")
    (masks / "readme.md").write_text("no mask")
    data = MaskFolder(images, masks, classes=CLASSES)
    assert [data.name(i) for i in range(len(data))] == ["a.jpg"]
    lost = ("images without a mask left out: 2 (first: b.jpg)", "masks without an image left out: 1 (first: d.png)")
    assert data.notes == lost
    # in folders and by a suffix
    for folder in ("x", "y"):
        (images / folder).mkdir()
        (masks / folder).mkdir()
        Image.new("RGB", (4, 2)).save(images / folder / "a.b.jpg")
        Image.fromarray(VALUES * 0 + (folder == "y")).save(masks / folder / "a.b_mask.png")
    data = MaskFolder(images, masks, classes=CLASSES, suffix="_mask")
    assert [data.name(i) for i in range(len(data))] == ["x/a.b.jpg", "y/a.b.jpg"]
    assert [int(data.target(i).max()) for i in range(2)] == [0, 1]


def test_pairs__errors(pair, tmp_path):
    def wrong(words: str, masks: Path = pair[1], **options) -> None:
        refused(words, MaskFolder, pair[0], masks, classes=CLASSES, **options)

    wrong(r"no mask in .*masks has the name of an image .* see suffix=", suffix="_mask")
    wrong("nowhere is not a folder", tmp_path / "nowhere", error=FileNotFoundError)
    Image.new("RGB", (4, 2)).save(pair[0] / "a.png")
    wrong(r"images holds a\.\w+ and a\.\w+, which pair with the same; keep one")
    (pair[0] / "a.png").unlink()
    (pair[1] / "a.png").rename(pair[1] / "a.JPG")
    wrong(r"a\.JPG is a JPEG, which alters values; save masks as PNG")


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_exif__mask_and_image_agree(pair, orientation):
    images, masks = pair
    stored = Image.new("RGB", (48, 32))
    stored.paste((255, 255, 255), (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(images / "a.jpg", exif=exif, quality=100)
    turn = {1: 0, 3: 0, 6: 3, 8: 1}[orientation]  # quarter turns that the mask was drawn after; of a half, none
    values = np.pad(np.ones((8, 16), np.uint8), ((0, 24), (0, 32)))
    for turns in {0, turn}:
        Image.fromarray(np.ascontiguousarray(np.rot90(values, turns))).save(masks / "a.png")
        image, mask = MaskFolder(images, masks, classes=CLASSES)[0]
        assert np.array_equal(np.asarray(image)[..., 0] > 127, mask.numpy() == 1)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("classes.txt", "sky\n tree \ndog\n\n", ("sky", "tree", "dog")),
        ("classes.yaml", "[sky, tree, dog]", ("sky", "tree", "dog")),
        ("classes.yaml", "names: [sky, tree, dog]", ("sky", "tree", "dog")),
        ("classes.yml", "classes:\n  0: sky\n  2: dog", ("sky", "unused 1", "dog")),
        ("classes.yaml", "{2: dog, 1: tree, 0: sky}", ("sky", "tree", "dog")),
    ],
)
def test_classes__from_a_file(pair, name, text, expected):
    (pair[1].parent / name).write_text(text)
    assert MaskFolder(*pair).classes == MaskFolder(*pair, classes=str(pair[1].parent / name)).classes == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1}", "has class 'a': 1; expected an index"),
        ("{-1: a}", "has class -1: 'a'; expected an index"),
        ("{0: }", "has class 0: None"),
        ("[]", "has no class names"),
        ("", "has no class names"),
        ("{a: [", "is not YAML"),
    ],
)
def test_classes__errors_of_a_file(pair, text, message):
    (pair[1] / "classes.yaml").write_text(text)
    refused(rf"classes\.yaml {message}", MaskFolder, *pair)


def test_classes__must_be_known_and_an_index_left_out_may_not_occur(pair):
    refused(r"no classes\.yaml or classes\.txt in or beside .*masks; write one", MaskFolder, *pair)
    refused(r"names\.txt is not a file", MaskFolder, *pair, error=FileNotFoundError, classes="names.txt")
    (pair[1] / "classes.yaml").write_text("{0: sky, 2: dog}")
    refused(r"a\.png holds 1, which is none of the 3 classes", first, *pair)


def test_real__semantic():
    data = MaskFolder(shared("coco_semantic/images"), shared("coco_semantic/masks"))
    assert (len(data), len(data.classes), data.notes) == (100, 201, ())
    assert (data.classes[0], data.classes[1], data.classes[12]) == ("unlabeled", "person", "unused 12")
    for i in range(0, 100, 10):
        image, mask = data[i]
        assert image.size == mask.shape[::-1]
        assert mask.tolist() == np.asarray(Image.open(data.masks / f"{Path(data.name(i)).stem}.png")).tolist()
