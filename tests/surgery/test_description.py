"""What edited models say of themselves, and what timm's own savers and loaders make of it."""

import json

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from broadsight import add_context_broadcast, fuse, swap_pool
from broadsight.surgery.description import as_edited, description_of
from tests.compare import assert_close, randomize
from tests.refusals import refused

SMALL = dict(groups=2, tokens=1, dim=24)


def vit(**options) -> nn.Module:
    return timm.create_model("test_vit", num_classes=3, **options)


def lightened() -> nn.Module:
    model = swap_pool("test_resnet", "map", num_classes=3, in_chans=1, **SMALL).lighten()
    model.reset_classifier(4)
    return model


def resized() -> nn.Module:
    model = swap_pool(vit(img_size=96), "map", **SMALL)
    model.set_input_size((64, 64))
    return model


MODELS = {
    "broadcast": lambda: add_context_broadcast(vit(img_size=64), "gate", branch="both", position="front"),
    "pool": lambda: swap_pool(vit(img_size=64), "map", **SMALL),
    "pool of a name": lambda: swap_pool("test_resnet", "cap", num_classes=3),
    "broadcast, pool": lambda: swap_pool(add_context_broadcast(vit(img_size=64), "hybrid"), "dft"),
    "pool, broadcast": lambda: add_context_broadcast(swap_pool(vit(img_size=64), "vgg"), "scaled", branch="attn"),
    "light": lightened,
    "resized": resized,
    "by a function": lambda: add_context_broadcast(timm.models.test_vit(num_classes=3, img_size=64)),
    "registered": lambda: add_context_broadcast(
        timm.create_model("map_deit_small", depth=4, img_size=64, num_classes=3, **SMALL).lighten()
    ),
    "on a registered one": lambda: swap_pool(timm.create_model("vit_tiny_cb", depth=2, img_size=64), "map", **SMALL),
    "without edits": lambda: timm.create_model("edited", backbone="test_vit", img_size=64, num_classes=3),
}


@pytest.mark.parametrize("name", MODELS)
def test_timm__saves_and_loads_the_edited_model(name, tmp_path):
    torch.manual_seed(0)
    model = randomize(MODELS[name]()).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, model.in_chans, 64, 64)
    assert again.pretrained_cfg["architecture"] == "edited" == model.pretrained_cfg["architecture"]
    assert_close(again(x), model(x), tolerance=1e-5)
    assert as_edited(again).items() >= {"num_classes": model.num_classes, "in_chans": model.in_chans}.items()


def test_description__is_what_was_asked_for():
    model = swap_pool(add_context_broadcast(vit(), "cb", position="mid"), "map", level=2, **SMALL)
    name, arguments = description_of(model)
    assert (name, arguments["backbone"], arguments["num_classes"]) == ("edited", "test_vit", 3)
    assert (arguments["pool"], arguments["pool_args"]) == ("map", {"level": 2, "tokens": 1, "dim": 24})
    assert (arguments["broadcast"], arguments["broadcast_args"]) == ("cb", {"branch": "mlp", "position": "mid"})
    assert not arguments["any_size"]
    assert description_of(fuse(add_context_broadcast(vit())))[0] == "edited"  # there was nothing to fold


def test_description__of_a_registered_model_is_its_name_if_timm_noted_it():
    model = timm.create_model("map_deit_small", depth=4, num_classes=3, **SMALL)
    assert description_of(model) == ("map_deit_small", dict(depth=4, num_classes=3, in_chans=3, **SMALL))
    model.reset_classifier(0, "")
    assert description_of(model)[1].items() >= {"num_classes": 0, "global_pool": ""}.items()
    model = vit(img_size=64)
    del model._model_args, model._traits  # as of a model that timm.create_model has not made
    assert as_edited(model).items() >= {"backbone": "test_vit", "img_size": (64, 64), "num_classes": 3}.items()
    model = vit(depth=2)
    del model._model_args, model._traits
    assert as_edited(model)["undescribed"].startswith("how test_vit was created is not known (blocks.2 is missing")


class Own(nn.Module):
    """Somebody's model."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 16, 16)
        self.num_classes = 3

    def forward_features(self, x):
        return self.conv(x)


def mine() -> nn.Module:
    """A subclass that passes for timm's model."""

    class Other(timm.models.VisionTransformer):
        def forward(self, x):
            return -super().forward(x)

    model = Other(img_size=160, embed_dim=64, depth=6, num_heads=2, mlp_ratio=3, num_classes=3)
    model.pretrained_cfg = dict(vit().pretrained_cfg)
    return add_context_broadcast(model)


def pruned() -> nn.Module:
    model = swap_pool("test_resnet", "gap", num_classes=3)
    model.prune_intermediate_layers(1)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: swap_pool(Own(), "map", img_size=64, **SMALL), "Own is not a model that timm makes by a name"),
        (mine, "how test_vit was created is not known .it is Other.*; create it by timm.create_model"),
        (lambda: fuse(swap_pool("test_resnet", "map", num_classes=3, **SMALL)), "it was folded for inference"),
        (pruned, "layers of it were pruned"),
    ],
    ids=["own", "subclass", "fused", "pruned"],
)
def test_timm__never_loads_another_model_in_its_place(make, reason, tmp_path):
    model = make()
    refused(reason, description_of, model)
    model.num_features = 24
    save_for_hf(model, tmp_path, safe_serialization=True)
    with pytest.raises(ValueError, match=f"the saved model cannot be made again: {reason}"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


def test_timm__does_not_fetch_what_a_folder_names(tmp_path):
    config = {"architecture": "edited", "model_args": {"backbone": "hf-hub:somebody/model", "pool": "map"}}
    config["pretrained_cfg"] = dict(input_size=[3, 32, 32], num_classes=3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("names the model 'hf-hub:somebody/model'", timm.create_model, f"local-dir:{tmp_path}")
