"""Released weights: loaded exactly, or refused with one line and nothing changed."""

import argparse
import pickle
import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import broadsight
from broadsight.layers import SuperTokenAttention
from broadsight.models import MAT, STViT
from tests.compare import randomize

Weights = dict[str, Tensor]
BLOCK = "layers.2.blocks.0"


def small(seed: int) -> STViT:
    """With cells (which the release folds) in two stages and layer scale in two."""
    torch.manual_seed(seed)
    arch = dict(dims=(8, 16, 16, 24), depths=(1, 2, 1, 1), heads=(1, 2, 2, 3), layer_scale=(None, None, 1e-6, 1e-6))
    return randomize(STViT(**arch, projection=12, num_classes=5)).eval()


def as_released(model: STViT) -> Weights:
    """The state of a model in the release's names, shapes and constants."""
    weights = {}
    for key, value in model.state_dict().items():
        name = STViT.released_name(key)
        if "gamma_" in name:
            value = value.view(1, -1, 1, 1)
        elif value.ndim == 2 and name != "head.weight":
            value = value[:, :, None, None]
        weights[name] = value.clone()
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(stage.blocks):
            if block.attn.cell != (1, 1):
                for fold in ("fold", "unfold"):
                    weights[f"layers.{i}.blocks.{j}.attn.{fold}.weights"] = torch.eye(9).view(9, 1, 3, 3)
    return weights


@pytest.fixture
def released() -> Weights:
    return as_released(small(seed=1))


def assert_loaded(model: nn.Module) -> None:
    expected = small(seed=1).state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


def assert_refused(source, kind: type[Exception], *words: str) -> None:
    """One line that holds all the words; the module is as it was."""
    model = small(seed=2)
    before = deepcopy(model.state_dict())
    with pytest.raises(kind) as error:
        broadsight.load_release(model, source)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_released_name__is_unique_and_translates_every_tensor(released):
    model = small(seed=1)
    constants = [name for name in released if name.endswith("fold.weights")]
    assert len(constants) == 2 * 3  # three blocks have cells
    assert len(released) == len(model.state_dict()) + len(constants)
    ours = re.compile(r"^(stem|stages)\.|\.(cpe|ls\d|downsample\.(conv|norm))\.")
    assert [name for name in released if ours.search(name)] == []


def test_load__dict(released):
    model = small(seed=2)
    assert broadsight.load_release(model, released) is model
    assert_loaded(model)
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(model(images), small(seed=1)(images))


def test_load__does_not_touch_the_source(released):
    before = deepcopy(released)
    model = broadsight.load_release(small(seed=2), released)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert released.keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in released.items())


@pytest.mark.parametrize("kind", [str, Path])
def test_load__safetensors_file(released, tmp_path, kind):
    save_file(released, tmp_path / "stvit.safetensors")
    assert_loaded(broadsight.load_release(small(seed=2), kind(tmp_path / "stvit.safetensors")))


@pytest.mark.parametrize("wrapped", [False, True])
def test_load__torch_file(released, tmp_path, wrapped):
    content = (
        dict(model=released, args=argparse.Namespace(lr=1e-3, data="imagenet"), epoch=299) if wrapped else released
    )
    torch.save(content, tmp_path / "stvit.pth")
    assert_loaded(broadsight.load_release(small(seed=2), tmp_path / "stvit.pth"))


def test_load__bare_attention():
    def build(seed: int) -> SuperTokenAttention:
        torch.manual_seed(seed)
        return randomize(SuperTokenAttention(16, 4, 2))

    source = {
        f"stoken_refine.{key}": value[:, :, None, None] if value.ndim == 2 else value
        for key, value in build(1).state_dict().items()
    }
    source |= {f"{fold}.weights": torch.eye(9).view(9, 1, 3, 3) for fold in ("fold", "unfold")}
    loaded = broadsight.load_release(build(2), source)
    assert all(torch.equal(value, build(1).state_dict()[key]) for key, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    "name",
    [
        "patch_embed.proj.0.weight",
        f"{BLOCK}.gamma_1",
        "layers.0.downsample.proj.1.running_var",
        "norm.num_batches_tracked",
    ],
)
def test_refuse__missing(released, name):
    del released[name]
    assert_refused(released, RuntimeError, f"'{name}'", "missing", "nothing was loaded")


