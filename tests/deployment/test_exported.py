"""An exported file is asked as the run is that it was made from, and refuses what a file cannot do."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

import broadsight
from broadsight.cli.main import main
from broadsight.data.scenes import CLASSES
from broadsight.deployment.exported import is_exported, open_exported
from tests.deployment import tiny
from tests.refusals import refused


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run, its exported file, and a folder of images."""
    folder = tmp_path_factory.mktemp("exported")
    small = dict(model="test_resnet", epochs=1, size=32, batch=16, workers=0, report=False)
    run = broadsight.train("scenes:32", out=str(folder / "run"), **small)
    run.export("pt2", out=str(folder / "model.pt2"), rounds=0, compare=2)
    for seed, name in enumerate(CLASSES):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        for place in (folder / "photos", folder / "classes" / name):
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place / f"{seed}.png")
    return folder


def test_predict_and_evaluate__as_the_run(made):
    file, run = str(made / "model.pt2"), str(made / "run")
    by_file, by_run = (broadsight.predict(one, [str(made / "photos")]) for one in (file, run))
    assert len(by_file) == len(CLASSES)
    for mine, theirs in zip(by_file, by_run, strict=True):
        assert (mine.file, mine.classes) == (theirs.file, theirs.classes)
        assert mine.probabilities == pytest.approx(theirs.probabilities, abs=1e-5)
    options = dict(latency=False, workers=0)
    of_file, of_run = broadsight.evaluate(file, "scenes:12", beside=[run], **options).results
    assert of_file.figures == pytest.approx(of_run.figures, abs=1e-3)
    assert of_file.task.classifier.parameters == of_run.task.classifier.parameters > 0 and of_file.macs is None
    beside = broadsight.evaluate(run, "scenes:12", beside=[file], **options).results[1]
    assert beside.figures == pytest.approx(of_file.figures, abs=1e-3)


def test_command_line__takes_files_where_it_can(made, capsys):
    file = str(made / "model.pt2")
    assert main(["predict", file, str(made / "photos"), "--csv"]) == 0
    assert capsys.readouterr().out.count(".png,") == len(CLASSES)
    for words, *command in (
        ("--size: .* is an exported file", "predict", file, str(made / "photos"), "--size", "64"),
        ("--pretrained: .* is an exported file", "predict", file, str(made / "photos"), "--no-pretrained"),
        ("has fp32 weights.* not in bf16", "predict", file, str(made / "photos"), "--precision", "bf16"),
        ("give DATA", "eval", file),
        ("--suite fgsm needs gradients", "eval", file, "scenes:8", "--suite", "fgsm"),
        ("--saliency gradcam needs gradients", "eval", file, str(made / "classes"), "--suite", "salient"),
        ("is a file; expected a run folder or a timm name", "explain", file),
        ("is a file; expected a run folder or a timm name", "export", file),
    ):
        assert main(command) == 2
        said = capsys.readouterr().err.strip()
        assert re.search(words, said) and "\n" not in said, said


def test_open__by_what_the_file_says(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in (tmp_path / "missing.pt2", tmp_path / "folder", "resnet18"):
        assert not is_exported(name)
    unnamed = tiny.written("pt2", tmp_path, tiny.Tiny(), tiny.described(classes=None, provenance={"parameters": 260}))
    classifier = open_exported(unnamed, threads=1)
    assert classifier.num_classes == 4 and classifier.classes == ("0", "1", "2", "3")
    images = torch.zeros(1, 3, 32, 32)
    torch.testing.assert_close(classifier.logits(images), tiny.Tiny().eval()(images))
    refused("gives no gradients", classifier.model, images.requires_grad_())
    refused(
        "how many parameters", open_exported, tiny.written("pt2", tmp_path / "folder", tiny.Tiny(), tiny.described())
    )
    (tmp_path / "run").mkdir()
    for name in ("index.html", "config.json"):  # a run beside which somebody keeps a page
        (tmp_path / "run" / name).write_text("{}")
        assert is_exported(tmp_path / "run") == (name == "index.html")
    (tmp_path / "dense").mkdir()
    dense = tiny.written("pt2", tmp_path / "dense", tiny.Tiny(), tiny.described(task="detect"))
    refused("was exported for the task detect", open_exported, dense)
