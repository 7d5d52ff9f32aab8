"""Classifiers for use: what a run folder or a timm name gives, and one line for what does not."""

import json

import pytest
import timm
import torch

from broadsight.runs.classifier import open_classifier
from broadsight.weights.writing import write_weights

from ..training.small_runs import leave_run, offline_hub, refusal

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@pytest.fixture
def left(tmp_path):
    return leave_run(tmp_path / "run", num_classes=3)


def described(folder, **changes):
    """The folder, with other entries in config.json."""
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))
    return folder


def test_run__answers_as_its_model(left):
    folder, model = left
    classifier = open_classifier(described(folder, label_names=["a", "b", "c"]), device="cpu")
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.inference_mode():
        expected = model((images / 255 - 0.5) / 0.5)
        torch.testing.assert_close(classifier.logits(classifier.normalise(images)), expected, rtol=1e-4, atol=1e-5)
    assert (classifier.labels, classifier.num_classes, classifier.transforms.size) == (("a", "b", "c"), 3, 32)
    assert classifier.title == "run" and not classifier.model.training
    assert not any(parameter.requires_grad for parameter in classifier.model.parameters())
    assert classifier.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert torch.equal(classifier.normalise.invert(classifier.normalise(images)).round().byte(), images)


def test_timm__a_name_with_a_file_of_weights(left, tmp_path):
    other = timm.create_model("test_resnet", num_classes=5)
    write_weights(other, tmp_path / "w.safetensors")
    options = dict(checkpoint=tmp_path / "w.safetensors", model_args={"num_classes": 5}, device="cpu")
    classifier = open_classifier("test_resnet", **options)
    assert classifier.labels is None and classifier.title == "test_resnet"
    torch.testing.assert_close(classifier.model.state_dict(), other.state_dict())
    said = refusal(lambda: open_classifier("test_resnet", **options | {"model_args": {"num_classes": 4}}))
    assert "holds weights of another model: 0 missing, 0 unexpected, 2 of another shape, such as fc.bias" in said


def test_timm__other_channels(left):
    classifier = open_classifier("test_resnet", pretrained=False, model_args={"in_chans": 1}, device="cpu")
    assert (classifier.transforms.channels, len(classifier.transforms.mean)) == (1, 1)
    assert classifier.logits(classifier.normalise(torch.zeros((1, 1, 32, 32), dtype=torch.uint8))).shape == (1, 1000)


def test_light__averaged_tokens_alone(tmp_path):
    pool = dict(groups=2, tokens=2, dim=24, heads=2, mlp_dim=48)
    args = dict(backbone="test_resnet", pool="map", pool_args=pool)
    model = timm.create_model("edited", num_classes=3, **args)
    folder = described(leave_run(tmp_path / "run", num_classes=3)[0], architecture="edited", model_args=args)
    write_weights(model, folder / WEIGHTS)
    whole, light = (open_classifier(folder, light=light, device="cpu") for light in (False, True))
    assert light.parameters < whole.parameters and light.title == "run-light"
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        groups = model.eval()(images, groups=True)
        torch.testing.assert_close(light.logits(images), groups.average.mean(1), rtol=1e-4, atol=1e-4)


def test_size__another_one_if_the_model_can_take_it_and_no_answers_that_are_not_finite(left, tmp_path):
    assert open_classifier(left[0], size=64, device="cpu").transforms.size == 64
    assert "--size 0; expected pixels" in refusal(lambda: open_classifier(left[0], size=0))
    folder, _ = leave_run(tmp_path / "vit", "test_vit", model_args={"img_size": 32})
    assert "--size 40 does not suit vit: " in refusal(lambda: open_classifier(folder, size=40, device="cpu"))
    classifier = open_classifier(left[0], device="cpu")
    classifier.model.get_classifier().weight.data[0] = torch.nan
    said = refusal(lambda: classifier.logits(torch.zeros(2, 3, 32, 32)), RuntimeError)
    assert said.startswith("run answers 2 of 2 images with numbers that are not finite; its weights are damaged")


@pytest.mark.parametrize(
    ("file", "change", "kind", "message"),
    [
        (CONFIG, None, FileNotFoundError, "holds no run: there is no config.json"),
        (WEIGHTS, None, FileNotFoundError, "holds no weights (model.safetensors), which come with its first eval"),
        (CONFIG, lambda content: b"{", ValueError, "config.json is damaged ("),
        (CONFIG, lambda content: b"[]", ValueError, "describes no model"),
        (WEIGHTS, lambda content: content[: len(content) // 2], RuntimeError, "is not a readable safetensors file"),
        (CONFIG, dict(broadsight={"task": "detect"}), ValueError, "a run of --task detect; expected one that clas"),
        (CONFIG, dict(label_names=["a"]), ValueError, "names 1 classes, the model has 3"),
    ],
)
def test_run__that_cannot_be_used(left, file, change, kind, message):
    path = left[0] / file
    if isinstance(change, dict):
        described(left[0], **change)
    elif change:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    assert message in refusal(lambda: open_classifier(left[0], device="cpu"), kind)
    options = dict(model_args={"in_chans": 1})
    assert "is a run with weights and arguments of its own" in refusal(lambda: open_classifier(left[0], **options))


@pytest.mark.parametrize(
    ("source", "options", "kind", "message"),
    [
        ("resnet1", {}, ValueError, "unknown model 'resnet1'; nearest: "),
        ("runs/none", {}, FileNotFoundError, "there is no run in runs/none; give the folder that train wrote"),
        ("stvit_small", {}, ValueError, "stvit_small comes without trained weights; give some by --checkpoint, or try"),
        ("test_resnet", dict(checkpoint="none.pth"), FileNotFoundError, "none.pth is not a file"),
        ("test_resnet", dict(pretrained=False, light=True), ValueError, "has no multi-token pooling to lighten"),
        ("test_resnet", dict(pretrained=False, device="cuda"), ValueError, "torch finds no CUDA device here"),
        ("test_resnet", dict(pretrained=False, model_args={"num_classes": 0}), ValueError, "has no classifier"),
        ("test_resnet", {}, RuntimeError, "the pretrained weights of test_resnet cannot be had: "),
        ("resnet18", dict(checkpoint="package"), ValueError, "no package has weights of 'resnet18'"),
    ],
)
def test_name__that_cannot_be_used(monkeypatch, source, options, kind, message):
    offline_hub(monkeypatch)
    if torch.cuda.is_available() and options.get("device") == "cuda":
        pytest.skip("there is a CUDA device")
    assert message in refusal(lambda: open_classifier(source, **options), kind)