@pytest.mark.parametrize(
    "name", ["layers.2.blocks.9.norm1.norm.weight", "stem.conv1.weight", "optimizer", "fold.weight"]
)
def test_refuse__unexpected(released, name):
    released[name] = torch.zeros(3)
    assert_refused(released, RuntimeError, f"'{name}'", "unexpected", "nothing was loaded")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("patch_embed.proj.0.weight", (4, 3, 5, 5)),
        (f"{BLOCK}.attn.stoken_refine.qkv.weight", (16, 48, 1, 1)),
        (f"{BLOCK}.attn.stoken_refine.qkv.weight", (48, 16, 3, 3)),
        (f"{BLOCK}.gamma_2", (1, 17, 1, 1)),
        (f"{BLOCK}.norm2.weight", (1,)),
        (f"{BLOCK}.norm2.weight", (1, 16, 1, 1)),
        (f"{BLOCK}.pos_embed.conv.weight", (1, 16, 3, 3)),
        ("head.bias", (1000,)),
        ("head.weight", (12, 5)),
    ],
)
def test_refuse__misshapen(released, name, shape):
    released[name] = torch.zeros(shape)
    assert_refused(released, RuntimeError, f"'{name}'", str(shape))


@pytest.mark.parametrize(
    "altered",
    [
        torch.eye(9).view(9, 1, 3, 3).flip(0),
        torch.full((9, 1, 3, 3), 1 / 9),
        torch.eye(9),
        torch.eye(9)[:3].view(3, 1, 3, 3),
    ],
)
@pytest.mark.parametrize("fold", ["fold", "unfold"])
def test_refuse__altered_constant(released, fold, altered):
    name = f"layers.1.blocks.1.attn.{fold}.weights"
    assert name in released
    released[name] = altered
    assert_refused(released, RuntimeError, f"'{name}'", "constant")


@pytest.mark.parametrize("value", [[1.0, 2.0], "weights", None, 3])
def test_refuse__what_is_no_tensor(released, value):
    released["norm.weight"] = value
    assert_refused(released, RuntimeError, "'norm.weight'", type(value).__name__)


@pytest.mark.parametrize("content", [[1, 2, 3], torch.zeros(3), None])
def test_refuse__file_without_a_dictionary(tmp_path, content):
    torch.save(content, tmp_path / "other.pth")
    assert_refused(tmp_path / "other.pth", RuntimeError, "other.pth")


def test_refuse__empty_dictionary():
    assert_refused({}, RuntimeError, "'patch_embed.proj.0.weight'", "missing")


def test_refuse__key_that_is_no_name(released):
    assert_refused(released | {7: torch.zeros(1)}, RuntimeError, "7")


def test_refuse__file_that_is_not_there(tmp_path):
    assert_refused(tmp_path / "nowhere.pth", FileNotFoundError, "nowhere.pth")
    assert_refused(str(tmp_path), FileNotFoundError, str(tmp_path))


@pytest.mark.parametrize("name", ["broken.pth", "broken.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\x00" * 100])
def test_refuse__corrupt_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert_refused(tmp_path / name, RuntimeError, name)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_refuse__truncated_file(released, tmp_path, suffix):
    path = tmp_path / f"cut.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(released, path)
    path.write_bytes(path.read_bytes()[:-1000])
    assert_refused(path, RuntimeError, path.name)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "writer", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2))]
)
def test_refuse__code_in_the_file_never_runs(released, tmp_path, writer):
    traces = tmp_path / "it ran"
    writer(dict(model=released, args=Bomb(traces)), tmp_path / "bomb.pth")
    assert_refused(tmp_path / "bomb.pth", RuntimeError, "bomb.pth")
    assert not traces.exists()
    pickle.loads(pickle.dumps(Bomb(traces)))
    assert traces.exists()  # it would have


@pytest.mark.parametrize("module", [nn.Linear(2, 2), MAT(8, (1, 1, 1, 1), (1, 2), hidden=8), nn.Sequential()])
def test_refuse__other_modules(released, module):
    with pytest.raises(ValueError, match=f"^no released weights are known for {type(module).__name__}; .*STViT.*$"):
        broadsight.load_release(module, released)


def test_refuse__another_variant(released):
    other = STViT((8, 16, 16, 24), (1, 1, 1, 1), (1, 2, 2, 3), projection=12, num_classes=5)
    before = deepcopy(other.state_dict())
    with pytest.raises(RuntimeError, match=r"'layers\.1\.blocks\.1\.\S+' and \d+ more is unexpected; .*"):
        broadsight.load_release(other, released)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
