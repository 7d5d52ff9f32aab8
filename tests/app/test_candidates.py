"""The models of the page: those named, the newest runs, or an untrained one; and none that was not meant."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from broadsight.app import candidates as module
from broadsight.app.candidates import Candidates, newest_runs, open_candidates, untrained
from broadsight.data.scenes import CLASSES
from tests.training.small_runs import leave_run, refusal


@pytest.fixture
def found(model):
    return Candidates([model], device="cpu")


def test_open__runs_and_timm_names_no_two_called_alike(tmp_path):
    folder, _ = leave_run(tmp_path / "mine")
    found = open_candidates([str(folder), "test_resnet"], pretrained=False, size=None)
    assert found.names == found.classifiers == ["mine", "test_resnet (untrained)"]
    assert [one.trained for one in found.given.values()] == [True, False]
    assert found.untrained == ["test_resnet (untrained)"]
    one, two = leave_run(tmp_path / "a" / "run")[0], leave_run(tmp_path / "b" / "run")[0]
    assert open_candidates([str(one), str(two), str(one)]).names == ["run (run)", "run (run) 2"]


def test_open__nothing_named_takes_the_newest_runs(tmp_path):
    for place, name in enumerate(("old", "middle", "new", "newest")):
        folder, _ = leave_run(tmp_path / name)
        os.utime(folder / "model.safetensors", (place, place))
    leave_run(tmp_path / "newest" / "twin-gap")
    os.utime(tmp_path / "newest" / "twin-gap" / "model.safetensors", (9, 9))
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "damaged" / "model.safetensors").write_text("")
    assert [path.name for path in newest_runs(tmp_path)] == ["twin-gap", "newest", "new"]
    assert open_candidates(runs=tmp_path).names == ["twin-gap", "newest", "new"]
    (tmp_path / "newest" / "model.safetensors").write_bytes(b"nothing")  # now the newest
    found = open_candidates(runs=tmp_path)
    assert found.names == ["twin-gap", "new"]
    assert len(found.notes) == 1 and "left out" in found.notes[0] and "newest" in found.notes[0]


def test_open__no_run_at_all_gives_the_untrained_model(tmp_path):
    found = open_candidates(runs=tmp_path / "none")
    assert found.names == found.untrained == ["resnet10t-map (untrained)"]
    classifier = found.of(found.names[0]).run
    assert classifier.labels == CLASSES
    with torch.inference_mode():
        assert classifier.logits(torch.zeros(1, 3, 96, 96)).shape == (1, 10)
    torch.manual_seed(3)
    one, after = untrained("cpu").run.model, torch.rand(1)  # the same at every start, and the seed is left alone
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)
    assert all(map(torch.equal, one.parameters(), untrained("cpu").run.model.parameters()))


def test_open__refuses_what_does_not_fit(tmp_path, monkeypatch):
    assert "expected exactly one" in refusal(lambda: open_candidates(["a", "b"], checkpoint="x"))
    assert "for a timm name" in refusal(lambda: open_candidates(checkpoint="x", runs=tmp_path))
    assert "there is no run" in refusal(lambda: open_candidates(["runs/none"]), FileNotFoundError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in refusal(lambda: open_candidates(device="cuda"))


def test_names__only_those_of_the_lists(found, monkeypatch):
    monkeypatch.setattr(module, "open_classifier", lambda *_, **__: pytest.fail("opened"))
    paths = ("../../etc/passwd", "hf-hub:timm/resnet18", "local-dir:/tmp", {"path": "/etc"})
    for name in (*paths, None, 3, ["a"], "x" * 999):
        for ask, words in ((found.of, "choose from the list"), (found.added, "timm has no model")):
            said = refusal(lambda ask=ask, name=name: ask(name))
            assert words in said and len(said) < 150


def test_added__random_weights_and_not_too_many_at_once(found, monkeypatch):
    one = found.added("test_resnet")
    assert not one.trained and found.added("test_resnet") is one
    assert found.names == ["resnet10t-map (untrained)"]  # others do not see what somebody adds
    monkeypatch.setattr(module, "MOST_PARAMETERS", one.run.parameters + 1)
    found.added("test_efficientnet")
    assert found.added("test_resnet") is not one
    with found.computing, ThreadPoolExecutor(1) as pool:  # one at a time
        assert not pool.submit(found.computing.acquire, blocking=False).result()
    # too large ones are refused before they are made
    monkeypatch.setattr(module, "open_classifier", lambda *_, **__: pytest.fail("made"))
    monkeypatch.setattr(module, "MOST_MACS", 1e6)
    assert "G MACs, too much" in refusal(lambda: found.added("test_vit"))
    monkeypatch.setattr(module, "MOST_PARAMETERS", 1e5)
    assert "0 M parameters" in refusal(lambda: found.added("test_vit"))
    assert "broadsight bench test_vit" in refusal(lambda: found.added("test_vit"))
