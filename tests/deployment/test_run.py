"""An artefact stays only if it was opened again and computes the same; else nothing does."""

import json
from dataclasses import replace

import numpy as np
import pytest

import broadsight
from broadsight.deployment import FORMATS, open_artefact
from broadsight.deployment.run import Disagreement, check_request, check_target, write_artefact
from broadsight.deployment.subject import of_classifier, provenance
from broadsight.runs.classifier import open_classifier
from tests.refusals import refused

from .tiny import ask, shifted

OPEN = "broadsight.deployment.formats.Format.open"


@pytest.fixture(scope="module")
def subject():
    classifier = open_classifier("test_resnet", pretrained=False, device="cpu", size=64, model_args={"num_classes": 5})
    return of_classifier(classifier, "a test", count=3)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "net.pt2"


def test_export__opens_compares_times_and_records(subject, target):
    steps = []
    found = write_artefact(subject, target, ask("pt2", rounds=2), progress=lambda *step: steps.append(step[:2]))
    assert sorted(file.name for file in target.parent.iterdir()) == ["net.pt2", "net.pt2.export.json"]
    assert found.bytes == target.stat().st_size
    assert found.agreement.images == 3 and found.agreement.relative < 1e-5 and found.agreement.same_class == 1
    assert found.times is not None and found.times.speedup.median > 0
    assert steps[0] == (0, 5) and steps[-1] == (5, 5)
    said = json.loads((target.parent / "net.pt2.export.json").read_text())
    assert said["agreement"]["images"] == 3 and said["description"]["provenance"]["command"] == "a test"
    session = open_artefact(target)
    assert session.description == found.description
    images = np.concatenate(subject.images(None))
    np.testing.assert_allclose(session(images)["logits"], subject.reference(images)[0], atol=1e-5)


def test_export__any_size_is_compared_at_two_and_a_single_image_alone(subject, target):
    found = write_artefact(subject, target, ask("pt2", any_size=True, rounds=0))
    assert found.agreement.images == 5 and found.times is None
    one = subject.images(83)[0]
    assert one.shape == (1, 3, 83, 83)
    np.testing.assert_allclose(open_artefact(target)(one)["logits"], subject.reference(one)[0], atol=1e-5)
    found = write_artefact(subject, target, ask("pt2", any_batch=False, rounds=0))
    assert found.description.image["any_batch"] is False
    assert open_artefact(target)(np.concatenate(subject.images(None)))["logits"].shape == (3, 5)


@pytest.mark.parametrize("amount", [0.5, float("nan")])
def test_export__what_differs_is_not_written(subject, target, monkeypatch, amount):
    monkeypatch.setattr(OPEN, shifted(FORMATS["pt2"].open, amount))
    target.write_text("an earlier one")
    said = refused("differs from torch by", write_artefact, subject, target, ask("pt2"), error=Disagreement)
    assert said.endswith("nothing was written")
    assert [*target.parent.iterdir()] == [target] and target.read_text() == "an earlier one"


def test_export__small_differences_pass_and_those_of_weights_that_magnify_rounding(subject, target, monkeypatch):
    original = FORMATS["pt2"].open
    monkeypatch.setattr(OPEN, shifted(original, 1e-6))
    assert 5e-7 < write_artefact(subject, target, ask("pt2", rounds=0)).agreement.largest < 5e-6
    monkeypatch.setattr(OPEN, shifted(original, 0.5))
    monkeypatch.setattr("broadsight.deployment.run.rounding_of", lambda model, batches, precision: 100.0)
    found = write_artefact(subject, target, ask("pt2", rounds=0))
    assert found.agreement.relative > 1e-3 and found.agreement.rounding == 100
    strict, wanted = target.with_name("strict.pt2"), ask("pt2", tolerance=1e-4, rounds=0)
    refused("nothing was written", write_artefact, subject, strict, wanted, error=Disagreement)  # who asks means it
    assert not strict.exists()


def test_export__precision_is_written_compared_by_its_own_rounding_and_recorded(subject, target):
    found = write_artefact(subject, target, ask("pt2", rounds=0, precision="bf16"))
    assert (found.description.precision, found.computes_in, found.agreement.precision) == ("bf16",) * 3
    assert 1e-3 < found.agreement.relative <= found.agreement.limit(1e-3) < 0.2 and found.agreement.same_class == 1
    single = write_artefact(subject, target.with_name("single.pt2"), ask("pt2", rounds=0))
    assert single.description.precision == "fp32" and found.bytes < 0.75 * single.bytes
    said = json.loads(target.with_name("net.pt2.export.json").read_text())
    assert (said["computes_in"], said["description"]["precision"]) == ("bf16", "bf16")
    strict = ask("pt2", tolerance=1e-4, rounds=0, precision="bf16")
    refused("expected at most 0.0001: nothing", write_artefact, subject, target, strict, error=Disagreement)
    dense = replace(subject, description=replace(subject.description, task="detect"))
    refused("--precision bf16 with --format pt2 of a dense run", write_artefact, dense, target, strict)
    classifier = open_classifier("test_resnet", pretrained=False, precision="bf16", device="cpu")
    refused("is open in bf16; open it in fp32", broadsight.export, classifier, error=broadsight.UsageError)


def test_export__a_failing_writer_leaves_nothing(subject, target, monkeypatch):
    def broken(program, description, path):
        path.write_text("half")
        raise KeyError("no such\noperator")

    monkeypatch.setattr(FORMATS["pt2"], "write", broken)
    refused("cannot be written as pt2: KeyError", write_artefact, subject, target, ask("pt2"), error=RuntimeError)
    tied, wanted = replace(subject, obstacle="its positions are learned"), ask("pt2", any_size=True)
    refused("takes one size: its positions are learned", write_artefact, tied, target, wanted)
    assert not list(target.parent.iterdir())


def test_check__numbers_targets_and_what_a_format_cannot(tmp_path):
    for changes in ({"tolerance": 0.0}, {"tolerance": float("nan")}, {"threads": 0}, {"rounds": -1}):
        refused("expected", ask, "pt2", **changes)
    form = FORMATS["pt2"]
    check_target(tmp_path / "new" / "net.pt2", form)
    (tmp_path / "folder.pt2").mkdir()
    (tmp_path / "file").write_text("")
    refused(r"ending in \.pt2", check_target, tmp_path / "net.onnx", form)
    refused("is a folder", check_target, tmp_path / "folder.pt2", form)
    refused("is a file", check_target, tmp_path / "file" / "net.pt2", form)
    refused("is not empty and not the folder of such a page", check_target, tmp_path, FORMATS["web"])
    pytest.importorskip("executorch")
    refused("--any-size with the format executorch", check_request, ask("executorch", any_size=True))


def test_provenance__has_a_digest_of_the_weights(subject):
    weight, digests = next(subject.model.parameters()).data, []
    for change in (1, -1):
        digests.append(provenance(subject.model, "", {})["weights_sha256"])
        weight[0] += change
    assert digests[0] == subject.description.provenance["weights_sha256"] != digests[1] and len(digests[0]) == 64
