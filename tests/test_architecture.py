"""docs/architecture.md: all rooms are in it, and each walk passes the files that it names, in that order."""

import re
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import broadsight
from broadsight.cli.main import main

from .training.small_runs import fill

ROOT = Path(broadsight.__file__).parent
TEXT = (ROOT.parent / "docs" / "architecture.md").read_text("utf-8")
SMALL = ["--device", "cpu", "--workers", "0"]
RUN = ["train", "scenes:24", "--model", "test_resnet", "--epochs", "1", "--size", "32", "--batch", "8", *SMALL]
DETECTOR = ["train", "scenes:16", "--task", "detect", "--model", "test_resnet", "--epochs", "1", "--size", "64"]
DETECTOR += ["--batch", "4", "--no-report", *SMALL, "--out", "detector"]
POOL = dict(groups=2, dim=16, heads=2, mlp_dim=32)


def entered(call: Callable[[], object]) -> list[str]:
    """Files of the package in the order in which their functions are first called."""
    found: dict[str, None] = {}

    def watch(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_flags & 1 and file.startswith(f"{ROOT}/"):  # no body of a class
            found.setdefault(str(Path(file).relative_to(ROOT)))

    sys.setprofile(watch)
    threading.setprofile(watch)
    try:
        assert call() in (0, None) or True
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)


WALKS: dict[str, Callable[[], object]] = {
    "Train a classifier": lambda: main([*RUN, "--out", "run"]),
    "Train a detector": lambda: main(DETECTOR),
    "Predict": lambda: main(["predict", "run", "images", "--csv", "all.csv", *SMALL]),
    "Swap the pooling": lambda: broadsight.swap_pool("test_resnet", "map", pretrained=False, **POOL),
    "Export in int8": lambda: main(["export", "run", "--int8", "--calibration-images", "8", "--max-drop", "100"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("walks")
    fill(folder / "images", 40, some=2)
    return folder


@pytest.mark.parametrize("title", WALKS)
def test_walk__passes_the_files_in_order(title, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    files = re.findall(r"`([\w/]+\.py)`", TEXT.split(f"### {title}\n")[1].split("\n### ")[0])
    for file in files:  # what is called while a module is imported is no part of the walk
        import_module("broadsight." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    passed = entered(WALKS[title])
    assert len(files) == len(set(files)) > 5
    assert [file for file in passed if file in files] == files


def test_rooms__are_all_named():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"losses"}
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == rooms
