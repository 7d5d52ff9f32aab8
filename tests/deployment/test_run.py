"""An artefact stays only if it was opened again and computes the same; else nothing does."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broadsight.deployment import FORMATS, Session, open_artefact
from broadsight.deployment.run import Disagreement, check_request, check_target, write_artefact
from broadsight.deployment.subject import digest, of_classifier
from broadsight.runs.classifier import open_classifier

from .tiny import ask


@pytest.fixture(scope="module")
def subject():
    classifier = open_classifier("test_resnet", pretrained=False, device="cpu", size=64, model_args={"num_classes": 5})
    return of_classifier(classifier, "a test", count=3)


def test_export__opens_compares_times_and_records(subject, tmp_path):
    steps = []
    found = write_artefact(
        subject,
        tmp_path / "net.pt2",
        ask("pt2", rounds=2),
        progress=lambda *step: steps.append(step[:2]),
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.pt2", "net.pt2.export.json"]
    assert found.bytes == (tmp_path / "net.pt2").stat().st_size
    assert found.agreement.images == 3 and found.agreement.relative < 1e-5 and found.agreement.same_class == 1
    assert found.times is not None and found.times.speedup.median > 0
    assert steps[0] == (0, 5) and steps[-1] == (5, 5)
    said = json.loads((tmp_path / "net.pt2.export.json").read_text())
    assert said["agreement"]["images"] == 3 and said["description"]["provenance"]["command"] == "a test"
    session = open_artefact(tmp_path / "net.pt2")
    assert session.description == found.description
    images = np.concatenate(subject.images(None))
    np.testing.assert_allclose(session(images)["logits"], subject.reference(images)[0], atol=1e-5)


def test_export__any_size_is_compared_at_two(subject, tmp_path):
    found = write_artefact(subject, tmp_path / "net.pt2", ask("pt2", any_size=True, rounds=0))
    assert found.agreement.images == 5 and found.times is None
    one = subject.images(83)[0]
    assert one.shape == (1, 3, 83, 83)
    session = open_artefact(tmp_path / "net.pt2")
    np.testing.assert_allclose(session(one)["logits"], subject.reference(one)[0], atol=1e-5)


def test_export__a_single_image_at_a_time(subject, tmp_path):
    found = write_artefact(subject, tmp_path / "net.pt2", ask("pt2", any_batch=False, rounds=0))
    assert found.description.image["any_batch"] is False
    images = np.concatenate(subject.images(None))
    assert open_artefact(tmp_path / "net.pt2")(images)["logits"].shape == (3, 5)


def off_by(amount: float):
    def opened(self):
        def session_of(path: Path, threads: int | None = None) -> Session:
            session = original(path, threads)
            return Session(session.description, lambda images: [session(images)["logits"] + np.float32(amount)])

        return session_of

    original = FORMATS["pt2"].open
    return property(opened)


@pytest.mark.parametrize("amount", [0.5, float("nan")])
def test_export__what_differs_is_not_written(subject, tmp_path, monkeypatch, amount):
    monkeypatch.setattr("broadsight.deployment.formats.Format.open", off_by(amount))
    before = tmp_path / "net.pt2"
    before.write_text("an earlier one")
    with pytest.raises(Disagreement, match=r"differs from torch by .* nothing was written"):
        write_artefact(subject, before, ask("pt2"))
    assert [file.name for file in tmp_path.iterdir()] == ["net.pt2"] and before.read_text() == "an earlier one"


def test_export__a_small_difference_passes(subject, tmp_path, monkeypatch):
    monkeypatch.setattr("broadsight.deployment.formats.Format.open", off_by(1e-6))
    found = write_artefact(subject, tmp_path / "net.pt2", ask("pt2", rounds=0))
    assert 5e-7 < found.agreement.largest < 5e-6


def test_export__weights_that_magnify_rounding_are_told_from_a_wrong_artefact(subject, tmp_path, monkeypatch):
    monkeypatch.setattr("broadsight.deployment.formats.Format.open", off_by(0.5))
    monkeypatch.setattr("broadsight.deployment.run.rounding_of", lambda model, batches: 100.0)
    found = write_artefact(subject, tmp_path / "net.pt2", ask("pt2", rounds=0))
    assert found.agreement.relative > 1e-3 and found.agreement.rounding == 100
    with pytest.raises(Disagreement):  # who asks for less means it
        write_artefact(subject, tmp_path / "strict.pt2", ask("pt2", tolerance=1e-4, rounds=0))
    assert not (tmp_path / "strict.pt2").exists()


def test_export__a_failing_writer_leaves_nothing(subject, tmp_path, monkeypatch):
    def broken(program, description, path):
        path.write_text("half")
        raise KeyError("no such\noperator")

    monkeypatch.setattr(FORMATS["pt2"], "write", broken)
    with pytest.raises(RuntimeError, match="cannot be written as pt2: KeyError"):
        write_artefact(subject, tmp_path / "net.pt2", ask("pt2"))
    assert not list(tmp_path.iterdir())


def test_export__an_obstacle_to_any_size_is_named(subject, tmp_path):
    tied = replace(subject, obstacle="its positions are learned")
    with pytest.raises(ValueError, match="takes one size: its positions are learned"):
        write_artefact(tied, tmp_path / "net.pt2", ask("pt2", any_size=True))
    assert not list(tmp_path.iterdir())


def test_check_request__refuses_what_a_format_cannot():
    pytest.importorskip("executorch")
    with pytest.raises(ValueError, match="--any-size with the format executorch"):
        check_request(ask("executorch", any_size=True))


@pytest.mark.parametrize("changes", [{"tolerance": 0.0}, {"tolerance": float("nan")}, {"threads": 0}, {"rounds": -1}])
def test_check_request__refuses_numbers(changes):
    with pytest.raises(ValueError, match="expected"):
        check_request(ask("pt2", **changes))


def test_check_target(tmp_path):
    form = FORMATS["pt2"]
    check_target(tmp_path / "new" / "net.pt2", form)
    with pytest.raises(ValueError, match=r"ending in \.pt2"):
        check_target(tmp_path / "net.onnx", form)
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        check_target(tmp_path / "folder.pt2", form)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        check_target(tmp_path / "file" / "net.pt2", form)


def test_digest__is_of_the_weights(subject):
    before = digest(subject.model)
    weight = next(subject.model.parameters())
    weight.data[0] += 1
    changed = digest(subject.model)
    weight.data[0] -= 1
    assert len(before) == 64 and before != changed
