"""Parameters and operations of the papers' dense tables: counted on the models themselves, row by row."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from broadsight.dense import counting
from broadsight.dense.stages import open_stages
from broadsight.layers import AbstractTokenAttention, MultiTokenNeck, MultiTokenPool, PoolNeck
from broadsight.papers import dense as dense_tables
from broadsight.papers import verify as verification
from broadsight.papers.dense import PAPERS, DenseModel, convention, rows
from broadsight.papers.macs import LAYERS, OLD_PROFILER, PRODUCTS, count
from broadsight.papers.tables import contradictions, more_rows, roundings
from broadsight.papers.verify import published, verify

WIDTH = 256
PRINTED = published()
BASELINES = more_rows("dense")["baselines"]
CHANNELS = (64, 128, 256, 512)  # of resnet18
GRIDS = [(200 * 320) // 4**i for i in range(4)]  # positions of an 800x1280 image at strides 4 to 32


def size_of(task: str) -> list[int]:
    return [int(side) for side in more_rows("dense")["sizes"][task].split("x")]


def measured(task: str, backbone: str) -> tuple[float, float]:
    """Parameters in M and operations in G, as the row's paper counts them."""
    model, size = DenseModel(task, backbone), size_of(task)
    macs = sum(count(model, (1, 3, *size), convention=convention(f"{task} on {backbone}")))
    return sum(p.numel() for p in model.parameters()) / 1e6, macs / 1e9


@pytest.mark.parametrize(
    ("task", "backbone", "params", "macs"),
    [  # the first three were also found in closed form
        ("retinanet", "partialformer_b1", 16.155, 167.494),
        ("semantic_fpn", "partialformer_b1", 10.753, 101.832),
        pytest.param("upernet", "partialformer_b1", 34.820, 856.327, marks=pytest.mark.slow),
        ("mask_rcnn", "partialformer_b1", 26.658, 185.702),
        pytest.param("mask_rcnn", "resnet50", 44.401, 259.794, marks=pytest.mark.slow),
        ("mask_rcnn", "map_resnet50", 56.623, 285.141),
        ("mask_rcnn", "map_resnet50, fitted", 60.689, 283.982),
    ],
)
def test_dense_model__params_and_macs(task, backbone, params, macs):
    assert measured(task, backbone) == pytest.approx((params, macs), abs=5e-4)


def pyramid_and_proposals() -> int:
    """Products of a feature pyramid over resnet18 and of the proposals on it, for an 800x1280 image."""
    lateral = sum(n * channels * WIDTH for n, channels in zip(GRIDS, CHANNELS, strict=True))
    proposals = sum([*GRIDS, 13 * 20]) * (9 * WIDTH**2 + 3 * (1 + 4) * WIDTH)
    return lateral + sum(GRIDS) * 9 * WIDTH**2 + proposals


def mask_head() -> int:
    """Products of four convolutions, a transposed one and the classifier, for 100 regions; one class is background."""
    return 100 * (4 * 14**2 * 9 * WIDTH**2 + 14**2 * 4 * WIDTH**2 + 28**2 * 81 * WIDTH)


def test_r_cnn__by_hand(monkeypatch):
    resnet18 = count(dense_tables._stages("resnet18"), (1, 3, 800, 1280), convention=PRODUCTS)[0]
    # Box heads of Mask R-CNN and of a stage of the cascade, for 1000 regions
    boxes = 1000 * (49 * WIDTH * 1024 + 1024**2 + 1024 * 81 * 5)
    cascaded = 1000 * (4 * 49 * 9 * WIDTH**2 + 49 * WIDTH * 1024 + 1024 * 81 * 5)
    heads = [("mask_rcnn", PRODUCTS, boxes + mask_head()), ("mask_rcnn", LAYERS, boxes + mask_head())]
    for task, how, expected in (*heads, ("cascade_mask_rcnn", PRODUCTS, 3 * (cascaded + mask_head()))):
        ours = sum(count(DenseModel(task, "resnet18"), (1, 3, 800, 1280), convention=how))
        assert ours == resnet18 + pyramid_and_proposals() + expected
    model = DenseModel("mask_rcnn", "resnet18")
    usual = sum(count(model, (1, 3, 64, 64), convention=PRODUCTS))
    monkeypatch.setattr(counting, "REGIONS", 200)
    assert sum(count(model, (1, 3, 64, 64), convention=PRODUCTS)) - usual == mask_head()


class Shown(nn.Module):
    """A layer with what its published form has beyond it."""

    def __init__(self, layer: nn.Module, given=lambda x: x):
        super().__init__()
        self.layer, self.given = layer, given

    def forward(self, *maps):
        given = self.given(*maps)
        return self.layer(*given) if isinstance(given, tuple) else self.layer(given)


