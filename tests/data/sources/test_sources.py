"""From DATA to two sources: folders, COCO crops, scenes and named data sets; and every way to get it wrong."""

import json
import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.data.decoding import UnreadableImage
from broadsight.data.sources import resolve
from broadsight.data.sources import timm_string as timm_source
from broadsight.data.sources.sample_table import Names, in_order, is_image
from broadsight.data.view import labels_of
from tests.refusals import refused

from ..reading import counts, everything, fill, grey, greys, put, rows, said, shared


@pytest.mark.parametrize(
    ("train", "val"), [("train", "val"), ("training", "validation"), ("Train", "TEST"), ("train", "eval")]
)
def test_folder__with_parts(tmp_path, train, val):
    fill(tmp_path / train, dog=3, cat=2)
    fill(tmp_path / val, dog=1, cat=2)
    splits = resolve(str(tmp_path))
    assert splits.classes == splits.train.classes == splits.val.classes == ("cat", "dog")
    assert rows(splits.train) == {f"{name}/{i}.png": name for name, n in (("cat", 2), ("dog", 3)) for i in range(n)}
    assert rows(splits.val) == {"cat/0.png": "cat", "cat/1.png": "cat", "dog/0.png": "dog"}
    assert greys(splits.train) == [10, 11, 0, 1, 2] and splits.notes == ()
    assert splits.description.items() >= {"counts": {"train": 5, "val": 3}, "kind": "folder", "split": None}.items()
    assert json.loads(json.dumps(splits.description)) == splits.description


def test_folder__parts_that_are_told_from_classes_and_numbered_alike(tmp_path):
    for name, count in (("train", 2), ("val", 1), ("test", 2)):
        fill(tmp_path / "a" / name, a=1, b=count)
    splits = resolve(str(tmp_path / "a"))
    assert len(splits.val) == 2 and said(splits, "not used", "test/")
    splits = resolve(str(fill(tmp_path / "b", train=3, car=3, bus=3)))  # a vehicle
    assert splits.classes == ("bus", "car", "train")
    fill(tmp_path / "b" / "x" / "train", a=2, b=2)  # the same name for a part, beside a folder that is none
    splits = resolve(str(fill(tmp_path / "b" / "x", extra=1)))
    assert splits.classes == ("a", "b") and said(splits, "not used", "extra/")
    fill(tmp_path / "c" / "train", a=1, b=1, c=1)
    fill(tmp_path / "c" / "val", c=2)
    splits = resolve(str(tmp_path / "c"))
    assert labels_of(splits.val).tolist() == [2, 2] and splits.val.classes == ("a", "b", "c")
    assert said(splits, "classes without images to validate: a, b (of 3 classes)")


def test_folder__labels_are_timms(tmp_path):
    from timm.data import create_dataset

    fill(tmp_path / "train", n10=2, n9=1, B=1, a=1, **{"ü x": 1})
    fill(tmp_path / "val", n9=1)
    ours, theirs = resolve(str(tmp_path)).train, create_dataset("", root=str(tmp_path), split="train").reader
    assert {name: place for place, name in enumerate(ours.classes)} == theirs.class_to_idx
    labels = {theirs.filename(row): theirs.samples[row][1] for row in range(len(theirs))}
    assert dict(zip(rows(ours), labels_of(ours), strict=True)) == labels


def test_folder__names_of_all_kinds(tmp_path):
    names = ["x.JPG", "deep/er/y.png", "ö ü.jpeg", "new\nline.png", "z.WebP", "#1%.png", "no.dots.here.png"]
    names = {"one class": names, "ß": ["0.png", "1.png", os.fsdecode(b"\xff\xfe.png")]}  # the last is no Unicode
    expected = {f"{kind}/{name}": kind for kind, inner in names.items() for name in inner}
    for name in expected:
        put(tmp_path / name)
    splits = resolve(str(tmp_path), split=0.5)
    assert everything(splits) == expected
    for source in (splits.train, splits.val):
        assert all(source.open(row).size == (4, 3) for row in range(len(source)))


