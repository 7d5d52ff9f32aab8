"""Edited models: the same as surgery by hand, and back from a folder as they were."""

import json
from functools import partial

import pytest
import timm
import torch
from torch import nn

from broadsight import add_context_broadcast, swap_pool
from broadsight.layers import ContextBroadcast
from broadsight.models.edited import edit
from broadsight.weights.writing import write_weights
from tests.refusals import refused

SMALL = dict(groups=2, tokens=1, dim=24)


def test_edit__is_surgery_by_hand_and_without_edits_timms_model():
    model = edit("test_resnet", num_classes=3)
    assert type(model) is type(timm.create_model("test_resnet"))
    assert model.num_classes == 3 and model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    torch.manual_seed(3)
    model = edit("test_vit", pool="map", pool_args=SMALL, broadcast="scaled", broadcast_args={"branch": "both"})
    torch.manual_seed(3)
    own = timm.create_model("test_vit", dynamic_img_size=True, dynamic_img_pad=True)
    own = swap_pool(add_context_broadcast(own, "scaled", branch="both"), "map", num_classes=1000, **SMALL)
    assert model.state_dict().keys() == own.state_dict().keys()
    own.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 48, 64)
    torch.testing.assert_close(model.eval()(x), own.eval()(x))
    assert sum(isinstance(module, ContextBroadcast) for module in model.modules()) == 12


def test_edit__by_timms_name_with_what_timm_passes_on():
    make = partial(timm.create_model, "edited", backbone="test_resnet")
    model = make(pool="map", pool_args=SMALL, num_classes=5)
    assert model.has_groups and model(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    assert model(torch.zeros(2, 3, 32, 32), groups=True).tokens.shape == (2, 2, 5)
    assert make(pool="gap", in_chans=1, drop_path_rate=0.1)(torch.zeros(2, 1, 32, 32)).shape == (2, 1000)
    with torch.device("meta"):
        assert next(make().parameters()).is_meta
    own = timm.create_model("test_resnet").pretrained_cfg  # how the backbone wants images
    for model in (edit("test_resnet", pool="gap"), make(pool="gap")):
        assert all(tuple(model.pretrained_cfg[key]) == tuple(own[key]) for key in ("mean", "std"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), "edited is no model by itself; give backbone=, a timm name"),
        (dict(backbone="test_resne"), "unknown model 'test_resne'; nearest: test_resnet"),
        (dict(backbone="test_resnet", bananas=3), "bananas"),
        (dict(backbone="test_resnet", pool="mapp"), "unknown pool 'mapp'; did you mean 'map'"),
        (dict(backbone="test_resnet", pool="map", pool_args={"grops": 3}), "grops.*groups|did you mean 'groups'"),
        (dict(backbone="test_vit", broadcast="cbb"), "unknown kind 'cbb'; did you mean 'cb'"),
        (dict(backbone="test_vit", broadcast="cb", broadcast_args={"brnch": "mlp"}), "brnch"),
    ],
)
def test_edit__refuses(arguments, message):
    refused(message, timm.create_model, "edited", error=(ValueError, TypeError), **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(backbone="test_resnet", pool="map", pool_args=SMALL),
        dict(backbone="test_resnet", pool="map", pool_args={**SMALL, "pool_options": {"distill_tokens": 1}}),
        dict(backbone="test_vit", broadcast="scaled", broadcast_args={"branch": "both"}, img_size=32),
        dict(backbone="test_vit", pool="ga", broadcast="cb", img_size=32),
    ],
)
def test_local_dir__round_trip(tmp_path, arguments):
    model = timm.create_model("edited", num_classes=3, **arguments).eval()
    for module in model.modules():  # zero at first, so that losing them would go unnoticed
        if isinstance(module, ContextBroadcast) and module.scale is not None:
            nn.init.normal_(module.scale)
    cfg = dict(input_size=[3, 32, 32], mean=[0.1, 0.2, 0.3], std=[0.4] * 3, num_classes=3)
    config = dict(architecture="edited", num_classes=3, num_features=model.num_features)
    (tmp_path / "config.json").write_text(json.dumps(config | dict(model_args=arguments, pretrained_cfg=cfg)))
    write_weights(model, tmp_path / "model.safetensors")
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model(x)) and list(again.pretrained_cfg["mean"]) == [0.1, 0.2, 0.3]
