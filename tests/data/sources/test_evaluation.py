"""Which images of DATA are evaluated."""

import numpy as np
import pytest

from broadsight.data.sources import resolve
from broadsight.data.sources.evaluation import open_part, same_data
from broadsight.data.view import labels_of
from tests.refusals import refused

from ...training.small_runs import fill
from ..reading import rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    fill(folder / "parts" / "train", 8, a=4, b=4)
    fill(folder / "parts" / "val", 8, a=1, b=2)
    fill(folder / "whole", 8, a=10, b=20)
    return folder


@pytest.mark.parametrize(("part", "taken", "count"), [("auto", "val", 3), ("val", "val", 3), ("train", "train", 8)])
def test_parts__validation_unless_asked_otherwise(folder, part, taken, count):
    found = open_part(str(folder / "parts"), part)
    assert len(found.source) == count and found.description.items() >= dict(images=count, part=taken).items()


def test_whole__all_of_it_or_what_training_held_out(folder):
    whole = str(folder / "whole")
    found = open_part(whole)
    assert np.bincount(labels_of(found.source)).tolist() == [10, 20]
    assert (found.description["part"], found.place) == ("all", whole)
    found = rows(open_part(whole, split=0.2, seed=3).source)
    assert list(found) == list(rows(resolve(whole, split=0.2, seed=3).val)) and len(found) == 6
    assert len(open_part(whole, "train", split=0.2, seed=3).source) == 24


def test_scenes__each_part(tmp_path):
    found = open_part("scenes:40", seed=2, scenes_size=16, cache=tmp_path)
    assert (len(found.source), found.source.name(0), found.source.open(0).size) == (10, "scenes/val/000000", (16, 16))
    assert len(open_part("scenes:40", "train", cache=tmp_path).source) == 40
    assert open_part("scenes", "test", cache=tmp_path).place == "scenes/test"
    assert open_part("scenes:40", channels=1, scenes_size=16, cache=tmp_path).source.open(0).mode == "L"


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("whole", dict(part="val"), "has no part 'val'; it has all; leave --part out"),
        ("parts", dict(part="all"), "has no part 'all'; it has train, val; leave"),
        ("whole", dict(split=1.5), "split=1.5 is not between 0 and 1"),
        ("scenes", dict(part="all"), "scenes has no part 'all'; it has train, val, test; leave --part out"),
        ("scenes", dict(split=0.5), "--split 0.5, but scenes has parts of its own: train, val, test; leave --split"),
    ],
)
def test_refused(folder, data, options, message):
    refused(message, open_part, data if data.startswith("scenes") else str(folder / data), **options)


def test_part__train_alone_is_noted(tmp_path):
    fill(tmp_path / "train", 8, a=2, b=2)
    found = open_part(str(tmp_path))
    assert len(found.source) == 4 and "a part to train on alone, so that one is evaluated" in found.notes[0]


def test_same_data__by_any_path(folder):
    whole = str(folder / "whole")
    assert same_data("scenes", "scenes") and not same_data("scenes", "scenes:40")
    assert same_data(whole, whole + "/") and same_data(whole, whole + "/../" + whole.rpartition("/")[2])
    assert not same_data(whole, whole + "/a")