def test_folder__ignores_what_is_hidden_or_no_image_and_leaves_empty_classes_out(tmp_path):
    fill(tmp_path, a=2, b=2)
    (tmp_path / "aa").mkdir()
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    for name in ("a/.DS_Store", "a/._0.png", ".hidden/0.png", "__MACOSX/a/._0.png", "a/.git/x.png", "a/Thumbs.db"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "readme.txt").write_text("x")
    put(tmp_path / "loose.png")
    splits = resolve(str(tmp_path), split=0.5)
    assert splits.classes == ("a", "b") and sum(counts(splits)) == 4
    assert said(splits, "files that are no images are ignored: a/Thumbs.db, readme.txt")
    assert said(splits, ": images outside class folders are ignored: loose.png")
    assert said(splits, "class folders without images are left out: aa, empty")


def test_folder__goes_to_other_processes_in_few_bytes_in_grey_and_says_what_is_unreadable(tmp_path):
    source = resolve(fill(tmp_path, a=60, b=60)).train
    copy = pickle.loads(pickle.dumps(source))
    assert rows(copy) == rows(source) and grey(copy, 3) == grey(source, 3)
    assert len(pickle.dumps(source)) < 40 * len(source) + 2000
    (tmp_path / "a" / "bad.jpg").write_bytes(b"")
    splits = resolve(str(tmp_path), channels=1)
    assert splits.train.open(0).mode == splits.val.open(0).mode == "L"
    part = splits.train if "a/bad.jpg" in rows(splits.train) else splits.val
    row = list(rows(part)).index("a/bad.jpg")
    assert part.label(row) == 0
    refused(r"^a/bad\.jpg: empty file$", part.open, row, error=UnreadableImage)


def test_hold_out__a_fraction_of_each_class(tmp_path):
    splits = resolve(str(fill(tmp_path / "x", a=20, b=40, c=3)))
    train, val = rows(splits.train), rows(splits.val)
    assert not train.keys() & val.keys() and len(train) + len(val) == 63 and splits.description["split"] == 0.1
    assert [list(val.values()).count(name) for name in "abc"] == [2, 4, 1]
    assert said(splits, "7 of 63 images", "held out to validate (split 0.1, seed 0)")
    assert greys(splits.val) == [10 * "abc".index(name[0]) + int(name[2:-4]) for name in val]  # the right images
    splits = resolve(str(fill(tmp_path / "y", a=1, b=2, c=2)), split=0.99)  # but never all of a class
    assert list(rows(splits.train).values()) == ["a", "b", "c"]
    assert said(splits, "classes with a single image keep it for training: a")
    assert said(splits, "classes without images to validate: a (of 3 classes)")
    refused(r"no image that can be held out without losing a class", resolve, fill(tmp_path / "z", a=1, b=1))


def test_hold_out__depends_on_seed_and_names_alone(tmp_path):
    def held(data: Path, seed: int = 0) -> dict[str, str]:
        return rows(resolve(str(data), split=0.3, seed=seed).val)

    first = held(fill(tmp_path, a=30, b=30))
    assert held(tmp_path) == first != held(tmp_path, seed=1)
    copy = fill(tmp_path / "elsewhere", b=30, a=30)
    assert held(copy) == first
    assert len(first.keys() - held(fill(copy, a=33)).keys()) <= 3  # three more: at most one or two move


def test_hold_out__is_a_fraction_and_not_beside_validation_images(tmp_path):
    for split in (0.0, 1.0, -0.1, 1.5, float("nan")):
        refused(f"split={split} is not between 0 and 1; 0.1 holds out a tenth", resolve, tmp_path, split=split)
    fill(tmp_path / "train", a=2, b=2)
    fill(tmp_path / "val", a=1, b=1)
    refused(r"split=0.5, but .*val is set apart to validate; leave split out", resolve, tmp_path, split=0.5)
    refused("two ways to validate; give one of them", resolve, tmp_path, val=str(tmp_path / "val"), split=0.5)


def test_val__another_folder(tmp_path):
    x, y = fill(tmp_path / "x", a=3, b=3), fill(tmp_path / "y", b=2)
    splits = resolve(x, val=y)
    assert len(splits.train) == len(resolve(x, val=x).val) == 6 and labels_of(splits.val).tolist() == [1, 1]
    fill(tmp_path / "z" / "val", a=1, b=2)  # the part for validation in it, if there is one
    fill(tmp_path / "z" / "train", a=1, b=1)
    assert len(resolve(x, val=tmp_path / "z").val) == 3
    splits = resolve(tmp_path / "z", val=y)
    assert len(splits.val) == 2 and said(splits, "not used", "z/val", "is to validate")


