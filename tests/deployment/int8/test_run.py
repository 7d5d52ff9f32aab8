"""Quantising a classifier: what it is calibrated and measured on, which layers stay in float, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broadsight.data.loading import Transforms
from broadsight.data.normalising import Normalise
from broadsight.deployment import open_artefact
from broadsight.deployment.formats import of_file
from broadsight.deployment.int8 import calibration
from broadsight.deployment.int8.run import Answers, Attempt, quantiser, settle
from broadsight.deployment.run import Exported, Quantise, write_artefact
from broadsight.deployment.subject import of_classifier
from broadsight.runs.classifier import Classifier
from tests.deployment.int8.models import CLASSES, LAYERS, Colours
from tests.deployment.tiny import ask, needed
from tests.refusals import refused
from tests.training.small_runs import fill, refusal

SIDE = 32
COSTS = {"a": 0.1, "b": 0.9, "c": 0.2, "d": 0.05, "e": 0.5, "f": 0.01, "g": 0.02, "h": 0.03}
ORDER = ("b", "e", "c", "a")


def classifier_of(outlier: float = 0.0, run: dict | None = None) -> Classifier:
    transforms = Transforms(SIDE, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
    normalise = Normalise(transforms.mean, transforms.std)
    return Classifier("colours", "colours", Colours(outlier).eval(), transforms, CLASSES, normalise, run or {})


def quantised_by(outlier: float = 0.0, run: dict | None = None, progress=lambda *_: None, **options) -> Quantise:
    return quantiser(classifier_of(outlier, run), "colours", ask("onnx", int8=True, **options), progress)


def export(path: Path, quantise: Quantise | None = None, outlier: float = 0.0) -> Exported:
    form = of_file(path).name
    needed(form)
    subject = of_classifier(classifier_of(outlier), "a test", count=2)
    return write_artefact(subject, path, ask(form, rounds=0), quantise=quantise)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Images that are red, green or blue, 12 of each to train on and 8 to validate."""
    folder = tmp_path_factory.mktemp("data")
    for part, count in (("train", 12), ("val", 8)):
        fill(folder / part, SIDE, **dict.fromkeys(CLASSES, count))
    return folder


def attempts(needed: set[str], limit: float = 1.0):
    """What `settle` asks for, of a model that loses too much until all those needed are in float."""
    tried = []

    def attempt(more):
        tried.append(tuple(more))
        missing = len(needed - set(more))
        return Attempt(Path("file"), tuple(more), Answers(np.zeros(1), 90.0), limit + missing if missing else limit)

    return attempt, tried


def test_settle__asks_for_no_order_where_nothing_is_lost():
    attempt, tried = attempts(set())
    found, errors = settle(attempt, lambda: pytest.fail("ranked in vain"), 1.0)
    assert found.kept == () and errors == {} and tried == [()]


@pytest.mark.parametrize(
    ("needed", "steps"), [("b", [0, 1]), ("be", [0, 1, 2]), ("c", [0, 1, 2, 4, 3]), ("bca", [0, 1, 2, 4, 3])]
)
def test_settle__keeps_as_few_layers_as_do(needed, steps):
    attempt, tried = attempts(set(needed))
    found, errors = settle(attempt, lambda: COSTS, 1.0)
    assert tried == [ORDER[:count] for count in steps] and errors == COSTS
    assert found.kept == ORDER[: max(ORDER.index(name) for name in needed) + 1]


def test_settle__gives_up_at_half_of_the_layers_with_the_best_it_had():
    attempt, tried = attempts({"b", "f"})
    found, _ = settle(attempt, lambda: COSTS, 1.0)
    assert found.lost > 1 and len(found.kept) == 1 and max(map(len, tried)) == 4


@pytest.fixture(scope="module")
def rescued(data, tmp_path_factory):
    """A model with a layer that int8 destroys, exported."""
    folder, steps = tmp_path_factory.mktemp("rescued"), []
    quantise = quantised_by(1e5, None, lambda *step: steps.append(step[2]), data=str(data), calibration_images=9)
    return export(folder / "net.onnx", quantise, 1e5), folder, steps


def test_quantiser__what_an_outlier_destroys_stays_in_float(rescued, data):
    found, folder, steps = rescued
    said = found.int8
    assert said["top1"] == {"float": 100.0, "int8": 100.0} and said["same_class"] == 1
    assert [one["layer"] for one in said["kept_in_float"]] == ["conv1", "conv2"]
    assert all(one["moves_logits_by"] > 0.5 for one in said["kept_in_float"])
    assert (said["layers"], said["in_int8"]) == (len(LAYERS), len(LAYERS) - 2)
    assert said["calibration"] == {"images": 9, "from": f"the training part of {data}"}
    assert said["measured_on"]["images"] == 24
    text = "\n".join(said["lines"])
    assert "conv1: alone it moves the logits by" in text and "100.00 % in float, 100.00 % in int8" in text
    assert "always in float: 2 others (2 for few input channels)" in text
    assert {"calibrating", "accuracy in float", "accuracy in int8", "what conv1 costs"} <= set(steps)


def test_quantiser__the_artefact_says_it_too(rescued):
    found, folder, _ = rescued
    assert sorted(file.name for file in folder.iterdir()) == ["net.onnx", "net.onnx.export.json"]
    session = open_artefact(folder / "net.onnx", 1)
    assert session.description == found.description
    assert session.description.quantised["kept_in_float"] == found.int8["kept_in_float"]
    record = json.loads((folder / "net.onnx.export.json").read_text())
    assert record["int8"]["bytes"]["int8"] == found.bytes < record["int8"]["bytes"]["float"]


