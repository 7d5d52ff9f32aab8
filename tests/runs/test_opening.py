"""Whatever a user names as a run is opened as what it is."""

import pytest

import broadsight
from broadsight.runs import Classifier, DenseModel, is_dense, open_run, task_of
from tests.refusals import refused
from tests.runs.test_first_version import OLD


def test_open_run__a_classifier_a_dense_model_and_a_name_of_timm(tmp_path):
    assert broadsight.open_run is open_run
    classifier = open_run(OLD / "classify", device="cpu")
    assert isinstance(classifier, Classifier) and classifier.task == "classify" and classifier.classes[0] == "crab"
    segmenter = open_run(OLD / "segment", device="cpu", size=96)
    assert isinstance(segmenter, DenseModel) and segmenter.task == "segment" and segmenter.recipe.eval_size == 96
    named = open_run("test_resnet", pretrained=False, model_args=dict(num_classes=3), device="cpu")
    assert isinstance(named, Classifier) and named.classes == ("0", "1", "2")
    # what they learned is read from the description
    tasks = {OLD / "classify": "classify", OLD / "segment": "segment", "resnet50": "classify", tmp_path: "classify"}
    assert {name: task_of(name) for name in tasks} == tasks
    assert is_dense(OLD / "segment") and not is_dense("resnet50")


@pytest.mark.parametrize("option", [dict(checkpoint="x"), dict(model_args=dict(in_chans=1)), dict(light=True)])
def test_open_run__refused(option, tmp_path):
    refused(f"is a dense run .*; leave {next(iter(option))} out", open_run, OLD / "segment", **option)
    refused("holds no run", open_run, tmp_path, error=FileNotFoundError)
    refused("there is no run in", open_run, tmp_path / "missing", error=FileNotFoundError)