def test_fingerprint__notices_other_data(tmp_path):
    def mark(path, **options):
        return resolve(str(path), **options).description["fingerprint"]

    a, b = fill(tmp_path / "x", a=9, b=9), fill(tmp_path / "y", b=9, a=9)
    assert mark(b) == mark(a) != mark(a, seed=1)  # the same names elsewhere
    put(b / "a" / "new.png")
    assert mark(a) != mark(b)
    (b / "a" / "new.png").unlink()
    for old, new in ("ac", "ba", "cb"):
        (b / old).rename(b / new)
    assert mark(a) == mark(b)  # pixels are not looked at
    (b / "b").rename(b / "c")
    assert mark(a) != mark(b)


ABSENT = (ValueError, FileNotFoundError)
STREAMS = ("hfids/a/b", "tfds/cifar10", "wds/https://x.org/a.tar", "pipe:curl x", "s3://b/k")


def test_errors__no_such_thing(tmp_path, monkeypatch):
    flowers = fill(tmp_path / "flowers", a=1, b=1)
    monkeypatch.chdir(tmp_path)
    kinds = "; give a folder, a tar, a list, a COCO .json, or one of elpv, fashion-mnist, scenes, torch"
    for data, words in (
        (tmp_path / "flower", r"^no such data: .*/flower; did you mean .*/flowers\?$"),
        (tmp_path / "flower" / "train", r"did you mean .*/flowers\?$"),
        ("scene", r"no such data: scene; did you mean scenes\?$"),
        ("fashion_mnist", r"no such data: fashion_mnist; did you mean fashion-mnist\?$"),
        ("torch/cifar", r"no such data: torch/cifar; did you mean torch/cifar10\?$"),
        ("zzzzzz", kinds),
        *((data, "") for data in ("nowhere", "torch/nothing", "scenes:x")),
        *((data, "is a stream, which cannot be resumed exactly; download it and give the") for data in STREAMS),
    ):
        refused(words, resolve, data, error=ABSENT)
    (tmp_path / "val").mkdir()
    words = r"^no such val: .*/valid; did you mean .*/val\?$"
    refused(words, resolve, flowers, val=tmp_path / "valid", error=FileNotFoundError)
    words = "^no such val: .*; give the folder, tar or list to validate on, or leave"
    refused(words, resolve, flowers, val=tmp_path / "qqq", error=FileNotFoundError)


def test_errors__what_is_missing_or_of_another_kind(tmp_path):
    refused(r"^no images in .*; expected folders named after classes, with images", resolve, tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "x.txt").write_text("")
    refused(r"^no images in", resolve, tmp_path)
    fill(tmp_path, c=2)
    refused(r"holds 2 images but no class folders; put the images of each class into", resolve, tmp_path / "c")
    refused(r"has one class only, 'cats'; a classifier needs two$", resolve, fill(tmp_path / "d", cats=3))
    fill(tmp_path / "e" / "val", a=1, zebra=1)
    refused(r"has a part to validate, .*/val, but none to train on", resolve, tmp_path / "e")
    fill(tmp_path / "e" / "train", a=1, b=1)
    (tmp_path / "e" / "train" / "zebra").mkdir()  # a folder without images does not help
    refused(r"val has classes that .*train has not: zebra; add images of them", resolve, tmp_path / "e")
    for inside in ("f", "g/train"):
        fill(tmp_path / inside, images=2, masks=2)
        words = r"pairs images with masks \(images, masks\).*; such data is for segmentation"
        refused(words, resolve, tmp_path / inside[0])
    (tmp_path / "x.zip").write_bytes(b"PK")
    refused(r"x.zip is neither a folder, a tar .* nor a COCO .json$", resolve, tmp_path / "x.zip")
    refused("channels=2 is neither 1", resolve, "scenes", channels=2)


def test_errors__permission_denied(tmp_path, monkeypatch):
    fill(tmp_path, a=2, b=2)
    real = os.scandir

    def refuse(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)  # tests may run as root, who is never refused
    refused(r"^permission denied: .*/b; make it readable for this user$", resolve, tmp_path)


