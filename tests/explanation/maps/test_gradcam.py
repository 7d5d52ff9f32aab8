"""Grad-CAM agrees with the `grad-cam` package, on the maps that we choose and on those that are asked for."""

import copy
from functools import cache

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from broadsight.explanation.maps.gradcam import gradcam_looks
from broadsight.models import MAT, EMSNet, PartialFormer, STViT
from broadsight.surgery.pooling import swap_pool

from ...evaluation.test_saliency import Plain
from ...refusals import refused

SWIN = dict(img_size=(64, 96), window_size=4, depths=(2, 2, 2, 2), embed_dim=24)
MADE = {
    "resnet18": lambda: timm.create_model("resnet18", num_classes=7, zero_init_last=False),
    "convnext_atto": lambda: timm.create_model("convnext_atto", num_classes=7),
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), depth=4, embed_dim=48, num_classes=7),
    "vit_average": lambda: timm.create_model("test_vit2", img_size=(64, 96), num_classes=7),
    "swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN, num_classes=7),
    "map": lambda: swap_pool("test_resnet", "map", groups=2, tokens=2, dim=24, heads=4, num_classes=7),
    "stvit": lambda: STViT((16, 24, 32, 48), (1, 1, 1, 1), (1, 2, 2, 4), (4, 2, 1, 1), projection=64, num_classes=7),
    "mat": lambda: MAT(16, (1, 1, 1, 1), (1, 1, 2, 2), num_classes=7),
    "emsnet": lambda: EMSNet((8, 16, 24, 32), (1, 1, 2, 1), (2, 2, 2, 2), num_classes=7),
    "partialformer": lambda: PartialFormer(16, (1, 1, 1, 1), (1, 1, 2, 2), num_classes=7),
}


@cache
def made(name):
    torch.manual_seed(1)
    model = MADE[name]().eval()
    for parameter in model.parameters():  # what begins at zero would leave flat maps
        if not bool(parameter.any()) or parameter.abs().max() < 1e-3:
            nn.init.normal_(parameter, std=0.2)
    return model, torch.randn(1, 3, 64, 96)


def by_the_package(model, image, layer, target):
    """Their map (H, W), 0 to 1."""
    package = pytest.importorskip("pytorch_grad_cam")

    def reshape(x):
        if x.ndim == 3:  # (B, N, C), a class token or register first
            rows = {6: 2, 24: 4, 25: 4}[x.shape[1]]
            return x[:, -(x.shape[1] - x.shape[1] % 2) :].transpose(1, 2).unflatten(2, (rows, -1))
        return x if 2 * x.shape[3] == 3 * x.shape[2] else x.permute(0, 3, 1, 2)

    with torch.enable_grad(), package.GradCAM(model, [model.get_submodule(layer)], reshape_transform=reshape) as cam:
        found = cam(image, None if target is None else [lambda logits: logits[target]])[0]
    return found / max(found.max(), 1e-7)  # their smallest number in place of zero would be seen in faint maps


def on_the_image(look, size):
    whole = F.interpolate(look.values[None, None], size, mode="bilinear", align_corners=False)[0, 0].numpy()
    return (whole - whole.min()) / (whole.max() - whole.min())


def agree(ours, theirs):
    return np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.99999 and abs(ours - theirs).max() < 1e-3


# The package alone takes seconds to import; the models that are left to the slow set are no other cases.
LATER = {"convnext_atto", "vit_average", "mat", "emsnet", "partialformer"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LATER else name for name in MADE]
)
def test_agrees_with_the_package(name):
    model, image = made(name)
    best = int(model(image).argmax())
    for target in (None, (best + 3) % 7):
        looks = gradcam_looks(model, image, target)
        assert [look.depth for look in looks] == [*range(len(looks))] and len(looks) > 1
        assert {look.title for look in looks} == {f"class {best if target is None else target}"}
        assert {(look.kind, look.form, look.values.dtype) for look in looks} == {("gradcam", "heat", torch.float32)}
        theirs = [by_the_package(model, image, look.layer, target) for look in looks[-2:]]
        assert any(one.any() for one in theirs)
        for look, one in zip(looks[-2:], theirs, strict=True):  # where nothing speaks for the class, both are zero
            assert agree(on_the_image(look, image.shape[-2:]), one) if one.any() else not look.values.any()


CHOSEN = [("resnet18", "layer3.0.conv1"), ("vit", "blocks.3.norm1")]  # what their examples take
CHOSEN += [("swin", "layers.2.blocks.1"), ("swin", "layers.3.blocks.1.norm2"), ("stvit", "stages.2")]


