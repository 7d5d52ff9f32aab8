"""Released weights: loaded exactly, or refused with one line and nothing changed."""

import argparse
import itertools
import os
import pickle
import re
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import broadsight
from broadsight.layers import MultiTokenPool, SuperTokenAttention
from broadsight.models import MAT, STViT
from broadsight.weights import reading as checkpoint
from broadsight.weights import released_stvit as release
from broadsight.weights.released_stvit import contents, convert_release, released_tensors
from tests.compare import assert_identical, randomize
from tests.refusals import refused

Weights = dict[str, Tensor]
BLOCK, STEM = "layers.2.blocks.0", "patch_embed.proj.0.weight"


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


def assert_loaded(source) -> None:
    model = small(seed=2)
    assert broadsight.load_release(model, source) is model
    assert_identical(model.state_dict(), small(seed=1).state_dict())


def assert_refused(source, kind: type[Exception], *words: str, model: nn.Module | None = None) -> None:
    """One line that holds all the words; the module is as it was."""
    model = small(seed=2) if model is None else model
    before = deepcopy(model.state_dict())
    message = refused("", broadsight.load_release, model, source, error=kind)
    assert all(word in message for word in words), message
    assert_identical(model.state_dict(), before)


def changed(weights: Weights, name: str, shape: tuple | None) -> Weights:
    """Without a tensor, or with zeros in its place."""
    without = {key: value for key, value in weights.items() if key != name}
    return without if shape is None else weights | {name: torch.zeros(shape)}


def changes(missing: list[str], unexpected: list[str], misshapen: dict[str, list[tuple]]) -> list:
    """Names, shapes, and what is said of them, for `changed`."""
    found = [(name, None, "is missing") for name in missing] + [(name, (3,), "is unexpected") for name in unexpected]
    return found + [(name, shape, str(shape)) for name, shapes in misshapen.items() for shape in shapes]