def test_scenes(tmp_path):
    before = torch.random.get_rng_state()
    splits = resolve(None, scenes_count=40, scenes_size=32)
    assert torch.equal(torch.random.get_rng_state(), before)  # no generator that a run depends on is moved
    assert counts(splits) == (40, 10)
    assert splits.train.open(0).size == (32, 32) and splits.train.open(0).mode == "RGB"
    assert splits.description["kind"] == "scenes" and splits.description["size"] == 32
    assert len(resolve("scenes").train) == 8000 and len(resolve("scenes:12").val) == 3
    assert resolve("scenes:12", channels=1).train.open(0).mode == "L"
    other = resolve("scenes:40", scenes_size=32, seed=1)
    assert other.description["fingerprint"] != splits.description["fingerprint"]
    cached, plain = resolve("scenes:8", cache=tmp_path), resolve("scenes:8")
    assert all(cached.train.open(row).tobytes() == plain.train.open(row).tobytes() for row in (0, 7))
    assert any(tmp_path.iterdir())
    refused("'many' is not a count; write for example scenes:2000", resolve, "scenes:many")
    refused("3 scenes are too few", resolve, "scenes:3")
    refused("val and split are for other data", resolve, "scenes", split=0.2)


def coco(folder: Path, name: str = "coco.json", images: str = "images", count: int = 12) -> Path:
    """Images of 40x30 with a red box of category 9 and a blue one of category 2, more or less at their edges."""
    listed, boxes = [], []
    image = Image.new("RGB", (40, 30))
    image.paste((255, 0, 0), (2, 3, 12, 23))
    image.paste((0, 0, 255), (30, 15, 40, 30))
    (folder / images).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image.save(folder / images / f"{number}.png")
        listed.append(dict(id=100 + number, file_name=f"{number}.png", width=40, height=30))
        one = dict(image_id=100 + number, iscrowd=0)
        boxes.append(dict(one, id=3 * number, category_id=9, bbox=[2, 3, 10, 20]))
        boxes.append(dict(one, id=3 * number + 1, category_id=2, bbox=[30, 15, 30, 30]))  # reaches out
    boxes += [
        dict(id=900, image_id=100, category_id=9, bbox=[0, 0, 20, 20], iscrowd=1),
        dict(id=901, image_id=100, category_id=9, bbox=[0, 0, 7.9, 20], iscrowd=0),
        dict(id=902, image_id=100, category_id=9, bbox=[35, 0, 20, 20], iscrowd=0),  # 5 pixels inside
        dict(id=903, image_id=777, category_id=9, bbox=[0, 0, 20, 20], iscrowd=0),
    ]
    categories = [dict(id=9, name="red"), dict(id=2, name="blue"), dict(id=5, name="never")]
    (folder / name).write_text(json.dumps(dict(images=listed, annotations=boxes, categories=categories)))
    return folder / name


@pytest.mark.parametrize("whole", [True, False])
def test_coco__crops_by_category(tmp_path, whole):
    file = coco(tmp_path)
    splits = resolve(str(tmp_path if whole else file), split=0.25)
    assert splits.classes == ("blue", "red")  # in the order of ids
    crops = {"red": ((10, 20), [(200, (255, 0, 0))]), "blue": ((10, 15), [(150, (0, 0, 255))])}
    for source in (splits.train, splits.val):
        for row in range(len(source)):
            crop = source.open(row)
            assert (crop.size, crop.getcolors()) == crops[source.classes[source.label(row)]]
    assert counts(splits) == (18, 6)
    assert said(splits, "boxes left out: 1 without an image, 1 of crowds, 2 below 8 pixels")
    assert said(splits, "categories without boxes are left out: never")


def images_of(splits) -> list[set[str]]:
    """The files that the crops of both parts are from."""
    return [{name.partition("#")[0] for name in rows(part)} for part in (splits.train, splits.val)]


def test_coco__holds_out_whole_images(tmp_path):
    splits = resolve(str(coco(tmp_path)), split=0.25)
    train, val = images_of(splits)
    assert len(train) == 9 and len(val) == 3 and not train & val
    assert said(splits, "6 of 24 images", "none of them from an image that has others in training")
    # but never the last of a class
    assert sorted(rows(resolve(str(tmp_path), split=0.99).train).values()) == ["blue", "red"]