def test_quantiser__fails_where_float_layers_do_not_help(data, tmp_path):
    quantise = quantised_by(1e5, data=str(data), keep_float=("fc", "dw", "conv3"))  # leaves room for one more
    words = r"loses 66\.7 points .* --max-drop allows 1: nothing was written"
    refused(words, export, tmp_path / "net.onnx", quantise, 1e5, error=RuntimeError)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def float_file(tmp_path_factory) -> Path:
    return export(tmp_path_factory.mktemp("float") / "net.onnx").path


def test_quantiser__without_labels_agreement_counts(float_file, data, tmp_path):
    quantise = quantised_by(calibrate=str(data / "val"), keep_float=("conv*", "stem"))
    _, found = quantise(float_file, tmp_path / "net.onnx", open_artefact(float_file, 1))
    assert found["top1"] is None and found["same_class"] == 1 and found["in_int8"] == 2
    assert {one["reason"] for one in found["kept_in_float"]} == {"asked for"}
    text = "\n".join(found["lines"])
    assert "accuracy was not measured" in text and "the same class for 100.0%" in text
    assert "4 as asked for: conv1, conv2, conv3" in text


@pytest.mark.slow
def test_quantiser__openvino(data, tmp_path):
    pytest.importorskip("nncf")
    found = export(tmp_path / "net.xml", quantised_by(1e5, data=str(data)), 1e5)
    assert found.int8["top1"] == {"float": 100.0, "int8": 100.0}
    assert "conv2" in [one["layer"] for one in found.int8["kept_in_float"]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.bin", "net.xml", "net.xml.export.json"]
    assert open_artefact(tmp_path / "net.xml", 1).description.quantised == found.description.quantised


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (("stages.0.*",), "--keep-float 'stages.0.*' matches no layer; there are 8, such as conv1"),
        (("*",), "--keep-float * leaves none of 6 layers to be int8"),
    ],
)
def test_quantiser__patterns_that_make_no_sense(float_file, data, tmp_path, kept, said):
    quantise = quantised_by(calibrate=str(data), keep_float=kept)
    assert said in refusal(lambda: quantise(float_file, tmp_path / "net.onnx", open_artefact(float_file, 1)))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def asked():
    """What `quantiser` says of images that it does not like."""
    return lambda **options: refusal(lambda: quantised_by(**options))


def test_quantiser__images_are_checked_before_anything_slow(asked, tmp_path):
    (tmp_path / "empty").mkdir()
    said = asked(calibrate=str(tmp_path / "absent"))
    assert said.startswith("--calibrate") and "no such file or folder" in said
    assert "folder without images" in asked(calibrate=str(tmp_path / "empty"))
    (tmp_path / "empty" / "notes.txt").write_text("no image")
    assert "folder without images" in asked(calibrate=str(tmp_path / "empty"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.jpg").write_bytes(b"no image")
    (tmp_path / "broken" / "b.png").touch()
    assert "none of the 2 images in" in asked(calibrate=str(tmp_path / "broken"))
    assert "give labelled ones by --data, which measures accuracy too, or any by --calibrate" in asked()


def test_quantiser__numbers_are_checked(asked):
    assert "--calibration-images 0; expected 1 or more" in asked(calibration_images=0)
    assert "--max-drop -1.0; expected 0 or more" in asked(max_drop=-1.0)
    assert "--max-drop nan" in asked(max_drop=float("nan"))


def test_quantiser__data_of_other_classes_or_lost_data(asked, tmp_path):
    fill(tmp_path / "other", SIDE, cat=2, dog=2)
    assert "was not trained on: cat, dog" in asked(data=str(tmp_path / "other"))
    settings = {"data": str(tmp_path / "moved"), "seed": 0}
    said = asked(run={"broadsight": {"settings": settings, "recipe": {}}})
    assert "cannot be had" in said and "give labelled images by --data, or any by --calibrate" in said


def sources_of(data: Path, **options):
    return calibration.sources_of(classifier_of(run=options.pop("run", None)), str(data), None, **options)


def names(source) -> set[str]:
    return {source.name(index) for index in range(len(source))}


def test_sources__calibration_never_sees_what_is_measured_on(data, tmp_path):
    found = sources_of(data, images=9)
    assert len(found.calibration) == 36 and len(found.task.source) == 24
    assert {found.calibration.open(0).size} == {(SIDE, SIDE)}
    fill(tmp_path / "flat", SIDE, **dict.fromkeys(CLASSES, 8))
    found = sources_of(tmp_path / "flat", images=100)
    assert len(found.calibration) == 6 and len(found.task.source) == 18  # a quarter, as nothing is set apart
    assert not names(found.calibration) & names(found.task.source)
    assert any("was not calibrated on" in note for note in found.notes)
    settings = {"data": str(tmp_path / "flat"), "seed": 3, "split": 0.25}
    found = sources_of(tmp_path / "flat", images=5, run={"broadsight": {"settings": settings, "recipe": {}}})
    assert len(found.calibration) == 18 and len(found.task.source) == 6  # as the run had split them
    assert not names(found.calibration) & names(found.task.source)


def test_read__unreadable_images_are_skipped_and_named(tmp_path):
    fill(tmp_path, SIDE, red=3)
    (tmp_path / "red" / "broken.png").write_bytes(b"no image")
    Image.new("RGB", (70, 50), "red").save(tmp_path / "red" / "wide.png")
    classifier = classifier_of()
    sources = calibration.sources_of(classifier, None, str(tmp_path), 10)
    found, notes = calibration.read_images(classifier, sources, 10)
    assert len(found) == 4 and found[1:3].shape == (2, 3, SIDE, SIDE) and found[:].dtype == np.float32
    assert len(notes) == 1 and "broken.png" in notes[0]
    assert float(found[:].min()) >= -1 and float(found[:].max()) <= 1  # normalised
    assert len(calibration.read_images(classifier, sources, 2)[0]) == 2
