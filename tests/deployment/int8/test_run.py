"""Quantising a classifier: what it is calibrated and measured on, which layers stay in float, and what is refused."""

import json
import re
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
from tests.training.small_runs import fill

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


@pytest.mark.parametrize(
    ("needed", "steps", "kept"),
    [
        ("", [0], 0),  # and no order is asked for
        ("b", [0, 1], 1),
        ("be", [0, 1, 2], 2),
        ("c", [0, 1, 2, 4, 3], 3),
        ("bca", [0, 1, 2, 4, 3], 4),
        ("bf", [0, 1, 2, 4], 1),  # half of the layers do not suffice: the best that there was
    ],
)
def test_settle__keeps_as_few_layers_as_do(needed, steps, kept):
    def attempt(more):
        """Of a model that loses too much until all those needed are in float."""
        tried.append(tuple(more))
        return Attempt(Path("file"), tuple(more), Answers(np.zeros(1), 90.0), 1.0 + len(set(needed) - set(more)))

    tried = []
    found, errors = settle(attempt, lambda: COSTS, 1.0)
    assert tried == [ORDER[:count] for count in steps] and errors == (COSTS if needed else {})
    assert found.kept == ORDER[:kept] and (found.lost > 1) == (needed == "bf")


def test_quantiser__what_an_outlier_destroys_stays_in_float(data, tmp_path):
    steps = []
    quantise = quantised_by(1e5, None, lambda *step: steps.append(step[2]), data=str(data), calibration_images=9)
    found = export(tmp_path / "net.onnx", quantise, 1e5)
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
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.onnx", "net.onnx.export.json"]
    description = open_artefact(tmp_path / "net.onnx", 1).description
    assert description == found.description and description.quantised["kept_in_float"] == said["kept_in_float"]
    record = json.loads((tmp_path / "net.onnx.export.json").read_text())
    assert record["int8"]["bytes"]["int8"] == found.bytes < record["int8"]["bytes"]["float"]


def test_quantiser__fails_where_float_layers_do_not_help(data, tmp_path):
    quantise = quantised_by(1e5, data=str(data), keep_float=("fc", "dw", "conv3"))  # leaves room for one more
    words = r"loses 66\.7 points .* --max-drop allows 1: nothing was written"
    refused(words, export, tmp_path / "net.onnx", quantise, 1e5, error=RuntimeError)
    assert not list(tmp_path.iterdir())


def test_quantiser__without_labels_agreement_counts_and_patterns_make_sense(data, tmp_path):
    float_file = export(tmp_path / "float" / "net.onnx").path
    quantise = quantised_by(calibrate=str(data / "val"), keep_float=("conv*", "stem"))
    _, found = quantise(float_file, tmp_path / "net.onnx", open_artefact(float_file, 1))
    assert found["top1"] is None and found["same_class"] == 1 and found["in_int8"] == 2
    assert {one["reason"] for one in found["kept_in_float"]} == {"asked for"}
    text = "\n".join(found["lines"])
    assert "accuracy was not measured" in text and "the same class for 100.0%" in text
    assert "4 as asked for: conv1, conv2, conv3" in text
    (tmp_path / "net.onnx").unlink()
    for kept, said in (
        ("stages.0.*", "--keep-float 'stages.0.*' matches no layer; there are 8, such as conv1"),
        ("*", "--keep-float * leaves none of 6 layers to be int8"),
    ):
        quantise, session = quantised_by(calibrate=str(data), keep_float=(kept,)), open_artefact(float_file, 1)
        refused(re.escape(said), quantise, float_file, tmp_path / "net.onnx", session)
    assert [*tmp_path.iterdir()] == [float_file.parent]


@pytest.mark.slow
def test_quantiser__openvino(data, tmp_path):
    pytest.importorskip("nncf")
    found = export(tmp_path / "net.xml", quantised_by(1e5, data=str(data)), 1e5)
    assert found.int8["top1"] == {"float": 100.0, "int8": 100.0}
    assert "conv2" in [one["layer"] for one in found.int8["kept_in_float"]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.bin", "net.xml", "net.xml.export.json"]
    assert open_artefact(tmp_path / "net.xml", 1).description.quantised == found.description.quantised


def test_quantiser__numbers_and_images_are_checked_before_anything_slow(tmp_path):
    for name, content in (("notes/a.txt", b"none"), ("broken/a.jpg", b"no image"), ("broken/b.png", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    refused("--calibration-images 0; expected 1 or more", quantised_by, calibration_images=0)
    refused("--max-drop -1.0; expected 0 or more", quantised_by, max_drop=-1.0)
    refused("--max-drop nan", quantised_by, max_drop=float("nan"))
    refused("^--calibrate.*no such file or folder", quantised_by, calibrate=str(tmp_path / "absent"))
    for name, said in (("empty", "folder without"), ("notes", "folder without"), ("broken", "none of the 2")):
        refused(f"{said} images", quantised_by, calibrate=str(tmp_path / name))
    refused("give labelled ones by --data, which measures accuracy too, or any by --calibrate", quantised_by)
    fill(tmp_path / "other", SIDE, cat=2, dog=2)
    refused("was not trained on: cat, dog", quantised_by, data=str(tmp_path / "other"))
    run = {"broadsight": {"settings": {"data": str(tmp_path / "moved"), "seed": 0}, "recipe": {}}}
    refused("cannot be had.*give labelled images by --data, or any by --calibrate", quantised_by, run=run)
    assert of_classifier(classifier_of(run=run), "a test", count=1).shown == "drawn scenes"


def test_sources__calibration_never_sees_what_is_measured_on(data, tmp_path):
    def sources_of(data: Path, images: int, run: dict | None = None):
        return calibration.sources_of(classifier_of(run=run), str(data), None, images)

    def names(source) -> set[str]:
        return {source.name(index) for index in range(len(source))}

    found = sources_of(data, images=9)
    assert len(found.calibration) == 36 and len(found.task.source) == 24
    assert {found.calibration.open(0).size} == {(SIDE, SIDE)}
    fill(tmp_path / "flat", SIDE, **dict.fromkeys(CLASSES, 8))
    found = sources_of(tmp_path / "flat", images=100)
    assert len(found.calibration) == 6 and len(found.task.source) == 18  # a quarter, as nothing is set apart
    assert not names(found.calibration) & names(found.task.source)
    assert any("was not calibrated on" in note for note in found.notes)
    run = {"broadsight": {"settings": {"data": str(tmp_path / "flat"), "seed": 3, "split": 0.25}, "recipe": {}}}
    found = sources_of(tmp_path / "flat", images=5, run=run)
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
