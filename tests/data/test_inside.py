"""Lists and COCO files that name what lies elsewhere: refused with the entry and the way out, or allowed."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from broadsight.cli.main import main
from broadsight.data.inside import is_inside, outside_allowed
from broadsight.data.sources import resolve
from broadsight.data.sources.coco import CocoDataset
from broadsight.data.sources.unlabelled import find_images
from tests.refusals import refused

from ..training.small_runs import SIZE
from .reading import counts, put


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder with four images, and one beside it that is none of its business."""
    for number in range(8):
        put(tmp_path / "data" / "images" / f"{number}.png", number, (40, 30))
    put(tmp_path / "secret.png", 200, (40, 30))
    return tmp_path / "data"


def write_list(data: Path, *more: str) -> Path:
    lines = [f"images/{number}.png,{'ab'[number % 2]}" for number in range(8)] + [f"{name},a" for name in more]
    (data / "list.csv").write_text("\n".join(["path,label", *lines]), "utf-8")
    return data / "list.csv"


def write_coco(data: Path, *more: str, folder: str = "", images: str = "images") -> Path:
    names = [*(f"{images}/{number}.png" for number in range(8)), *more]
    listed = [dict(id=number, file_name=name, width=40, height=30) for number, name in enumerate(names)]
    boxes = [dict(id=n, image_id=n, category_id=1 + n % 2, bbox=[2, 2, 20, 20], area=400) for n in range(len(names))]
    categories = [dict(id=1, name="a"), dict(id=2, name="b")]
    file = data / folder / "coco.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(dict(images=listed, annotations=boxes, categories=categories)), "utf-8")
    return file


objects = partial(CocoDataset, masks=False)


def named_images(file: Path):
    return find_images([], file)[0]


@pytest.mark.parametrize("name", ["../secret.png", "images/../../secret.png", "{there}/secret.png"])
@pytest.mark.parametrize(("write", "read"), [(write_list, named_images), (write_coco, objects)])
def test_files__elsewhere(data, write, read, name):
    file = write(data, name := name.format(there=data.parent))
    said = f"^{file} names 1 file outside of {data}: {name}; if they are meant, add --allow-outside"
    refused(said, resolve, file)
    refused(said, read, file)
    with outside_allowed():
        assert len(read(file)) == sum(counts(resolve(file))) == 9


def test_list__absolute_paths_and_links_into_and_out_of_its_own_folder(data):
    """Links are what a user has put there himself."""
    (data / "link.png").symlink_to(data.parent / "secret.png")
    file = write_list(data, str(data / "images" / "0.png"), "images/../images/1.png", "link.png")
    assert sum(counts(resolve(file))) == 11
    (data / "away").symlink_to(data.parent.parent)
    assert not is_inside("away/../secret.png", [data]) and is_inside("away/secret.png", [data])
    assert not is_inside("..", [data]) and is_inside("a..b/c...png", [data])
    # a COCO file in `annotations` may name what is beside that folder
    assert len(objects(write_coco(data, folder="annotations", images="../images"))) == 8
    refused("names 8 files outside of", objects, write_coco(data, folder="odd", images="../images"))


def test_commands(data, tmp_path, monkeypatch, capsys):
    """The option is one of train, eval and predict; a run remembers it."""
    monkeypatch.chdir(tmp_path)
    file = str(write_list(data, "../secret.png"))
    small = ["--model", "test_resnet", "--size", str(SIZE), "--epochs", "1", "--batch", "2", "--set", "warmup_epochs=0"]
    train = ["train", file, *small, "--workers", "0", "--threads", "1", "--no-report", "--out", "run"]

    def complaint(arguments: list[str]) -> str:
        assert main(arguments) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "--allow-outside" in complaint(train) and not os.path.exists("run")
    assert main([*train, "--allow-outside"]) == 0
    assert main(["train", "--resume", "--out", "run", "--threads", "1"]) == 0
    assert main(["eval", "run", "--threads", "1", "--workers", "0", "--no-latency"]) == 0
    capsys.readouterr()
    names = tmp_path / "data" / "names.txt"
    names.write_text("../secret.png\n", "utf-8")
    for command in ("predict", "explain"):
        assert "--allow-outside" in complaint([command, "run", "--list", str(names)])
    assert main(["predict", "run", "--list", str(names), "--allow-outside", "--threads", "1"]) == 0
    assert "--allow-outside" in complaint(["predict", "run", "--list", str(names)])  # it ends with its command
    if hasattr(os, "mkfifo"):
        os.mkfifo("options.yaml")
        words = "--config options.yaml is a pipe, not a file; expected a YAML file"
        assert words in complaint(["train", "--config", "options.yaml"])
