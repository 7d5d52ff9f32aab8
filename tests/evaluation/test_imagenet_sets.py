"""ImageNet's family of sets, as empty files under the names of their images: nothing is decoded to be listed."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broadsight.evaluation import imagenet_sets
from broadsight.evaluation.imagenet_sets import SETS, find_sets, indices_of, open_set
from broadsight.runs.names import imagenet_names, synsets

from ..refusals import refused

# Written down, not computed: the first two and the last of their 200 classes
ENDS = {
    "a": {"n01498041": 6, "n01531178": 11, "n12267677": 988},
    "r": {"n01443537": 1, "n01484850": 2, "n12267677": 988},
}


def fill(root: Path, folders, image: str = "0.jpg") -> Path:
    """Class folders with an image in each, the same: hard links are quicker to make."""
    os.makedirs(root / ".one")
    (root / ".one" / image).touch()
    for name in folders:
        os.mkdir(root / name)
        os.link(root / ".one" / image, root / name / image)
    return root


def wnids(subset: str) -> list[str]:
    return [synsets()[index] for index in imagenet_sets._kept(f"imagenet-{subset}")]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    """All sets side by side, an image for each class."""
    root = tmp_path_factory.mktemp("family")
    fill(root / "val", synsets(), "ILSVRC2012_val_00000001.JPEG")
    fill(root / "sketch", synsets(), "sketch_0.JPEG")
    fill(root / "imagenetv2-matched-frequency-format-val", map(str, range(1000)))
    for name in ("imagenetv2-threshold0.7-format-val", "imagenetv2-top-images-format-val"):
        (root / name).symlink_to(root / "imagenetv2-matched-frequency-format-val")
    fill(root / "imagenet-a", wnids("a"))
    fill(root / "imagenet-r", wnids("r"), "art_0.jpg")
    (root / "imagenet-r" / "README.txt").touch()
    fill(root / "train", synsets())
    return root


def wrong(path: Path, name: str, *words: str) -> None:
    said = refused("", open_set, path, name)
    assert all(word in said for word in words)


def held(path: Path) -> list[str]:
    return list(find_sets(path))


def labels(found) -> dict[str, int]:
    """By class folder."""
    source = found.source
    return {source.name(row).partition("/")[0]: source.label(row) for row in range(len(source))}


def test_classes__by_hand():
    assert len(synsets()) == len(imagenet_names()) == len(set(imagenet_names())) == 1000
    assert synsets()[0] == "n01440764" and synsets()[999] == "n15075141"
    assert imagenet_names()[0] == "tench" and imagenet_names()[207] == "golden retriever"
    assert imagenet_names()[134] == "crane (n02012849)" and imagenet_names()[517] == "crane (n03126707)"
    assert indices_of(["n15075141", "n01440764"]).tolist() == [999, 0]
    numbers = sorted(map(str, range(1000)))
    assert numbers[2] == "10" and indices_of(numbers)[2] == 10
    assert indices_of([f"{number:04}" for number in range(1000)]).tolist() == list(range(1000))
    for strange in ([], ["cat"], ["n01440764", "cat"], ["n01440764", "0"], ["n00000001"], list("0123456789")):
        assert indices_of(strange) is None
    assert indices_of([*map(str, range(999)), "1000"]) is None


def test_imagenet(family):
    found = open_set(family / "val", "imagenet")
    assert (found.name, found.title) == ("imagenet", "ImageNet")
    assert held(family / "val") == ["imagenet", "imagenet-real"]
    assert labels(found) == {name: place for place, name in enumerate(synsets())}
    assert found.kept is None and found.accepted is None
    assert found.source.classes == synsets() and len(found.source) == 1000
    assert found.notes == (f"{family / 'val'} has 1,000 images; ImageNet has 50,000",)


@pytest.mark.parametrize("which", ["matched-frequency", "threshold-0.7", "top-images"])
def test_v2__numbers_by_value(family, which):
    name = f"imagenet-v2-{which}"
    folder = family / SETS[name].folder
    assert held(folder) == [name] and open_set(folder, name).path == folder
    found = open_set(folder, "imagenet-v2")
    assert (found.name, found.title) == (name, f"ImageNet-V2 {which}")
    assert labels(found) == {str(number): number for number in range(1000)}
    assert found.source.name(10) == "10/0.jpg" and found.source.classes[found.source.label(10)] == synsets()[10]
    assert found.kept is None


def test_v2__which_of_them(family, tmp_path):
    (tmp_path / "x").symlink_to(family / "imagenetv2-matched-frequency-format-val")
    assert held(tmp_path / "x") == ["imagenet-v2"] and open_set(tmp_path / "x", "imagenet-v2").title == "ImageNet-V2"
    assert open_set(tmp_path / "x", "imagenet-v2-top-images").title == "ImageNet-V2 top-images"  # its user knows
    text = "is ImageNet-V2 threshold-0.7 by its names, not ImageNet-V2 top-images; give the unpacked imagenetv2-top-"
    wrong(family / "imagenetv2-threshold0.7-format-val", "imagenet-v2-top-images", text)


@pytest.mark.parametrize(("subset", "ends"), ENDS.items())
def test_a_and_r__keep_200_classes(family, subset, ends):
    names = wnids(subset)
    assert len(names) == 200 and {names[0], names[1], names[-1]} == ends.keys()
    assert {name: synsets().index(name) for name in ends} == ends
    found = open_set(family / f"imagenet-{subset}", f"imagenet-{subset}")
    assert held(family / f"imagenet-{subset}") == [found.name] and found.title == f"ImageNet-{subset.upper()}"
    assert found.kept.shape == (200,) and (np.diff(found.kept) > 0).all() and set(ends.values()) <= set(found.kept)
    assert ends.items() <= labels(found).items()
    assert sorted(found.source.labels) == found.kept.tolist()
    logits = np.zeros(1000)
    logits[[0, 988, 11 if subset == "a" else 2]] = 3, 1, 2  # class 0 is in neither
    assert found.kept[logits[found.kept].argmax()] == (11 if subset == "a" else 2)


def test_sketch__told_by_its_images_or_its_name(family, tmp_path):
    (tmp_path / "other").symlink_to(family / "sketch")
    (tmp_path / "ImageNet_Sketch").symlink_to(family / "train")
    for folder in (family / "sketch", tmp_path / "other", tmp_path / "ImageNet_Sketch"):
        assert held(folder) == ["imagenet-sketch"]
    assert held(family / "train") == ["imagenet"]
    found = open_set(tmp_path / "other", "imagenet-sketch")
    assert found.title == "ImageNet-Sketch" and found.kept is None and labels(found)["n15075141"] == 999
    text = "is ImageNet-Sketch by its names, not ImageNet;"
    wrong(tmp_path / "other", "imagenet", text, "or name it imagenet-sketch")


def test_part_of_imagenet__is_no_set_and_images_of_a_set_are_read(family, tmp_path):
    for subset in "ar":  # the same class folders, but images of the validation set
        path = fill(tmp_path / subset, wnids(subset), "ILSVRC2012_val_00000001.JPEG")
        assert held(path) == []
        title = f"ImageNet-{subset.upper()}"
        wrong(path, f"imagenet-{subset}", f"has {title}'s class folders, but images of the validation set; give")
    path = fill(tmp_path / "few", ["n01440764", "n01443537"], "ILSVRC2012_val_00000001.JPEG")
    assert held(path) == []  # nor is the first class folder ReaL
    shutil.copytree(family / "imagenet-a", tmp_path / "copy")
    (tmp_path / "copy" / "n01498041" / "0.jpg").unlink()
    Image.new("RGB", (8, 8), (255, 0, 0)).save(tmp_path / "copy" / "n01498041" / "ray.png")
    found = open_set(tmp_path / "copy", "imagenet-a", channels=1)
    assert found.source.open(0).mode == "L" and found.source.open(0).size == (8, 8)


@pytest.fixture
def real(tmp_path) -> Path:
    """Labels of five images; of the others, none."""
    rows = [[1], [], [2, 5], [999], [0]] + [[]] * 49_995
    path = tmp_path / "real.json"
    path.write_text(json.dumps(rows))
    return path


def val_images(root: Path, count: int) -> None:
    (root / "val").mkdir()
    for number in range(1, count + 1):
        (root / "val" / f"ILSVRC2012_val_{number:08}.JPEG").touch()


def test_real__flat_folder(real, tmp_path):
    val_images(tmp_path, 4)
    found = open_set(tmp_path / "val", "imagenet-real", real=real)
    assert held(tmp_path / "val") == [found.name] == ["imagenet-real"] and found.title == "ImageNet ReaL"
    assert list(found.source.names) == [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 3, 4)]
    assert found.accepted == {0: (1,), 1: (2, 5), 2: (999,)}
    assert found.source.labels.tolist() == [1, 2, 999] and found.kept is None
    predicted = [1, 5, 998]
    assert [said in found.accepted[row] for row, said in enumerate(predicted)] == [True, True, False]
    assert found.notes == (
        f"{tmp_path / 'val'} has 4 images; ImageNet ReaL has 50,000",
        "1 images without labels in ImageNet ReaL are left out",
    )


def test_real__class_folders_keep_their_labels(real, tmp_path):
    for name, number in (("n01484850", 3), ("n01440764", 5), ("n01440764", 2)):
        path = tmp_path / "val" / name / f"ILSVRC2012_val_{number:08}_{name}.JPEG"  # as one archive has them
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = open_set(tmp_path / "val", "imagenet-real", real=real)
    assert labels(found) == {"n01440764": 0, "n01484850": 2}
    assert found.accepted == {0: (0,), 1: (2, 5)}
    found = open_set(tmp_path, "imagenet-real", real=real)  # a level too high
    assert found.path == tmp_path / "val" and len(found.source) == 2


def test_real__timms_labels(tmp_path):
    fill(tmp_path / "train", synsets()[:5])
    val_images(tmp_path, 23)
    found = open_set(tmp_path, "imagenet-real")
    assert found.path == tmp_path / "val" and held(tmp_path) == [found.name] == ["imagenet-real"]
    # the second image of the validation set shows an alp and a ski, the third a Shetland sheepdog or a collie
    assert found.accepted[0] == (970, 795) and found.accepted[1] == (230, 231)
    assert found.source.name(0) == "ILSVRC2012_val_00000002.JPEG" and len(found.source) == 21
    assert found.notes[-1] == "2 images without labels in ImageNet ReaL are left out"


def test_real__other_names(real, tmp_path):
    folder, one = tmp_path / "val", "ILSVRC2012_val_00000001"
    folder.mkdir()

    def said_of(*names):
        shutil.rmtree(folder)
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        return refused("", open_set, folder, "imagenet-real", real=real).replace(str(folder), "val")

    said = said_of("cat.jpg")
    assert said.startswith(f"val has no images called {one}.JPEG and so on, but cat.jpg; ImageNet ReaL goes by these")
    said = said_of("cat.jpg", f"{one}.JPEG", "ILSVRC2012_val_00050001.JPEG")
    assert said.startswith(f"2 of 3 images in val are not called {one}.JPEG to …00050000.JPEG: ILSVRC2012_val_00050001")
    assert said_of(f"{one}.JPEG", f"{one}.png").startswith("val has 1 images twice")
    assert said_of("ILSVRC2012_val_00000002.JPEG").startswith("none of the 1 images in val has labels in ImageNet ReaL")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[1], [2]]", "has 2 entries; expected 50,000 lists of classes from 0 to 999, as in ReaL's real.json"),
        ('{"a": 1}', "has a dict; expected 50,000 lists"),
        ("[[1], ", "is no JSON; expected"),
        (json.dumps([[0]] * 49_999 + [[1000]]), "entry 50,000 is [1000]; expected"),
        (json.dumps([[0], [-1]] + [[]] * 49_998), "entry 2 is [-1]; expected"),
        (json.dumps([[0], 7] + [[]] * 49_998), "entry 2 is 7; expected"),
        (json.dumps([[0.5]] + [[]] * 49_999), "entry 1 is [0.5]; expected"),
        (None, "no such file or directory; expected"),
    ],
    ids=range(8),
)
def test_real__wrong_labels(tmp_path, text, said):
    (tmp_path / "ILSVRC2012_val_00000001.JPEG").touch()
    if text is not None:
        (tmp_path / "real.json").write_text(text)
    found = refused(re.escape(said), open_set, tmp_path, "imagenet-real", real=tmp_path / "real.json")
    assert found.startswith(str(tmp_path / "real.json"))


def test_find_sets__also_one_level_too_high(family, tmp_path):
    found = [(name, path.name) for name, path in find_sets(family).items()]
    assert found == [(name, SETS[name].folder) for name in SETS if name != "imagenet-v2"]
    assert find_sets(family / "imagenet-a") == {"imagenet-a": family / "imagenet-a"}
    assert find_sets(tmp_path) == {}
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "imagenet-a").symlink_to(family / "imagenet-a")
    assert find_sets(tmp_path / "x") == {"imagenet-a": tmp_path / "x" / "imagenet-a"}
    assert open_set(tmp_path / "x", "imagenet-a").path == tmp_path / "x" / "imagenet-a"
    assert open_set(family, "imagenet-v2-top-images").path.name == "imagenetv2-top-images-format-val"
    assert open_set(family, "imagenet").path.name == "val"
    text = "has several folders of the shape of ImageNet-V2: imagenetv2-matched-frequency-format-val/, "
    wrong(family, "imagenet-v2", text, "; give one of")


def test_find_sets__deeper_broken_and_twice(family, tmp_path):
    for name, target in (("v2/top-images", "imagenetv2-top-images-format-val"), ("zoo/val", "val"), ("old", "sketch")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(family / target)
    (tmp_path / "sketch").symlink_to(family / "sketch")
    fill(tmp_path / "imagenet-r", ["n01443537"])
    fill(tmp_path / "val", ["cat"])
    found = {name: path.relative_to(tmp_path).as_posix() for name, path in find_sets(tmp_path).items()}
    assert found == {
        "imagenet": "zoo/val",
        "imagenet-real": "zoo/val",
        "imagenet-v2-top-images": "v2/top-images",
        "imagenet-r": "imagenet-r",  # in order to be told what is wrong with it
        "imagenet-sketch": "sketch",
    }
    fill(tmp_path / "pacs" / "sketch", ["dog"])
    assert find_sets(tmp_path / "pacs") == {}


def test_wrong__place_and_classes(family, tmp_path):
    wrong(tmp_path / "none", "imagenet-a", "no such folder: ", "none; give the folder of an unpacked set")
    (tmp_path / "a.tar").touch()
    wrong(tmp_path / "a.tar", "imagenet-a", "a.tar is a file; unpack it and give the folder")
    wrong(tmp_path, "imagenet-r", "has no class folders; ImageNet-R has 200, called n01443537, …; give the unpacked")
    wrong(tmp_path, "imagenet-v2", "has no class folders; ImageNet-V2 has 1,000, called 0 to 999; give")
    path = fill(tmp_path / "a", [*wnids("a")[2:], "n00000001"])
    text = "a has 199 class folders, 198 of ImageNet-A's 200; missing n01498041, n01531178; not of them n00000001; "
    wrong(path, "imagenet-a", f"{text}give the unpacked imagenet-a folder")
    path = fill(tmp_path / "pets", ["cat", "dog", "bird", "cow", "x"])
    text = "has 5 class folders, 0 of ImageNet's 1,000; missing n01440764, n01443537, n01484850 and 997"
    wrong(path, "imagenet", text, "not of them bird, cat, cow and 2 more; give the unpacked val folder")
    wrong(
        path, "imagenet-v2", "0 of ImageNet-V2's 1,000, which are called 0 to 999; missing 0, 1, 2 and 997 more; not of"
    )
    path = fill(tmp_path / "digits", map(str, range(10)))
    assert held(path) == []
    wrong(
        path, "imagenet-v2", "digits has 10 class folders, 10 of ImageNet-V2's 1,000", "missing 10, 11, 12 and 987 more"
    )
    text = "is ImageNet-R by its names, not ImageNet-A; give the unpacked imagenet-a"
    wrong(family / "imagenet-r", "imagenet-a", text, "or name it imagenet-r")
    wrong(family / "val", "imagenet-sketch", "is ImageNet by its names, not ImageNet-Sketch")


def test_wrong__v2(tmp_path):
    path = fill(tmp_path / "x", [*map(str, range(999)), "007"])
    wrong(path, "imagenet-v2", "x has 1,000 class folders, 999 of", "; missing 999; two of one number; give")
    (path / "007").rename(path / "1000")
    wrong(path, "imagenet-v2", "; missing 999; not of them 1000; give")
    (path / "1000").rename(path / "999")
    assert held(path) == ["imagenet-v2"]
    (path / "0" / "0.jpg").rename(path / "0" / "ILSVRC2012_val_00000001.JPEG")
    wrong(path, "imagenet-v2", "has ImageNet-V2's class folders, but images of the validation set; give the unpacked")
    for name in ("3", "20"):
        (path / name / "0.jpg").unlink()
    (path / "0" / "ILSVRC2012_val_00000001.JPEG").rename(path / "0" / "0.jpg")
    wrong(path, "imagenet-v2", "has 2 of 1,000 class folders without images: 3, 20; unpack ImageNet-V2 again")