def test_coco__holds_out_a_class_that_few_images_show(tmp_path):
    file = coco(tmp_path, count=20)
    content = json.loads(file.read_text())
    content["categories"].append(dict(id=11, name="rare"))
    for number in (3, 9):
        content["annotations"].append(
            dict(id=number + 5000, image_id=number + 100, category_id=11, bbox=[0, 0, 20, 20])
        )
    file.write_text(json.dumps(content))
    for seed in range(5):
        splits = resolve(str(file), seed=seed)
        for part in (splits.train, splits.val):
            assert set(rows(part).values()) == {"red", "blue", "rare"}, seed
        train, val = images_of(splits)
        assert not train & val and len(val) <= 3
    assert rows(resolve(file, method=1).val) != rows(resolve(file).val)
    content["annotations"].pop()  # now it is in one image alone
    file.write_text(json.dumps(content))
    splits = resolve(str(file))
    assert said(splits, "classes with a single image keep it for training: rare")
    assert "rare" not in rows(splits.val).values()


def test_coco__parts_by_file_name_or_a_file_in_each(tmp_path):
    x, y = tmp_path / "x", tmp_path / "y"
    for part, count in (("train", 4), ("val", 2)):
        coco(x, f"instances_{part}.json", part, count=count)
    assert counts(resolve(x)) == (8, 4)
    (x / "instances_val.json").rename(x / "other_train.json")
    refused(r"has several COCO files: .*; give the path of one, and another for val", resolve, x)
    for part, count in (("train", 4), ("valid", 2)):  # as Roboflow exports: a file between the images
        coco(y / part, "_annotations.coco.json", images=".", count=count)
    splits = resolve(y)
    assert counts(splits) == (8, 4) and splits.description["kind"] == "coco"
    assert splits.train.open(0).getpixel((0, 0)) == (255, 0, 0)


def test_coco__an_image_of_another_size_is_unreadable(tmp_path):
    file = coco(tmp_path, count=4)
    Image.new("RGB", (20, 15)).save(tmp_path / "images" / "1.png")
    splits = resolve(str(file), split=0.5)
    both = [(part, row) for part in (splits.train, splits.val) for row in range(len(part))]
    part, row = next((part, row) for part, row in both if part.name(row).startswith("1.png"))
    refused(r"^1\.png#\d+: .*20x15.*40x30", part.open, row, error=UnreadableImage)


