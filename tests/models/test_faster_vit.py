"""MAP's FasterViT-3 on NVIDIA's package: the package's own maps, in a form that can be copied and exported; without it
one line that says what to install."""

import subprocess
import sys
from copy import deepcopy
from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn

import broadsight
from broadsight.cli.main import main
from broadsight.deployment import capture, prepare
from broadsight.inspection.macs import blank_model
from broadsight.models import _faster_vit
from broadsight.models._faster_vit import FasterViT, packaged
from broadsight.papers.verify import catalogue
from tests.compare import assert_all_close, assert_close, outputs_and_gradients, randomize
from tests.refusals import refused
from tests.zoo import FASTER_VIT, needs_faster_vit

NARROW = dict(dim=16, in_dim=8, depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 4))
POOL = dict(groups=2, tokens=3, dim=24, heads=4, mlp_dim=48, level=3, num_classes=5)
OPTIONS = dict(gram_groups=3, head_mixing=True, classifier="linear")


def pooled() -> nn.Module:
    backbone = FasterViT(img_size=64, window=2, **NARROW)
    return randomize(broadsight.swap_pool(backbone, "map", pool_options=OPTIONS, **POOL)).double().eval()


def own_maps(model: nn.Module, x: Tensor) -> list[Tensor]:
    """By the package's layers alone."""
    maps = [model.patch_embed(x)]
    for level in model.levels:
        maps.append(level(maps[-1]))
    return maps


@pytest.fixture
def without(monkeypatch):
    for name in ("fastervit", "fastervit.models", "fastervit.models.faster_vit"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_the_package__one_line_says_what_to_install(without, capsys):
    said = "^.*needs the package fastervit, whose licence, .* non-commercial; pip install .* or pip install fastervit$"
    build = partial(timm.create_model, FASTER_VIT)
    refused(said, build)
    refused(said, build, error=ImportError, img_size=100, device="meta")
    refused(said, broadsight.swap_pool, FASTER_VIT, "gap")
    blank_model.cache_clear()
    (row,) = catalogue("map_faster*")
    assert (row["params"], row["macs"], row["paper_top1"]) == (None, None, 84.2) and "pip install" in row["source"]
    assert main(["models", "map_faster*"]) == 0 and "84.2" in capsys.readouterr().out
    assert timm.is_model(FASTER_VIT)


def test_without_what_the_package_imports__the_error_names_that(monkeypatch):
    def imported(name):
        raise ModuleNotFoundError("No module named 'timm.models.layers'", name="timm.models.layers")

    monkeypatch.setattr(_faster_vit.importlib, "import_module", imported)
    refused(
        "^the installed fastervit cannot be imported: No module .*timm.models.layers", packaged, 0, error=ImportError
    )


@needs_faster_vit
@pytest.mark.slow
def test_import__adds_names_and_replaces_none():
    code = """
import sys, broadsight.models, timm
from broadsight.models._faster_vit import package
before = {name: timm.model_entrypoint(name) for name in timm.list_models()}
assert not any(name.startswith("fastervit") for name in sys.modules)
package()
assert all(timm.model_entrypoint(name) is entry for name, entry in before.items())
print(*(set(timm.list_models()) - before.keys()))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stderr == "" and all(name.startswith("faster_vit_") for name in done.stdout.split())


@needs_faster_vit
@pytest.mark.parametrize(("side", "window"), [(64, 2), (128, 2), (192, 3)])
def test_maps_and_gradients__are_the_packages(side, window):
    own = randomize(packaged(0, window, resolution=side, **NARROW)).double()
    ours = FasterViT(img_size=side, window=window, **NARROW).double()
    state = own.state_dict()
    ours.load_state_dict({key: state[key] for key in ours.state_dict()})
    kept = ours.state_dict().keys()
    left_out = ("relative_", "tokenizer.pos_embed.")  # the second is another name of a layer
    assert all(key.startswith("norm.") or any(part in key for part in left_out) for key in state.keys() - kept)
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    expected, gradients = outputs_and_gradients(own.eval(), own_maps, [x])
    got, our_gradients = outputs_and_gradients(ours.eval(), lambda m, x: m.forward_intermediates(x)[1], [x])
    gradients = {
        name.replace("tokenizer.pos_embed.", "tokenizer.to_global_feature.pos."): gradient
        for name, gradient in gradients.items()
        if not name.startswith("norm.")
    }
    assert_all_close(dict(enumerate(got)) | our_gradients, dict(enumerate(expected)) | gradients, tolerance=1e-5)
    assert [m.shape[1] for m in got] == [info["num_chs"] for info in ours.feature_info]
    assert [side // m.shape[2] for m in got] == [info["reduction"] for info in ours.feature_info]


@needs_faster_vit
@pytest.mark.slow
def test_pooled__copies_exports_trains_and_keeps_any_format():
    model, x = pooled(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    model.train()(x).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    model = deepcopy(model).eval()  # of the package's own, torch copies none after a step
    expected = model(x).detach()
    assert_close(model(x.contiguous(memory_format=torch.channels_last)), expected, tolerance=1e-6)
    program = capture(prepare(deepcopy(model).float(), (64, 64)), (3, 64, 64)).module()
    assert_close(program(torch.cat([x, x]).float())[:2].double(), expected, tolerance=1e-4)
    half = deepcopy(model).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert_close(half.double(), expected, tolerance=0.1)
    found = []
    for checkpointed in (False, True):
        again = deepcopy(model).train()
        again.head.eval()  # without its dropout
        again.set_grad_checkpointing(checkpointed)
        found.append(outputs_and_gradients(again, nn.Module.__call__, [x])[1])
    assert_all_close(*found)


@needs_faster_vit
@pytest.mark.slow
def test_pooled__compiles_in_one_graph():
    model, x = pooled(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    compiled = torch.compile(deepcopy(model), fullgraph=True, dynamic=False, backend="aot_eager")
    assert_close(compiled(x), model(x), tolerance=1e-6)


@needs_faster_vit
def test_sizes_and_arguments__others_are_refused():
    for size in (96, (64, 128), 0):
        refused(r"img_size=\S+ for FasterViT; expected a square .* multiple of 64$", FasterViT, img_size=size, window=2)
    model = FasterViT(1, img_size=64, window=2, **NARROW)
    refused(
        "^images are 96x64 pixels; this FasterViT was built for 64x64; create it with another img_size$",
        model,
        torch.ones(1, 1, 96, 64),
    )
    refused(r"expected \(batch, 1, height, width\)", model, torch.ones(1, 3, 64, 64))
    refused("'bananas'", timm.create_model, FASTER_VIT, error=TypeError, bananas=3, device="meta")
    assert timm.create_model(FASTER_VIT, img_size=448, device="meta").pyramid.sizes[-1] == (14, 14)


@needs_faster_vit
def test_features_only__by_index_cuts_the_rest():
    given = dict(img_size=64, window=2, depths=(1, 1, 1, 1), device="meta")
    model = timm.create_model(FASTER_VIT, features_only=True, out_indices=(0, 2), **given)
    assert (model.feature_info.channels(), model.feature_info.reduction()) == ([128, 512], [4, 16])
    assert [m.shape for m in model(torch.empty(1, 3, 64, 64, device="meta"))] == [(1, 128, 16, 16), (1, 512, 4, 4)]
    assert len(model.model.backbone.levels) == 2
    groups = timm.models.group_parameters(whole := timm.create_model(FASTER_VIT, **given), whole.group_matcher())
    assert len(groups) > 6 and sum(map(len, groups.values())) == len(list(whole.named_parameters()))
