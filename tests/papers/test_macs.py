"""Counts of published forms against sums done by hand, and for MAP against the count of the authors' form."""

import runpy
from pathlib import Path

import pytest
import timm
import torch
import yaml
from timm.layers import LayerNorm2d, SelectAdaptivePool2d
from torch import Tensor, nn

import broadsight
from broadsight.inspection.macs import executed_macs
from broadsight.layers import BilinearPatchEmbed, MultiTokenPool
from broadsight.papers.macs import (
    FVCORE,
    FVCORE_MEAN,
    LAYERS,
    OLD_PROFILER,
    PRODUCTS,
    Convention,
    count,
    published_macs,
)
from broadsight.surgery.pooling import swap_pool
from tests.inspection.test_macs import attention
from tests.zoo import marked

PerGroupPool = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "per_group_map.py"))["PerGroupPool"]
POOLED = SelectAdaptivePool2d(pool_type="avg")
ADDED = [(nn.BatchNorm2d(3), FVCORE, 2), (nn.BatchNorm2d(3), OLD_PROFILER, 2), (nn.BatchNorm2d(3), PRODUCTS, 0)]
ADDED += [(LayerNorm2d(3), FVCORE, 5), (nn.LayerNorm(6), FVCORE, 5), (nn.LayerNorm(6), PRODUCTS, 0)]
ADDED += [(nn.GELU(), OLD_PROFILER, 1), (nn.GELU(), FVCORE, 0), (nn.ReLU(), OLD_PROFILER, 0)]
ADDED += [(POOLED, FVCORE, 1), (POOLED, FVCORE_MEAN, 0), (SelectAdaptivePool2d(pool_type=""), FVCORE, 0)]
POOL = dict(level=2, dim=24, groups=3, tokens=4, gram_groups=12, attn_dim=12, heads=3)
MAPS = ((2, 6, 16, 12), (2, 10, 8, 6), (2, 12, 4, 3), (2, 20, 2, 2))
CHANGES = [{}, dict(head_mixing=True), dict(light=True), dict(mean_token=False), dict(gram=False, classifier="linear")]
CHANGES += [dict(groups=1, tokens=1, mean_token=False, mlp_ratio=2, mlp_groups=1), dict(level=-1)]
CHANGES += [dict(level=-1, dim=20, attn_dim=20, heads=2, gram=False)]


@pytest.mark.parametrize(("layer", "convention", "each"), ADDED)
def test_published__adds_what_the_tool_counts(layer, convention, each):
    model, extra = nn.Sequential(layer), each * 3 * 4 * 6
    assert count(model, (1, 3, 4, 6), convention=convention) == (0, extra)
    assert published_macs(model, (4, 6), convention) == extra and executed_macs(model, (4, 6)) == 0


def test_published__adds_up_over_a_model():
    pool = SelectAdaptivePool2d(pool_type="avg", flatten=True)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), LayerNorm2d(8)
    model = nn.Sequential(*layers, pool, nn.Linear(8, 2))
    pixels, products = 4 * 6, 4 * 6 * 8 * 27 + 8 * 2
    assert published_macs(model, (4, 6), PRODUCTS) == products
    assert published_macs(model, (4, 6), FVCORE) == products + pixels * 8 * (2 + 5 + 1)
    assert published_macs(model, (4, 6), OLD_PROFILER) == products + pixels * 8 * (2 + 1 + 5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.BatchNorm2d(8), attention(8, 2, True))
    tokens, linear = 5 * 7, 5 * 7 * (8 * 24 + 8 * 8)
    assert published_macs(model, (5, 7), LAYERS) == tokens * 27 * 8 + linear
    executed, extra = count(model, (1, 3, 5, 7), convention=LAYERS)
    assert extra == -2 * tokens * tokens * 8 and executed == executed_macs(model, (5, 7))
    model = BilinearPatchEmbed(4, 8)
    executed, extra = count(model, (1, 4, 10, 6), convention=Convention("samples alone", sample=4))
    cells = 5 * 3
    assert executed == cells * (4 * 9 + 4 * 2 + 4 * 9 + 4 * 8)
    assert extra == 4 * cells * 4


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


class OfMaps(nn.Module):
    """A pool that takes its maps one by one."""

    def __init__(self, pool: nn.Module):
        super().__init__()
        self.pool = pool

    def forward(self, *maps: Tensor) -> Tensor:
        return self.pool(list(maps))


@pytest.mark.parametrize("convention", [LAYERS, PRODUCTS], ids=lambda convention: convention.name)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_published__pool_as_its_authors_formulate_it(changes, convention):
    channels = [shape[1] for shape in MAPS]
    arguments = POOL | changes
    ours = OfMaps(MultiTokenPool(channels, 10, **arguments))
    reference = OfMaps(PerGroupPool(channels, 10, **arguments))
    expected = sum(count(reference, *MAPS, convention=convention))
    assert sum(count(ours, *MAPS, convention=convention)) == expected
    assert sum(count(broadsight.fuse(ours), *MAPS, convention=convention)) == expected


@pytest.mark.parametrize("convention", [LAYERS, PRODUCTS], ids=lambda convention: convention.name)
def test_published__every_block_of_the_pool_counts(convention):
    def published(layers: int, distill_tokens: int = 0) -> int:
        pool = MultiTokenPool([s[1] for s in MAPS], 10, **POOL, layers=layers, distill_tokens=distill_tokens)
        return sum(count(OfMaps(pool), *MAPS, convention=convention))

    assert published(3) - published(2) == published(2) - published(1) > 0
    assert published(1, distill_tokens=1) > published(1)


MODELS = yaml.safe_load(Path(__file__).with_name("pooled_models.yaml").read_text("utf-8"))
# The largest, which test_verify counts too, though only to the digits that are printed.
LARGEST = ("map_maxvit_small", "map_maxvit_tiny", "map_convnext_small", "map_resnet101d", "map_resnet75d")


@pytest.mark.parametrize("name", marked(MODELS, slow=LARGEST))
def test_published__pooled_models(name):
    train, inference, light, layers, products = MODELS[name]
    with torch.device("meta"):
        model = swap_pool("resnet50", "map") if name == "resnet50" else timm.create_model(name)
    assert parameters(model) == train
    assert round(published_macs(model, (224, 224), LAYERS) / 1e9, 3) == layers
    if products:
        assert round(published_macs(model, (224, 224), PRODUCTS) / 1e9, 3) == products
    if inference:
        assert parameters(model) - parameters(model.head.average_classifier) == inference
        assert parameters(model.lighten()) == light


def test_published__other_pools_and_another_image_size():
    for pool, layers in dict(gap=4.089, vgg=4.299, dft=4.156, cap=4.534).items():
        with torch.device("meta"):
            model = swap_pool("resnet50", pool)
        assert round(published_macs(model, (224, 224), LAYERS) / 1e9, 3) == layers
    with torch.device("meta"):
        model = swap_pool("resnet50", "map", groups=1)
    maps = model.pyramid(model.backbone.eval(), torch.zeros(1, 3, 200, 136, device="meta"))
    alone = count(OfMaps(model.head), *(tuple(x.shape) for x in maps), convention=PRODUCTS)
    assert count(model, (1, 3, 200, 136), convention=PRODUCTS)[1] == alone[1] > 0
