"""The models of the page: those named, the newest runs, or an untrained one; and none that was not meant."""

import os
import threading

import pytest
import torch

from broadsight.app import candidates as module
from broadsight.app.candidates import Candidates, newest_runs, open_candidates, untrained
from broadsight.data.scenes import CLASSES
from tests.training.small_runs import leave_run, refusal


@pytest.fixture
def found(model):
    return Candidates([model], device="cpu")


def test_open__a_run_and_a_timm_name(tmp_path):
    folder, _ = leave_run(tmp_path / "mine")
    found = open_candidates([str(folder), "test_resnet"], pretrained=False, size=None)
    assert found.names == ["mine", "test_resnet (untrained)"]
    assert [one.trained for one in found.given.values()] == [True, False]
    assert found.untrained == ["test_resnet (untrained)"]
    assert found.classifiers == found.names


def test_open__same_titles_get_the_folders_names(tmp_path):
    one, two = leave_run(tmp_path / "a" / "run")[0], leave_run(tmp_path / "b" / "run")[0]
    assert open_candidates([str(one), str(two), str(one)]).names == ["run (run)", "run (run) 2"]


def test_open__nothing_named_takes_the_newest_runs(tmp_path):
    for place, name in enumerate(("old", "middle", "new", "newest")):
        folder, _ = leave_run(tmp_path / name)
        os.utime(folder / "model.safetensors", (place, place))
    leave_run(tmp_path / "newest" / "twin-gap")
    os.utime(tmp_path / "newest" / "twin-gap" / "model.safetensors", (9, 9))
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "damaged" / "model.safetensors").write_text("")
    assert [path.name for path in newest_runs(tmp_path)] == ["twin-gap", "newest", "new"]
    assert open_candidates(runs=tmp_path).names == ["twin-gap", "newest", "new"]


def test_open__a_broken_run_is_left_out_and_named(tmp_path):
    leave_run(tmp_path / "good")
    (leave_run(tmp_path / "bad")[0] / "model.safetensors").write_bytes(b"nothing")
    found = open_candidates(runs=tmp_path)
    assert found.names == ["good"]
    assert "left out" in found.notes[0] and "bad" in found.notes[0]


def test_open__no_run_at_all_gives_the_untrained_model(tmp_path):
    found = open_candidates(runs=tmp_path / "none")
    assert found.names == found.untrained == ["resnet10t-map (untrained)"]
    classifier = found.of(found.names[0]).run
    assert classifier.labels == CLASSES
    with torch.inference_mode():
        assert classifier.logits(torch.zeros(1, 3, 96, 96)).shape == (1, 10)


def test_untrained__the_same_at_every_start_and_leaves_the_seed_alone():
    torch.manual_seed(3)
    one = untrained("cpu").run
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)
    two = untrained("cpu").run
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_open__refuses_what_does_not_fit(tmp_path):
    assert "expected exactly one" in refusal(lambda: open_candidates(["a", "b"], checkpoint="x"))
    assert "for a timm name" in refusal(lambda: open_candidates(checkpoint="x", runs=tmp_path))
    assert "there is no run" in refusal(lambda: open_candidates(["runs/none"]), FileNotFoundError)


def test_open__a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in refusal(lambda: open_candidates(device="cuda"))


def test_of__only_names_of_the_list(found):
    for name in ("../../etc/passwd", "hf-hub:timm/resnet18", None, 3, ["a"], {"path": "/etc"}, "x" * 10_000):
        assert "choose from the list" in refusal(lambda name=name: found.of(name))
        assert len(refusal(lambda name=name: found.of(name))) < 150


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18", "local-dir:/tmp", "/etc/passwd", "no_such_net", None, 7])
def test_added__nothing_but_timms_own_names(found, name, monkeypatch):
    monkeypatch.setattr(module, "open_classifier", lambda *_, **__: pytest.fail("opened"))
    assert "timm has no model" in refusal(lambda: found.added(name))


def test_added__random_weights_and_not_too_many_at_once(found, monkeypatch):
    one = found.added("test_resnet")
    assert not one.trained and found.added("test_resnet") is one
    assert found.names == ["resnet10t-map (untrained)"]  # others do not see what somebody adds
    monkeypatch.setattr(module, "MOST_PARAMETERS", one.run.parameters + 1)
    found.added("test_efficientnet")
    assert found.added("test_resnet") is not one


def test_added__too_large_ones_are_refused_before_they_are_made(found, monkeypatch):
    monkeypatch.setattr(module, "open_classifier", lambda *_, **__: pytest.fail("made"))
    monkeypatch.setattr(module, "MOST_MACS", 1e6)
    assert "G MACs, too much" in refusal(lambda: found.added("test_resnet"))
    monkeypatch.setattr(module, "MOST_PARAMETERS", 1e5)
    assert "0 M parameters" in refusal(lambda: found.added("test_resnet"))
    assert "broadsight bench test_resnet" in refusal(lambda: found.added("test_resnet"))


def test_computing__one_at_a_time(found):
    taken = []

    def attempt() -> None:
        taken.append(found.computing.acquire(blocking=False))

    with found.computing:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    assert taken == [False]
