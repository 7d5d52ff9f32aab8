"""Run folders that the first version wrote: they open, answer as they did then, and can be shipped."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from broadsight.cli.main import main

OLD = Path(__file__).parent / "first_version"


def test_predict__a_classifier_as_then(capsys):
    assert main(["predict", str(OLD / "classify"), str(OLD / "image.png"), "--top", "10", "--json"]) == 0
    (now,), (then,) = json.loads(capsys.readouterr().out), json.loads((OLD / "classified.json").read_text())
    assert [one["class"] for one in now["predictions"]] == [one["class"] for one in then["predictions"]]
    probabilities = [[one["probability"] for one in each["predictions"]] for each in (now, then)]
    np.testing.assert_allclose(*probabilities, rtol=1e-4)


def test_predict__a_segmenter_as_then(tmp_path, capsys):
    assert main(["predict", str(OLD / "segment"), str(OLD / "image.png"), "--out", str(tmp_path / "out")]) == 0
    (mask,) = (tmp_path / "out" / "masks").glob("*.png")
    now, then = (np.array(Image.open(path)) for path in (mask, OLD / "segmented.png"))
    assert now.shape == then.shape and (now == then).mean() > 0.999


@pytest.mark.parametrize("run", ["classify", "segment"])
def test_eval_and_export(run, tmp_path, capsys):
    arguments = ["--workers", "0", "--threads", "1", "--out", str(tmp_path / "out")]
    assert main(["eval", str(OLD / run), *arguments]) == 0 and (tmp_path / "out" / "report.html").is_file()
    arguments = ["--format", "pt2", "--out", str(tmp_path / "run.pt2"), "--threads", "1"]
    assert main(["export", str(OLD / run), *arguments]) == 0 and (tmp_path / "run.pt2").is_file()
