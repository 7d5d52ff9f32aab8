"""Blocks of models: their names and order, and the maps that are read from them."""

import copy
import re
from collections import Counter

import pytest
import timm
import torch
from torch import Tensor, nn

import broadsight
from broadsight.inspection.blocks import find_blocks, find_layers, watch_blocks
from broadsight.inspection.passing import pass_images, peek
from tests.analysis.measures.toy_models import Made
from tests.inspection.foreign_blocks import Residual
from tests.inspection.timm_models import created, images, read_table
from tests.training.small_runs import refusal
from tests.zoo import SMALLEST, shallow


def staged(path: str, depths: tuple[int, ...]) -> list[str]:
    """Names of blocks, whose numbers of stage and block are counted from 0 on and from 1 on."""
    places = [(stage, block) for stage, depth in enumerate(depths) for block in range(depth)]
    return [path.format(stage, block, stage + 1, block + 1) for stage, block in places]


def maps(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The maps of all blocks in one pass."""
    blocks = find_blocks(model, x)
    seen: dict[str, list[Tensor]] = {}
    with watch_blocks(model, blocks, lambda i, y: seen.setdefault(blocks[i].name, []).append(y.clone())):
        pass_images(model, x, batch_size=len(x))
    return {name: torch.cat(parts) for name, parts in seen.items()}


KNOWN = read_table("blocks.yaml")
SLOW = {name for name, known in KNOWN.items() if known.get("slow")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in KNOWN])
def test_blocks_of_timm(name):
    known, blocks = KNOWN[name], find_blocks(created(name), images(name, 1))
    assert [block.name for block in blocks] == staged(known["path"], known["depths"])
    assert {(block.layout.form, block.layout.prefix) for block in blocks} == {(known["form"], known.get("prefix", 0))}


@pytest.mark.parametrize(
    "name", ["resnet10t", "convnext_atto", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224", "hiera_tiny_224"]
)
def test_maps_are_those_that_the_model_says_it_has(name):
    model, x = created(name), images(name)
    with torch.no_grad():
        said = model.forward_intermediates(x, intermediates_only=True)
    found = list(maps(model, x).values())
    for wanted in said[name == "resnet10t" :]:  # less the stem
        assert any(y.shape == wanted.shape and torch.allclose(y, wanted, atol=1e-5) for y in found)


@pytest.mark.slow
def test_bottlenecks_of_a_resnet_and_layers_of_a_vgg():
    blocks = find_blocks(timm.create_model("resnet50").eval(), torch.randn(1, 3, 64, 64))
    names = [f"layer{i}.{j}" for i, n in enumerate((3, 4, 6, 3), 1) for j in range(n)]
    assert [block.name for block in blocks] == names
    blocks = find_blocks(timm.create_model("vgg11").eval(), torch.randn(1, 3, 64, 64))
    assert [block.name for block in blocks] == [f"features.{i}" for i in (1, 4, 7, 9, 12, 14, 17, 19)]
    assert [block.layout.grid for block in blocks] == [(n, n) for n in (64, 32, 16, 16, 8, 8, 4, 4)]


@pytest.mark.parametrize("name", SMALLEST)
def test_blocks_of_ours(name):
    model, x = shallow(name).eval(), torch.randn(2, 3, 64, 96)
    found = maps(model, x)
    assert list(found) == staged("stages.{}.blocks.{}", (1, 1, 1, 1))
    assert [tuple(y.shape[2:]) for y in found.values()] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    with torch.no_grad():
        y = model.forward_intermediates(x, intermediates_only=True)
    norm = model.stages[0].norm
    assert torch.allclose(norm(found["stages.0.blocks.0"].permute(0, 2, 3, 1)).permute(0, 3, 1, 2), y[0], atol=1e-4)


@pytest.mark.parametrize("name", ["mat_1", "vit_tiny_patch16_224"])
def test_watching_changes_no_bit(name):
    """Also where a batch runs in slices, of which a block sees one at a time."""
    model = shallow(name).train() if name == "mat_1" else created(name).train()
    x = torch.randn(6, 3, 96, 96)
    flags = [m.training for m in model.modules()]
    plain, watched, counts = [], [], Counter()
    pass_images(model, x, batch_size=6, see=lambda y, _: plain.append(y))
    blocks = find_blocks(model, x)
    with watch_blocks(model, blocks, lambda number, features: counts.update({number: len(features)})):
        pass_images(model, x, batch_size=6, see=lambda y, _: watched.append(y))
    assert torch.equal(plain[0], watched[0]) and counts == dict.fromkeys(range(len(blocks)), 6)
    assert [m.training for m in model.modules()] == flags
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_pooled_and_broadcasting_models_have_the_blocks_of_their_backbone():
    pooled = broadsight.swap_pool(created("resnet10t"), "map", num_classes=5)
    names = [block.name for block in find_blocks(pooled, torch.randn(1, 3, 64, 96))]
    assert names == [f"backbone.layer{i}.0" for i in (1, 2, 3, 4)]
    model, x = created("vit_tiny_patch16_224"), images("vit_tiny_patch16_224", 1)
    plain = [(b.name, b.layout) for b in find_blocks(model, x)]
    broadsight.add_context_broadcast(model, image_size=96)
    assert plain == [(b.name, b.layout) for b in find_blocks(model, x)]


def test_layers_of_a_sequence_and_models_in_which_nothing_is_found():
    """A layer ends before the next convolution, without what pools; a shared activation belongs to none."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU()]
    model = nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)).eval()
    x = torch.randn(2, 3, 20, 20)
    blocks = find_blocks(model, x)
    assert [(block.name, block.layout.grid) for block in blocks] == [("0.2", (18, 18)), ("0.5", (7, 7))]
    with torch.no_grad():
        assert torch.equal(maps(model, x)["0.2"], model[0][:3](x))
    for model in (nn.Flatten(), nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2))):
        said = refusal(lambda model=model: find_blocks(model, torch.zeros(1, 3, 2, 2)))
        assert "has no blocks that give a map of several places; " in said and "such as resnet50" in said
    assert "model is a str" in refusal(lambda: find_blocks("resnet50", torch.zeros(1, 3, 2, 2)))  # ty: ignore
    said = refusal(lambda: find_blocks(created("resnet10t"), torch.zeros(1, 5, 64, 64)))
    assert re.match("ResNet does not take an image of 5x64x64: .*; pass images of the size", said)


