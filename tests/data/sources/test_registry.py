"""Data sources: every one is registered in its own module, and users register theirs by the same call."""

import pytest

from broadsight.data.sources import Options, Part, registry, resolve
from broadsight.data.sources.evaluation import open_part
from broadsight.data.sources.registry import named_source, register_source, registered_sources
from broadsight.data.view import View
from tests.refusals import refused

from ..reading import Shades, fill, said


@pytest.fixture
def register(monkeypatch):
    """`register_source` for a source of two classes; what is registered goes after the test."""
    registered_sources()
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))

    def register(kind: str, *names: str, parts=("all",), **options) -> list[tuple[str, Options]]:
        asked = []

        @register_source(kind, *names, **options)
        def opened(data: str, options: Options):
            asked.append((data, options))
            return {part: Part(Shades(20), f"{data} {part}") for part in parts}

        return asked

    return register


def test_registered__all_that_the_modules_define():
    kinds = {one.kind: one for one in registered_sources()}
    assert kinds.keys() == {"coco", "elpv", "fashion-mnist", "folder", "list", "scenes", "tar", "timm"}
    assert all(named_source(one.known[0]) is one for one in kinds.values() if one.known)


def test_register__by_name(register, tmp_path, monkeypatch):
    asked = register("shades", "shades", "shades:", known=["shades"])
    splits = resolve("shades", split=0.2, channels=1, cache=tmp_path)
    assert splits.classes == ("even", "odd") and (len(splits.train), len(splits.val)) == (16, 4)
    assert isinstance(splits.train, View) and splits.description["kind"] == "shades"
    assert [splits.val.label(row) for row in range(4)].count(0) == 2 and splits.val.open(0).size == (4, 3)
    assert asked == [("shades", Options(1, tmp_path))]
    assert open_part("shades:20", seed=3).place == "shades:20 all" and asked[-1][1].seed == 3
    refused(r"did you mean shades\?", resolve, "shade", error=FileNotFoundError)
    refused("download is for timm datasets", resolve, "shades", download=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shades").mkdir()
    assert said(resolve("shades"), "shades is the built-in data set; the folder of that name is ./shades")


def test_register__by_file_folder_or_beginning(register, tmp_path):
    asked = register("shades", ".sh", "dark/", claims=lambda path: (path / "shades").is_file(), downloads=True)
    (tmp_path / "x.SH").touch()
    (tmp_path / "shades").touch()
    fill(tmp_path, a=2, b=2)
    for data in (tmp_path / "x.SH", tmp_path, "dark/room"):
        assert resolve(data).description["kind"] == "shades" and asked[-1][0] == str(data)
    (tmp_path / "shades").unlink()
    assert resolve(tmp_path).description["kind"] == "folder"
    assert resolve("dark/room", root="here", download=True).train and asked[-1][1].root == "here"


def test_register__parts_of_its_own(register):
    register("shades", "shades", parts=("train", "val"))
    splits = resolve("shades")
    assert (splits.train.name(0), len(splits.val)) == ("0.png", 20)
    refused("split=0.5, but shades val is set apart to validate; leave split out", resolve, "shades", split=0.5)