def test_load__dict_whose_names_translate_every_tensor(released):
    model = small(seed=1)
    constants = [name for name in released if name.endswith("fold.weights")]
    assert len(constants) == 2 * 3  # three blocks have cells
    assert len(released) == len(model.state_dict()) + len(constants)
    ours = re.compile(r"^(stem|stages)\.|\.(cpe|ls\d|downsample\.(conv|norm))\.")
    assert [name for name in released if ours.search(name)] == []
    before = deepcopy(released)
    assert_loaded(released)
    model, images = broadsight.load_release(small(seed=2), released), torch.randn(1, 3, 64, 64)
    assert torch.equal(model(images), small(seed=1)(images))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_identical(released, before)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def timm_checkpoint(released: Weights) -> dict:
    """With all that may be beside the weights: an optimizer's state, the command line, numbers of numpy."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    return dict(
        epoch=np.int64(299),
        arch="stvit_test",
        state_dict=OrderedDict((f"module.{name}", value) for name, value in released.items()),
        optimizer=optimizer.state_dict(),
        version=2,
        args=argparse.Namespace(lr=np.float64(1e-3), mean=(0.5, np.float32(0.25)), resume=None, amp=np.bool_(True)),
        metric=np.float64(82.85),
    )


def test_load__torch_or_safetensors_file_and_names_of_distributed_training(released, tmp_path):
    beside = dict(args=argparse.Namespace(lr=1e-3, data="imagenet"), epoch=299)
    saved = [{place: released} | beside for place in ("model", "state_dict", "state_dict_ema")]
    saved += [released, dict.fromkeys(("state_dict_ema", "model"), as_released(small(3))) | {"state_dict": released}]
    for content in (*saved, timm_checkpoint(released)):
        torch.save(content, tmp_path / "stvit.pth.tar")
        assert_loaded(tmp_path / "stvit.pth.tar")
    save_file(released, tmp_path / "stvit.safetensors")
    assert_loaded(tmp_path / "stvit.safetensors")
    assert_loaded(str(tmp_path / "stvit.safetensors"))
    assert_loaded({f"module.{name}": v for name, v in released.items()})
    some = {f"module.{name}" if "norm" in name else name: value for name, value in released.items()}
    assert_refused(some, RuntimeError, "is missing")


def test_read__numbers_of_numpy_of_other_versions_and_machines(tmp_path):
    path = tmp_path / "number.pth"
    for kind in "?bhilqBHILQefd":
        number = np.array(3).astype(kind)[()]
        torch.save(number, path)
        content = checkpoint.read_file(path)
        assert content == number and isinstance(content, bool | int | float) and not isinstance(content, np.generic)
    for place in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        torch.save(np.float64(0.75), path, _use_new_zipfile_serialization=False)
        path.write_bytes(re.sub(rb"numpy\._?core\.multiarray", place, path.read_bytes()))
        assert checkpoint.read_file(path) == 0.75
    kind = checkpoint._NumberType("f8", False, True)
    for order in "<>":
        kind.__setstate__((3, order, None, None, None, -1, -1, 0))
        assert checkpoint._number(kind, np.array(0.75, f"{order}f8").tobytes()) == 0.75


def test_refuse__what_else_numpy_stores(released, tmp_path):
    for value in (np.zeros(2), np.array([{}]), np.datetime64("2025-01-01"), np.str_("x"), np.void(b"x")):
        torch.save(dict(model=released, extra=value), tmp_path / "numpy.pth")
        assert_refused(tmp_path / "numpy.pth", RuntimeError, "numpy.pth", "numpy")


def test_load__bare_attention():
    def build(seed: int) -> SuperTokenAttention:
        torch.manual_seed(seed)
        return randomize(SuperTokenAttention(16, 4, 2))

    state = {f"stoken_refine.{key}": value for key, value in build(1).state_dict().items()}
    source = {name: value[:, :, None, None] if value.ndim == 2 else value for name, value in state.items()}
    source |= {f"{fold}.weights": torch.eye(9).view(9, 1, 3, 3) for fold in ("fold", "unfold")}
    assert_identical(broadsight.load_release(build(2), source).state_dict(), build(1).state_dict())


CHANGES = changes(
    [STEM, f"{BLOCK}.gamma_1", "norm.num_batches_tracked", "layers.0.downsample.proj.1.running_var"],
    ["layers.2.blocks.9.norm1.norm.weight", "stem.conv1.weight", "optimizer", "fold.weight"],
    {
        STEM: [(4, 3, 5, 5)],
        f"{BLOCK}.attn.stoken_refine.qkv.weight": [(16, 48, 1, 1), (48, 16, 3, 3)],
        f"{BLOCK}.gamma_2": [(1, 17, 1, 1)],
        f"{BLOCK}.norm2.weight": [(1,), (1, 16, 1, 1)],
        f"{BLOCK}.pos_embed.conv.weight": [(1, 16, 3, 3)],
        "head.bias": [(1000,)],
        "head.weight": [(12, 5)],
    },
)


@pytest.mark.parametrize(("name", "shape", "words"), CHANGES)
def test_refuse__missing_unexpected_and_misshapen(released, name, shape, words):
    unless_shape = "nothing was loaded" if words.startswith("is") else ""
    assert_refused(changed(released, name, shape), RuntimeError, f"'{name}'", words, unless_shape)


def test_refuse__altered_constants_and_what_is_no_tensor_no_name_no_dictionary_or_no_file(released, tmp_path):
    for name in (f"layers.1.blocks.1.attn.{fold}.weights" for fold in ("fold", "unfold")):
        own = released[name]
        for altered in (own.flip(0), torch.full((9, 1, 3, 3), 1 / 9), torch.eye(9), own[:3]):
            assert_refused(released | {name: altered}, RuntimeError, f"'{name}'", "constant")
    for value in ([1.0, 2.0], "weights", None, 3):
        assert_refused(released | {"norm.weight": value}, RuntimeError, "'norm.weight'", type(value).__name__)
    assert_refused(released | {7: torch.zeros(1)}, RuntimeError, "7")
    assert_refused({}, RuntimeError, "'patch_embed.proj.0.weight'", "missing")
    for content in ([1, 2, 3], torch.zeros(3), None):
        torch.save(content, tmp_path / "other.pth")
        assert_refused(tmp_path / "other.pth", RuntimeError, "other.pth")
    assert_refused(tmp_path / "nowhere.pth", FileNotFoundError, "nowhere.pth")
    assert_refused(str(tmp_path), FileNotFoundError, str(tmp_path))


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\x00" * 100, None], ids=["", "text", "zeros", "cut"])
def test_refuse__corrupt_file(released, tmp_path, suffix, content):
    path = tmp_path / f"broken.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(released, path)
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    assert_refused(path, RuntimeError, path.name)
    if suffix == "pth":
        words = r"^.*broken\.pth cannot be loaded as a file of tensors only \(.*\)$"
        refused(words, convert_release, path, tmp_path / "x.safetensors", error=RuntimeError)
    assert files(tmp_path) == [path.name]


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_refuse__code_in_the_file_never_runs(released, tmp_path):
    traces = tmp_path / "it ran"
    writers = (torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2)))
    for writer, place in itertools.product(writers, ("args", "epoch", "state_dict")):
        writer(dict(model=released) | {place: Bomb(traces)}, tmp_path / "bomb.pth")
        assert_refused(tmp_path / "bomb.pth", RuntimeError, "bomb.pth")
        words = r"bomb\.pth cannot be loaded as a file of tensors only"
        refused(words, convert_release, tmp_path / "bomb.pth", tmp_path / "safe.safetensors", error=RuntimeError)
    assert not traces.exists() and [path.name for path in tmp_path.iterdir()] == ["bomb.pth"]
    pickle.loads(pickle.dumps(Bomb(traces)))
    assert traces.exists()  # it would have


def test_refuse__other_modules_and_another_variant(released):
    for module in (nn.Linear(2, 2), MAT(8, (1, 1, 1, 1), (1, 2), hidden=8), nn.Sequential()):
        words = f"^no released weights are known for {type(module).__name__}; .*STViT.*$"
        refused(words, broadsight.load_release, module, released)
    other = STViT((8, 16, 16, 24), (1, 1, 1, 1), (1, 2, 2, 3), projection=12, num_classes=5)
    assert_refused(released, RuntimeError, "'layers.1.blocks.1.", " more is unexpected; ", model=other)
    for module in (nn.Linear(2, 2), small(seed=1)):  # pools and their models alone have released names
        refused(f"^{type(module).__name__} has no released names; .*MultiTokenPool.*$", released_tensors, module, {})


# ---- the pool of MAP; its names are the matter of tests/weights/test_released_map.py

GROUP, MERGE = "mmcap.mmcap.1", "mmcap.multi_scale.concat_conv"
GRAM = f"{GROUP}.gram_token_extraction"


def small_pool(seed: int, **changes) -> MultiTokenPool:
    torch.manual_seed(seed)
    settings = dict(level=1, dim=12, groups=2, tokens=2, gram_dim=8, gram_groups=2, heads=4) | changes
    return randomize(MultiTokenPool((4, 10), 5, **settings))


@pytest.fixture
def released_pool() -> Weights:
    """With the constants that the authors store."""
    pool = small_pool(seed=1)
    triangle = torch.tensor([8 * i + j for i in range(8) for j in range(i, 8)])
    constants = {f"mmcap.mmcap.{g}.gram_token_extraction.bp_index": triangle.clone() for g in range(2)}
    return released_tensors(pool, pool.state_dict()) | constants


def assert_pool_refused(source, *words: str, **changes) -> None:
    assert_refused(source, RuntimeError, *words, "nothing was loaded", model=small_pool(seed=2, **changes))


def test_pool__load(released_pool, tmp_path):
    torch.save(timm_checkpoint(released_pool), tmp_path / "pool.pth.tar")
    for source in (released_pool, tmp_path / "pool.pth.tar"):
        pool = small_pool(seed=2)
        assert broadsight.load_release(pool, source) is pool
        assert_identical(pool.state_dict(), small_pool(seed=1).state_dict())
    again = released_tensors(pool, pool.state_dict())
    assert_identical(again, {name: released_pool[name] for name in again})
    broadsight.load_release(small_pool(seed=2), again)  # constants may be absent


ELSEWHERE = [f"mmcap.mmcap.2.{name}" for name in ("attention.0.norm1.weight", "gram_token_extraction.bp_index")]
ELSEWHERE += ["head.heads.0.norm.weight", "heads.0.weight", "merge.weight", "pool.x_cls"]
POOL_CHANGES = changes(
    [f"{MERGE}.0.weight", f"{GRAM}.bp_reduction.0.weight", f"{GROUP}.attention.0.attn.k.bias", "heads.1.head.weight"],
    [f"{GROUP}.attention.1.norm1.weight", f"{GROUP}.attention.0.attn.w1.weight", f"{GROUP}.x_cls", *ELSEWHERE],
    {
        f"{MERGE}.0.weight": [(14, 12, 1, 1), (12, 14)],
        f"{GRAM}.bp_reduction.0.weight": [(24, 36, 1, 1)],
        f"{GROUP}.attention.0.attn.q.weight": [(144,), (12, 12, 1, 1)],
        f"{GROUP}.attention.0.mlp.fc1.weight": [(6, 48, 1, 1)],
        f"{GROUP}.attention.0.norm2.bias": [(1,)],
        f"{GRAM}.ch_reduction.1.num_batches_tracked": [(1,)],
        "heads.0.head.bias": [(1000,)],
        "self_dt_heads.1.head.weight": [(12, 5)],
    },
)


@pytest.mark.parametrize(("name", "shape", "words"), POOL_CHANGES)
def test_pool__missing_unexpected_and_misshapen(released_pool, name, shape, words):
    own = tuple(released_pool[name].shape) if name in released_pool else None
    assert own != shape
    expected = str(own) if words.startswith("(") else ""
    assert_pool_refused(changed(released_pool, name, shape), f"'{name}'", words, expected)


def test_pool__light_ignores_token_classifiers_alone(released_pool):
    light = broadsight.load_release(small_pool(seed=2, light=True), released_pool)
    assert_identical(light.state_dict(), small_pool(seed=1).lighten().state_dict())
    without = {name: value for name, value in released_pool.items() if not name.startswith("heads.")}
    broadsight.load_release(small_pool(seed=2, light=True), without)
    assert_pool_refused(without, "'heads.0.norm.weight' and 7 more is missing")
    assert_pool_refused(released_pool | {"header": torch.zeros(1)}, "'header' is unexpected", light=True)
    del released_pool["self_dt_heads.0.head.bias"]
    assert_pool_refused(released_pool, "'self_dt_heads.0.head.bias' is missing", light=True)


VARIANTS = dict(groups=3, tokens=4, layers=2, gram=False, gram_dim=7, head_mixing=True, classifier="linear", level=-1)
VARIANTS |= dict(mean_token=False, attn_dim=24, mlp_groups=1, mlp_ratio=2)


def test_pool__altered_constant_and_another_variant(released_pool):
    name = f"{GRAM}.bp_index"
    index = released_pool[name]
    for altered in (index.flip(0), index + 1, index.float() + 0.25, index[:-1], index[None], torch.zeros_like(index)):
        assert_pool_refused(released_pool | {name: altered}, f"'{name}'", "upper-triangle")
    for change in ({"groups": 1}, *({name: value} for name, value in VARIANTS.items())):
        assert_pool_refused(released_pool, "variant", **change)


@pytest.fixture
def pickled(released, tmp_path) -> Path:
    torch.save(timm_checkpoint(released), tmp_path / "stvit.pth.tar")
    return tmp_path / "stvit.pth.tar"


def test_convert__keeps_weights_and_plain_values_and_names_the_rest(pickled, released, tmp_path):
    target = pickled.with_name("stvit.safetensors")
    assert convert_release(str(pickled), str(target)) == target
    written = load_file(target)
    assert_identical(written, released)
    assert all(written[name].dtype == value.dtype for name, value in released.items())
    names, metadata = contents(target)
    assert sorted(names) == sorted(released)
    plain = dict(arch="stvit_test", epoch="299", metric="82.85", version="2")
    assert metadata == plain | dict(format="pt", left_out="optimizer, args")
    assert_loaded(target)
    assert files(target.parent) == ["stvit.pth.tar", "stvit.safetensors"]
    target = tmp_path / "x.safetensors"
    both = dict(state_dict=released, state_dict_ema=as_released(small(seed=3)))
    for content, left_out in ((released, {}), (both, dict(left_out="state_dict_ema"))):
        torch.save(content, tmp_path / "x.pth")
        convert_release(tmp_path / "x.pth", target, overwrite=True)
        assert contents(target)[1] == {"format": "pt"} | left_out
        assert_loaded(target)
    # Tensors that share memory or have gaps
    whole = torch.arange(12.0).view(3, 4)
    weights = dict(one=whole, same=whole, part=whole[1], turned=whole.mT, parameter=nn.Parameter(torch.ones(2)))
    torch.save(weights, tmp_path / "x.pth")
    before = target.read_bytes()
    words = r"x\.safetensors exists; .*overwrite=True$"
    refused(words, convert_release, tmp_path / "x.pth", target, error=FileExistsError)
    assert target.read_bytes() == before
    assert_identical(load_file(convert_release(tmp_path / "x.pth", target, overwrite=True)), weights)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("module", "place"), [(release, "save_file"), (os, "replace")])
def test_convert__interrupted_leaves_nothing(pickled, monkeypatch, overwrite, module, place):
    def fails(*arguments, **_) -> None:
        if place == "save_file":
            Path(arguments[1]).write_bytes(b"half of it")
        raise KeyboardInterrupt

    target = pickled.with_name("stvit.safetensors")
    if overwrite:
        target.write_text("precious")
    before = files(target.parent)
    monkeypatch.setattr(module, place, fails)
    with pytest.raises(KeyboardInterrupt):
        convert_release(pickled, target, overwrite=overwrite)
    assert files(target.parent) == before
    assert not overwrite or target.read_text() == "precious"


def test_convert__refuses_what_is_no_tensor(tmp_path):
    for content, words in (
        (dict(state_dict=dict(a=torch.zeros(1), b=[1.0])), ["'b'", "list"]),
        (dict(a=torch.zeros(1), b=argparse.Namespace()), ["'b'", "Namespace"]),
        (dict(state_dict={7: torch.zeros(1)}), ["7"]),
        ([torch.zeros(1)], ["list"]),
        (dict(state_dict={}), ["no tensors"]),
        (dict(model=nn.Linear(1, 1)), ["torch.nn.modules.linear.Linear"]),
        (dict(model=dict(a=torch.zeros(1)), args=Path("x")), ["pathlib"]),
        (dict(model=dict(a=torch.zeros(1)), args=np.zeros(3)), ["numpy"]),
    ):
        torch.save(content, tmp_path / "odd.pth")
        source, target = tmp_path / "odd.pth", tmp_path / "odd.safetensors"
        message = refused("odd.pth", convert_release, source, target, error=RuntimeError)
        assert all(word in message for word in words), message
        assert files(tmp_path) == ["odd.pth"]


def test_convert__wrong_names(pickled, tmp_path):
    for source, target, words, error in (
        ("stvit.pth.tar", "x.pth", r"cannot convert to .*x\.pth; expected a name ending in \.safetensors", ValueError),
        ("x.safetensors", "y.safetensors", r"x\.safetensors is a safetensors file already; ", ValueError),
        ("nowhere.pth", "y.safetensors", r"nowhere\.pth is not a file; ", FileNotFoundError),
        ("stvit.pth.tar", "nowhere/y.safetensors", "there is no folder .*nowhere; create it first", FileNotFoundError),
    ):
        refused(words, convert_release, tmp_path / source, tmp_path / target, error=error)
    assert files(tmp_path) == ["stvit.pth.tar"]