@pytest.mark.parametrize(("name", "layer"), CHOSEN)
def test_at_a_chosen_layer(name, layer):
    model, image = made(name)
    (look,) = gradcam_looks(model, image, 5, layer)
    assert (look.layer, look.depth, look.title) == (layer, 0, "class 5") and look.values.any()
    assert agree(on_the_image(look, image.shape[-2:]), by_the_package(model, image, layer, 5))


def test_depths__are_stages_or_blocks_the_last_of_which_the_answer_depends_on():
    model, image = made("resnet18")
    found = [(look.layer, *look.values.shape) for look in gradcam_looks(model, image)]
    assert found[-4:] == [("layer1", 16, 24), ("layer2", 8, 12), ("layer3", 4, 6), ("layer4", 2, 3)]
    model, image = made("vit")  # it answers by the class token: patches that leave the last block change nothing
    assert [look.layer for look in gradcam_looks(model, image)] == ["blocks.0", "blocks.1", "blocks.2"]
    model, image = made("map")
    assert gradcam_looks(model, image)[-1].layer == "head.merge"


def test_by_hand():
    """One channel counts by 2, the other by -1, whatever the class's bias."""

    class Two(nn.Module):
        num_classes = 2

        def __init__(self):
            super().__init__()
            self.map, self.fc = nn.Conv2d(3, 2, 1, bias=False), nn.Linear(2, 2)
            self.map.weight.data = torch.tensor([[1.0, 0, 0], [0, 1, 0]])[..., None, None]
            self.fc.weight.data, self.fc.bias.data = torch.tensor([[2.0, -1], [0, 1]]), torch.tensor([9.0, 0])

        def forward(self, x):
            return self.fc(self.map(x).mean((2, 3)))

    image = torch.tensor([[[3.0, 0], [1, 1]], [[1, 1], [4, 0]], [[7, 7], [7, 7]]])[None]
    (look,) = gradcam_looks(Two(), image)
    assert torch.equal(look.values, torch.tensor([[5.0, 0], [0, 2]]) / 4)  # 2 a - b over four places, not below 0
    assert (look.title, look.layer) == ("class 0", "map")
    assert torch.equal(gradcam_looks(Two(), image, 1)[0].values, torch.tensor([[1.0, 1], [4, 0]]) / 4)


def test_leaves_no_trace_even_of_an_error_and_works_on_frozen_models():
    model, image = copy.deepcopy(made("swin"))
    expected = gradcam_looks(model, image)[-1].values
    before = model(image)
    model.requires_grad_(False)
    model.train()
    model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    with torch.inference_mode():
        found = gradcam_looks(model, image.clone())[-1].values
    assert torch.allclose(found, expected, rtol=1e-4) and not found.requires_grad and not found.is_inference()
    assert [module.training for module in model.modules()] == flags
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.eval()(image), before)
    half = gradcam_looks(model.bfloat16(), image)[-1].values
    assert half.dtype == torch.float32 and np.corrcoef(half.ravel(), expected.ravel())[0, 1] > 0.98
    model.train()
    for target, words in ((7, "class 7; the model has 7: expected 0 to 6"), (-1, "class -1; the model has 7")):
        refused(words, gradcam_looks, model, image, target)
    assert model.training and not any(module._forward_hooks for module in model.modules())


def test_models_that_say_nothing_of_their_maps_answers_that_depend_on_nothing_and_what_is_refused():
    looks = gradcam_looks(Plain(), torch.randn(1, 3, 32, 48))
    assert [tuple(look.values.shape) for look in looks] == [(16, 24), (8, 12)] and looks[-1].layer == "act"
    model = Plain()
    nn.init.zeros_(model.fc.weight)
    (look,) = gradcam_looks(model, torch.randn(1, 3, 32, 32))
    assert look.values.shape == (8, 8) and not look.values.any()
    several = "which is no map of several places"
    for (model, image), layer, message in (
        (made("resnet18"), "layr4", r"ResNet has no layer 'layr4'; expected the path of a module; nearest: layer4"),
        (made("resnet18"), "", "has no layer ''"),
        (made("resnet18"), "fc", rf"layer fc gives \(1, 7\), {several}; choose another layer"),
        (made("resnet18"), "global_pool", several),
        ((nn.Flatten(), torch.randn(1, 3, 8, 8)), None, "gradcam finds no feature map in Flatten"),
        ((Plain(), torch.randn(2, 3, 8, 8)), None, r"image has shape \(2, 3, 8, 8\); expected one, as \(1, C, H, W\)"),
    ):
        refused(message, gradcam_looks, model, image, layer=layer)
