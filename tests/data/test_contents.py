"""What stands for the content of data: any replaced file and any edited label is noticed, no move is."""

import json
import os
import shutil
import tarfile
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from broadsight.data import contents as module
from broadsight.data.contents import contents, of_file, same_contents
from broadsight.data.dense.resolve import resolve_dense
from broadsight.data.sources import resolve
from broadsight.data.sources.timm_string import DatasetSource

from ..training.dense_runs import write_coco
from ..training.small_runs import fill


def found(data, task=None, **options):
    splits = resolve(str(data), **options) if task is None else resolve_dense(data, task, **options)
    return contents({"train": splits.train, "val": splits.val})


def listed(folder):
    fill(folder, cat=6, dog=6)
    rows = [f"{kind}/{number:03d}.png,{kind}" for kind in ("cat", "dog") for number in range(6)]
    (folder / "list.csv").write_text("\n".join(rows))
    return folder / "list.csv"


def tarred(folder, labelled=False):
    images = fill(folder / "images", cat=6, dog=6)
    with tarfile.open(folder / "data.tar", "w") as tar:
        for number, file in enumerate(sorted(images.rglob("*.png"))):
            tar.add(file, f"{number:03d}.png" if labelled else str(file.relative_to(images)))
            if labelled:
                (folder / "label").write_text(str(number % 2))
                tar.add(folder / "label", f"{number:03d}.cls")
    return folder / "data.tar"


def masked(folder):
    fill(folder, images=6)
    (folder / "masks").mkdir()
    for file in sorted((folder / "images").iterdir()):
        Image.fromarray(np.arange(1600, dtype=np.uint8).reshape(40, 40) % 2).save(folder / "masks" / file.name)
    (folder / "classes.txt").write_text("ground\nthing\n")
    return folder


KINDS = {
    "folder": (lambda folder: fill(folder / "data", cat=6, dog=6), None),
    "list": (listed, None),
    "tar": (tarred, None),
    "shards": (lambda folder: tarred(folder, labelled=True), None),
    "crops": (write_coco, None),
    "coco": (write_coco, "detect"),
    "coco masks": (write_coco, "instances"),
    "coco pixels": (write_coco, "segment"),
    "masks": (masked, "segment"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_replaced__noticed__moved_or_copied__not(kind, tmp_path):
    make, task = KINDS[kind]
    (tmp_path / "one").mkdir()
    data = make(tmp_path / "one")
    before = found(data, task)
    assert set(before) == {"train", "val"}
    copy = tmp_path / "two"
    shutil.copytree(tmp_path / "one", copy, copy_function=shutil.copyfile)  # which keeps no times
    moved = copy / data.relative_to(tmp_path / "one")
    assert found(moved, task) == before
    for file in [moved] if moved.suffix == ".tar" else copy.rglob("*.png"):
        content = bytearray(file.read_bytes())
        content[content.rindex(b"IEND") + 5] ^= 1  # at the end of the last image, which keeps its size
        file.write_bytes(content)
        assert found(moved, task) != before
        file.write_bytes((tmp_path / "one" / file.relative_to(copy)).read_bytes())
    assert found(moved, task) == before


BOXES = [("detect", "bbox", [1, 1, 20, 20]), (None, "bbox", [1, 1, 20, 20])]
MASKS = [(task, "segmentation", [[1, 1, 20, 1, 20, 21]]) for task in ("instances", "segment")]
FACTS = [("detect", "category_id", 3), ("detect", "iscrowd", 1)]


@pytest.mark.parametrize(("task", "key", "value"), [*BOXES, *MASKS, *FACTS])
def test_coco__edited_labels(task, key, value, tmp_path):
    file = write_coco(tmp_path)
    content = json.loads(file.read_text())
    before = found(file, task, split=0.25)
    file.write_text(json.dumps(content, indent=3))
    assert found(file, task, split=0.25) == before  # the same in other words
    content["annotations"][1][key] = value
    file.write_text(json.dumps(content))
    assert found(file, task, split=0.25) != before


def test_many__some_of_each_class_are_read_and_all_measured_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "READ", 6)
    data = fill(tmp_path / "data", cat=6, dog=6, emu=8)
    source = resolve(str(data)).train
    with patch.object(type(source.source), "vouch", autospec=True, return_value=b"") as vouch:
        contents({"train": source})
    read = [one.label(row) for (one, row, content), _ in vouch.call_args_list if content]
    assert sorted(read) == [0, 0, 1, 1, 2, 2] and vouch.call_count == len(source)
    before = found(data)
    for number in range(6):  # of another size each
        file = data / "dog" / f"{number:03d}.png"
        whole = file.read_bytes()
        file.write_bytes(whole + b"x")
        assert found(data) != before
        file.write_bytes(whole)
    for old, new in (("cat", "x"), ("dog", "cat"), ("x", "dog")):
        (data / old).rename(data / new)
    assert found(data) != before


def test_files__beginning_and_end_of_large_ones(tmp_path):
    file = tmp_path / "large"
    content = bytearray(os.urandom(300_000))
    file.write_bytes(content)
    before = of_file(file, True)
    assert of_file(file, False) != before
    for place in (0, 299_999):
        content[place] ^= 1
        file.write_bytes(content)
        assert of_file(file, True) != before
        content[place] ^= 1
    assert of_file(tmp_path / "none", True) == of_file(tmp_path / "none", False) == b"unreadable"


def test_other_libraries__what_they_can_say_and_what_is_the_same():
    def source(*colours):
        images = [(Image.new("RGB", (4, 4), colour), number % 2) for number, colour in enumerate(colours)]
        return DatasetSource(images, "x", np.array([label for _, label in images]), "ab", 3)

    one, other = (contents({"train": source(*colours)}) for colours in (("red", "blue"), ("red", "green")))
    assert one != other and one == contents({"train": source("red", "blue")})
    # scenes are drawn
    assert found("scenes:8") == found("scenes:8", "segment") == {}
    one = {"contents": {"train": "a", "val": "b"}}
    assert same_contents(one, one) and same_contents({}, one) and same_contents(one, {"contents": {"val": "b"}})
    other = {"contents": {"val": "c"}}
    assert not same_contents(one, {"contents": {"train": "a", "val": "c"}})
    assert not same_contents(one, other)
