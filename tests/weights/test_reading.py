"""Tensors that come in files: what no model may hold is refused by name, everywhere that weights come in."""

import warnings
import zipfile

import pytest
import timm
import torch
from safetensors.torch import save_file

from broadsight import load_release
from broadsight.dense import build
from broadsight.models import STViT
from broadsight.weights.loading import begin_dense, load_given
from broadsight.weights.packaged import packaged_weights
from broadsight.weights.released_stvit import convert_release
from tests.refusals import refused

from ..training.small_runs import refusal

CHANGES = {
    "complex": lambda value: value.to(torch.complex64),
    "integer": lambda value: value.to(torch.int32),
    "boolean": lambda value: value > 0,
    "half a byte of float": lambda value: value.to(torch.float8_e4m3fn),
    "not a number": lambda value: value.clone().fill_(torch.nan),
    "infinite": lambda value: value.clone().fill_(torch.inf),
    "infinite once cast": lambda value: value.double().fill_(1e300),
    "sparse": lambda value: value.to_sparse(),
    "quantised": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    "meta": lambda value: value.to("meta"),
    "expanded": lambda value: value.flatten()[:1].clone().expand(value.shape),
    "overlapping": lambda value: value.flatten()[: sum(value.shape)].clone().as_strided(value.shape, (1,) * value.ndim),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=3).eval()


def damaged(weights, name, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse and quantised tensors are said to be on their way out
        return {**weights, name: CHANGES[kind](weights[name])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CHANGES)
def test_given_or_released__what_is_not_of_finite_real_numbers_is_refused_by_name(model, tmp_path, kind):
    own = {name: value.clone() for name, value in model.state_dict().items()}
    name = "layer1.0.conv1.weight"
    path = tmp_path / "given.pth"
    torch.save({"state_dict": damaged(own, name, kind)}, path)
    for load in (
        lambda: load_given(model, path),
        lambda: load_given(model, path, other_classes=True),
        lambda: begin_dense(build("semantic_fpn", "test_resnet", 2), path),
    ):
        said = refusal(load)
        assert name in said and str(path) in said and "expected" in said, said
    assert all(torch.equal(value, own[key]) for key, value in model.state_dict().items())
    # A release is neither loaded nor converted
    torch.manual_seed(0)
    model = STViT((8, 16, 16, 24), (1, 1, 1, 1), (1, 2, 2, 3), projection=12, num_classes=2)
    released = {STViT.released_name(key): value for key, value in model.state_dict().items()}
    name = next(name for name, value in released.items() if value.ndim == 4 and value.numel() > 9)
    weights = damaged(released, name, kind)
    torch.save({"model": weights}, tmp_path / "x.pth")
    cast = kind == "infinite once cast"  # in the model, so by its name
    for source in (tmp_path / "x.pth", weights):
        refused("not finite" if cast else name, load_release, model, source, error=RuntimeError)
    if not cast:
        refused(name, convert_release, tmp_path / "x.pth", tmp_path / "x.safetensors", error=RuntimeError)
        assert not (tmp_path / "x.safetensors").exists()


def test_safetensors__the_same_and_integers_and_masks_where_the_model_has_them(model, tmp_path):
    path, given = tmp_path / "given.safetensors", model
    for kind in ("complex", "integer", "boolean", "not a number", "infinite once cast"):
        save_file(damaged(given.state_dict(), "fc.bias", kind), path)
        assert "'fc.bias'" in refusal(lambda: load_given(given, path))
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(2), torch.nn.Identity())
    model.pretrained_cfg = {}
    model[1].register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model[1].register_buffer("index", torch.tensor([1, 2], dtype=torch.int16))
    own = {name: value.clone() for name, value in model.state_dict().items()}

    def load(**changes):
        torch.save(own | {f"1.{name}": value for name, value in changes.items()}, tmp_path / "x.pth")
        load_given(model, tmp_path / "x.pth")

    load(mask=torch.tensor([2.0, -torch.inf], dtype=torch.float16), index=torch.tensor([3, 4]))
    assert model[1].mask.tolist() == [2, -torch.inf] and model[1].index.tolist() == [3, 4]
    assert "'1.mask'" in refusal(lambda: load(mask=torch.tensor([torch.inf, 0])))
    assert "'1.index'" in refusal(lambda: load(index=torch.tensor([1.0, 2.0])))
    assert "too large" in refusal(lambda: load(index=torch.tensor([1, 70000])))
    assert "'1.index'" in refusal(lambda: load(index=torch.tensor([True, False])))


def test_convert__writes_no_more_than_the_file_holds(tmp_path):
    source, target = tmp_path / "x.pth", tmp_path / "x.safetensors"
    torch.save({"w": torch.zeros(1).expand(400_000_000)}, source)
    with pytest.raises(RuntimeError, match=r"'w' in .* 1,600,000,000 bytes, of which 4 are stored"):
        convert_release(source, target)
    whole = torch.zeros(100_000)
    torch.save({f"w{number}": whole for number in range(100)}, source)
    refused("would take 40,000,000 bytes", convert_release, source, target, error=RuntimeError)
    # A compressed archive is refused before it grows
    torch.save({"w": torch.zeros(1_000_000)}, source)
    packed = zipfile.ZipFile(tmp_path / "small.pth", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(source) as plain, packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    refused("is compressed", convert_release, tmp_path / "small.pth", target, error=RuntimeError)
    torch.save({"w": whole[:10]}, source)  # a part of a large memory
    assert convert_release(source, target).stat().st_size < 1000


def test_packaged_weights_and_names__are_looked_at_too(model, tmp_path, monkeypatch):
    own = timm.create_model("tf_efficientnet_lite0").state_dict()
    torch.save({**own, "bn1.running_var": own["bn1.running_var"].clone().fill_(torch.nan)}, tmp_path / "x.pth")
    monkeypatch.setattr("broadsight.weights.packaged._file", lambda name: tmp_path / "x.pth")
    refused(r"'bn1.running_var' in .*not finite", packaged_weights, "tf_efficientnet_lite0", error=RuntimeError)
    for content in ({1: torch.zeros(2)}, [torch.zeros(2)], {"a": 1}, {"state_dict": {None: 1}}):
        torch.save(content, tmp_path / "x.pth")
        assert "expected tensors by name" in refusal(lambda: load_given(model, tmp_path / "x.pth"))