@pytest.mark.parametrize(("side", "padded"), [(21, 21), (20, 21), (15, 21), (3, 7)])
def test_mat_and_transposed__windows_are_padded_before_the_projections(side, padded):
    C, windows = 16, (padded // 7) ** 2
    model = Shown(AbstractTokenAttention(C, 2)).to("meta")
    assert sum(count(model, (1, side, side, C), convention=LAYERS)) == 4 * C**2 * padded**2 + 6 * C**2 * windows
    layer = nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1, device="meta")  # counts once
    assert {sum(count(Shown(layer), (1, 8, 5, 7), convention=how)) for how in (PRODUCTS, LAYERS)} == {5 * 7 * 8 * 16**2}


def test_neck__keys_and_values_at_every_position():
    channels, D, tokens, n = (4, 8, 16, 32), 64, 8, 6 * 5
    neck = MultiTokenNeck(channels, dim=D, tokens=tokens, mlp_groups=2, norm="group")
    shapes = [(1, c, 24 // 2**i, 20 // 2**i) for i, c in enumerate(channels)]
    attention = 2 * tokens * D**2 + 2 * (tokens + n) * D**2
    expected = n * D * sum(channels) + attention + tokens * 4 * D**2 + D * sum(channels)
    assert sum(count(Shown(neck, lambda *maps: list(maps)).to("meta"), *shapes, convention=LAYERS)) == expected
    assert sum(p.numel() for p in neck.parameters() if p.ndim > 1) == 2 * D * sum(channels) + 8 * D**2 + tokens * D


def test_pool_neck__merge_gram_keys_and_values_at_every_position():
    channels, D, A, n = (4, 8, 16, 32), 64, 32, 6 * 5
    pool = MultiTokenPool(channels, 7, level=2, dim=D, groups=2, tokens=4, attn_dim=A, heads=4, gram_groups=4)
    shapes = [(1, c, 24 // 2**i, 20 // 2**i) for i, c in enumerate(channels)]
    neck = Shown(PoolNeck(pool, channels), lambda *maps: (list(maps), list(maps)))
    every = n * (D * sum(channels) + 2 * (D * D + 2 * D * A))
    tokens = 2 * 5 * 4 * D * A + 5 * 2 * 2 * 4 * D * D // 2  # queries, results, keys and values; their MLPs
    once = 2 * (D * (D + 1) // 2) * D * 4 // 4 + D * sum(channels)  # Gram matrices to tokens; tokens to stages
    assert sum(count(neck.to("meta"), *shapes, convention=LAYERS)) == every + tokens + once


def test_rows__are_those_of_the_published_tables_and_name_the_size():
    listed = [entry for paper in PAPERS for entry in PRINTED[paper]["dense"]]
    wanted = Counter((f"{e['task']} on {e['backbone']}", e["params"], e["macs"]) for e in listed)
    wanted += Counter((f"{task} on {backbone}", *figures) for task, backbone, *figures in BASELINES)
    wanted += Counter((f"{name}, fitted", *figures) for name, *figures in wanted if "on map_" in name)
    found = Counter((row.rpartition(": ")[2], *printed.values()) for row, printed, _ in rows(PRINTED))
    assert found == wanted and len(listed) == 45 and max(found.values()) == 1
    assert set(PAPERS) == {paper for paper, tables in PRINTED.items() if "dense" in tables}
    figures = {row.rpartition(": ")[2].split()[0]: list(printed) for row, printed, _ in rows(PRINTED)}
    sizes = dict.fromkeys(("retinanet", "mask_rcnn", "cascade_mask_rcnn"), "800x1280")
    sizes |= dict(ssdlite="320x320", simple_baseline="256x192") | dict.fromkeys(("semantic_fpn", "upernet"), "512x2048")
    assert {task: names[1].removeprefix("macs at ") for task, names in figures.items()} == sizes
    assert all(names[0] == "params" for names in figures.values())


def test_rows__what_cannot_be_built_says_why_and_conventions_are_the_papers(monkeypatch):
    monkeypatch.setattr(dense_tables, "find_spec", lambda name: None)
    left_out = {row.rpartition(": ")[2]: build for row, _, build in rows(PRINTED) if isinstance(build, str)}
    others = {name for name, reason in left_out.items() if "broadsight[seg]" in reason}
    assert len(others) == len(left_out) == 9 and all(name.startswith("upernet") for name in others)
    names = ("retinanet on emsnet_tiny", "ssdlite on mat_1", "upernet on partialformer_b1")
    assert [convention(name) for name in names] == [OLD_PROFILER, LAYERS, PRODUCTS]
    assert convention("mask_rcnn on map_resnet50") == convention("mask_rcnn on resnet50") == dense_tables.NORMED_LAYERS
    assert roundings("Table 5.4: mask_rcnn", "params") == ["ROUND_DOWN"]
    assert roundings("Table 5.4: retinanet", "macs at 800x1280") == ("ROUND_HALF_UP",)
    known = {row.partition(" on ")[0] for row, _, _ in rows(PRINTED)}
    assert more_rows("roundings").keys() <= {"emsnet", *known}


def test_verify__states_of_rows(monkeypatch):
    """On the smallest of models: a match, an unexplained miss, and a row without a model."""
    model = partial(DenseModel, "semantic_fpn", "test_resnet")
    params = sum(p.numel() for p in model().parameters()) / 1e6
    figures = {"params": f"{params:.2f}", "macs at 512x2048": "1"}
    shown = [("Table 0: a", figures, model), ("Table 0: b", {"params": "3"}, "no such model")]
    monkeypatch.setattr(dense_tables, "rows", lambda tables: iter(shown))
    match, miss, not_run = verify(["dense"])
    assert (match.status, match.figure, match.family, match.convention) == ("match", "params", "dense", "")
    assert (miss.status, miss.note, miss.convention) == ("miss", "", "layers, batch norms")
    assert 88 < miss.executed <= miss.ours < 90  # nearly all of it in the decoder
    assert (not_run.status, not_run.ours, not_run.note) == ("not run", None, "no such model")


@pytest.mark.slow
def test_verify__every_row():
    checks = {(c.row.rpartition(": ")[2], c.figure): c for c in verify(["dense"])}
    assert len(checks) == 2 * (45 + 8 + len(BASELINES))
    assert Counter(c.status for c in checks.values()) == {"match": 93, "explained": 29}
    excused = {tuple(place) for family, *place in contradictions() if family == "dense"}  # none unused
    assert {place for place, c in checks.items() if c.status == "explained"} == excused
    assert all(bool(c.note) == (c.status != "match") for c in checks.values())
    for (name, figure), check in checks.items():
        of_pool = " on map_" in name and not name.endswith("fitted")
        off = abs(check.ours / float(check.paper) - 1)
        if not (of_pool and figure == "params"):
            assert off < (0.09 if "mat_1" in name else 0.04), check
        if of_pool:  # the operations are those of the paper's own pools, the parameters are not
            exact = figure != "params" and name != "semantic_fpn on map_resnet50"
            assert (check.status == "match") == exact and (figure == "params" or off < 0.004), check
        elif name.endswith(("_small", "_tiny", "resnet50", "fitted")) and figure == "params" and "emsnet" not in name:
            assert check.status == "match" or name == "semantic_fpn on resnet50"
    expected = {
        "retinanet on mat_3": (24.972, 171.865),
        "semantic_fpn on mat_3": (19.497, 106.901),
        "simple_baseline on partialformer_b1": (9.778, 1.757),
        "upernet on partialformer_b3": (64.507, 923.209),
        "cascade_mask_rcnn on convnext_tiny": (85.944, 740.528),
        "cascade_mask_rcnn on map_convnext_small": (135.353, 836.295),
        "cascade_mask_rcnn on map_convnext_small, fitted": (109.877, 830.219),
        "semantic_fpn on map_pvt_small": (38.230, 166.503),
    }
    for name, figures in expected.items():
        found = [check.ours for (row, _), check in checks.items() if row == name]
        assert found == pytest.approx(figures, abs=5e-4)


@pytest.mark.slow
def test_notes__of_convnext_and_emsnet(monkeypatch):
    """ConvNeXt's fitted neck, if all its weights ran at stride 16 beside the plain model; EMSNet with wider stages;
    the pool on a plain ResNet50."""
    plain = {(task, backbone): macs for task, backbone, _, macs in BASELINES if "convnext" in backbone}
    for (task, backbone), printed in plain.items():
        neck = dense_tables._stages(f"map_{backbone}, fitted").neck
        assert isinstance(neck, MultiTokenNeck)
        weights = sum(p.numel() for p in neck.parameters()) / 1e9
        height, width = size_of(task)
        total = measured(task, backbone)[1] + weights * (height // 16) * (width // 16)
        entry = next(e for e in PRINTED["map"]["dense"] if (e["task"], e["backbone"]) == (task, f"map_{backbone}"))
        assert round(total) == int(entry["macs"]) > int(printed)
    for name, (params, macs) in {"mask_rcnn": (56.556, 268.167), "semantic_fpn": (40.651, 186.237)}.items():
        with monkeypatch.context() as patched:
            patched.setattr(dense_tables, "POOLED", {"map_resnet50": ("resnet50", {})})
            dense_tables._stages.cache_clear()
            assert measured(name, "map_resnet50") == pytest.approx((params, macs), abs=5e-4)
    dense_tables._stages.cache_clear()
    with torch.device("meta"):
        stages = open_stages("emsnet_xtiny", dims=(32, 64, 120, 160))
    monkeypatch.setattr(dense_tables, "_stages", lambda backbone: stages)
    assert measured("retinanet", "emsnet_xtiny") == pytest.approx((12.41, 167.96), abs=0.005)  # 12.4, 167.9
    assert measured("mask_rcnn", "emsnet_xtiny") == pytest.approx((23.13, 186.22), abs=0.005)  # 23, 186


def test_dense_model__takes_no_memory():
    model = DenseModel("retinanet", "test_resnet")
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert verification.TABLES["dense"] is dense_tables
    with torch.no_grad():
        assert model.eval()(torch.empty(1, 3, 64, 96, device="meta")) is None