def test_other_image_sizes_have_other_grids_and_equal_sides_the_form_of_others_of_their_class():
    """Where channels are as many as places are on a side, the form could be either."""
    model = created("vit_tiny_patch16_224")
    blocks = find_blocks(model, torch.zeros(1, 3, 64, 96))
    grids = []
    with watch_blocks(model, blocks[:1], lambda i, y: grids.append(tuple(y.shape[2:]))):
        pass_images(model, [torch.zeros(1, 3, 64, 96), torch.zeros(1, 3, 96, 64), torch.zeros(1, 3, 48, 48)])
    assert grids == [(4, 6), (6, 4), (3, 3)]

    def mixer(dim: int) -> nn.Module:
        return Residual(nn.Sequential(nn.Linear(dim, dim), nn.Linear(dim, dim)))

    def forward(self: Made, x: Tensor) -> Tensor:
        x = self.first[0](x.permute(0, 2, 3, 1))
        return self.second[0](self.reduce(x)).mean((1, 2))

    parts = dict(first=nn.ModuleList([mixer(8)]), second=nn.ModuleList([mixer(5)]), reduce=nn.Linear(8, 5))
    blocks = find_blocks(Made(forward, **parts), torch.randn(1, 8, 8, 8))
    assert [(block.name, block.layout.form) for block in blocks] == [("first.0", "NHWC"), ("second.0", "NHWC")]


def test_layers_by_name():
    model, x = shallow(next(n for n in SMALLEST if n.startswith("emsnet"))).eval(), torch.randn(1, 3, 64, 64)
    static = [block.name for block in find_layers(model, x, "*.mixer.static")]
    assert static == [f"stages.{i}.blocks.0.mixer.static" for i in range(4)]
    both = find_layers(model, x, "*.0.blocks.0.mixer.dynamic, *.0.blocks.0.mixer.static")
    assert [b.name.rpartition(".")[2] for b in both] == ["static", "dynamic"]
    said = refusal(lambda: find_layers(model, x, "*.nothing"))
    assert "no module of EMSNet is called *.nothing; * stands for anything" in said
    assert "head.fc gives no map of several places" in refusal(lambda: find_layers(model, x, ["head.fc"]))


def test_peek_gives_all_back():
    given = [torch.zeros(0, 3, 4, 4), (torch.ones(2, 3, 4, 4), torch.zeros(2)), torch.zeros(1, 3, 4, 4)]
    first, again = peek(iter(given))
    assert first.shape == (1, 3, 4, 4) and first.all()
    assert [x is y for x, y in zip(again, given, strict=True)] == [True] * 3
    assert "images are empty" in refusal(lambda: peek([])) and "images are a int" in refusal(lambda: peek(3))  # ty: ignore


def test_compiled_and_copied_models():
    model, x = created("resnet10t"), torch.randn(1, 3, 64, 64)
    plain = maps(copy.deepcopy(model), x)
    compiled = torch.compile(model, backend="eager")
    found = maps(compiled, x)  # ty: ignore[invalid-argument-type]
    assert list(found) == list(plain) and all(torch.equal(found[name], plain[name]) for name in plain)