@pytest.mark.parametrize("content", ["{", "[]", '{"images": [], "annotations": []}', "x" * 10])
def test_coco__not_one_or_damaged(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    refused(r"x\.json is not a COCO file; expected JSON with images, annotations and", resolve, tmp_path / "x.json")
    file = coco(tmp_path)
    file.write_text(file.read_text().replace('"category_id"', '"kind"'))
    refused(r"is not a COCO file as expected: KeyError 'category_id'$", resolve, file)


def test_coco__real_images():
    splits = resolve(shared("coco"))
    content = json.loads(shared("coco/instances.json").read_text())
    named = {one["id"]: one["name"] for one in content["categories"]}
    boxes = {one["id"]: one for one in content["annotations"]}
    for source in (splits.train, splits.val):
        for row in range(0, len(source), 40):
            box = boxes[int(source.name(row).partition("#")[2])]
            assert source.classes[source.label(row)] == named[box["category_id"]] and not box["iscrowd"]
            assert np.abs(np.array(source.open(row).size) - box["bbox"][2:]).max() < 2
    assert sum(counts(splits)) == 820 and len(splits.classes) == 71


def test_timm__cifar_from_files(tmp_path):
    """Files as CIFAR-10 has them, with four images a batch; torchvision checks their sums, which is put off here."""
    from torchvision.datasets import CIFAR10

    folder, rng, images = tmp_path / CIFAR10.base_folder, np.random.default_rng(0), {}
    folder.mkdir()
    for number, (name, _) in enumerate(CIFAR10.train_list + CIFAR10.test_list):
        images[name] = rng.integers(0, 255, (4, 3072), np.uint8)
        labels = [(number + shift) % 10 for shift in range(4)]
        (folder / name).write_bytes(pickle.dumps({"data": images[name], "labels": labels}))
    meta = {"label_names": [f"class {number}" for number in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
        splits = resolve("torch/cifar10", root=str(tmp_path))
    assert counts(splits) == (20, 4) and splits.classes == tuple(meta["label_names"])
    assert [splits.train.label(row) for row in (0, 5)] == [0, 2]
    expected = images["data_batch_2"][1].reshape(3, 32, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(np.asarray(splits.train.open(5)), expected)
    assert splits.train.name(5) == "torch/cifar10/train/5" and splits.val.name(0) == "torch/cifar10/val/0"


def test_timm__inaturalist_from_files(tmp_path):
    for part in ("2021_train", "2021_valid"):
        for number, name in enumerate(("Animalia_a_b_c_d_e_f", "Plantae_a_b_c_d_e_f")):
            put(tmp_path / part / f"{number:05}_{name}" / "x.png", 40 * number)
    splits = resolve("torch/inaturalist", root=str(tmp_path))
    assert splits.classes == ("00000_Animalia_a_b_c_d_e_f", "00001_Plantae_a_b_c_d_e_f")
    assert labels_of(splits.train).tolist() == [0, 1] and greys(splits.train) == [0, 40]


def test_timm__hugging_face_rows(tmp_path, monkeypatch):
    """As timm's reader gives them: encoded images, and a column of labels; there is no split called validation."""
    labels = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]

    class Reader:
        label_key, class_to_idx, dataset = "label", {"yes": 1, "no": 0}, {"label": labels}

        def __getitem__(self, row: int):
            return (tmp_path / f"{row}.png").open("rb"), labels[row]

    def create(name, root, split, download):
        if split != "train":
            raise ValueError(f"Unknown split {split}")
        return SimpleNamespace(reader=Reader())

    for row in range(10):
        put(tmp_path / f"{row}.png", row)
    monkeypatch.setattr(timm_source, "find_spec", lambda name: name)
    monkeypatch.setattr("timm.data.create_dataset", create)
    splits = resolve("hfds/some/thing", split=0.2)
    assert splits.classes == ("no", "yes") and len(splits.train) == 8
    for source in (splits.train, splits.val):
        numbers = [int(name.rpartition("/")[2]) for name in rows(source)]
        assert greys(source) == numbers and labels_of(source).tolist() == [labels[number] for number in numbers]


def test_timm__hugging_face_reads_a_folder(tmp_path):
    pytest.importorskip("datasets", reason="the extra `data` is not installed")
    fill(tmp_path / "photos" / "train", no=3, yes=2)
    splits = resolve(f"hfds/{tmp_path / 'photos'}", root=str(tmp_path / "kept"), split=0.4)
    assert splits.classes == ("no", "yes") and counts(splits) == (3, 2)
    seen = {pair for part in (splits.train, splits.val) for pair in zip(labels_of(part), greys(part), strict=True)}
    assert seen == {(0, 0), (0, 1), (0, 2), (1, 10), (1, 11)}


def test_timm__not_there(tmp_path, monkeypatch, capsys):
    root = str(tmp_path)
    refused(r"^torch/folder: give the folder itself", resolve, "torch/folder", root=root)
    refused(rf"^torch/cifar10 is not in {re.escape(root)} \(.*--download", resolve, "torch/cifar10", root=root)
    monkeypatch.setattr(timm_source, "find_spec", lambda name: None)
    refused(r"^hfds/a/b needs a package that is not installed: pip install datasets$", resolve, "hfds/a/b")
    assert capsys.readouterr().out == ""


def test_names__are_a_sequence_in_order_and_of_images():
    given = ["", "a", "ü/ö", "\udcff", "x" * 1000]
    names = Names(given)
    assert list(names) == given and [names[row] for row in range(5)] == given and names[-1] == given[-1]
    assert len(Names([])) == 0 and list(Names([])) == []
    for outside in (5, -6):
        refused(f"^no name {outside} among 5$", names.__getitem__, outside, error=IndexError)
    assert in_order(["n10", "n9", "B", "a", "²", "b", ""]) == ["", "a", "B", "b", "n9", "n10", "²"]
    names = ("a.JPG", "b.webp", ".c.png", "._d.jpg", "e.txt", "jpg", "f.tar.jpeg")
    assert list(filter(is_image, names)) == ["a.JPG", "b.webp", "f.tar.jpeg"]
