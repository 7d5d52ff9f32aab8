"""What a model goes through before it is captured changes none of its answers."""

import pytest
import timm
import torch

from broadsight.deployment.graph import capture, positions_kept, prepare, why_one_size
from tests.compare import randomize
from tests.deployment.tiny import Tiny
from tests.refusals import refused


@pytest.mark.parametrize("size", [(96, 96), (100, 90)])  # whole patches, and others that are padded to be
@torch.no_grad()
def test_prepare__positions_are_resampled_beforehand(size):
    model = timm.create_model("test_vit", dynamic_img_size=True, dynamic_img_pad=True)
    model = randomize(model).eval()
    images = torch.randn(2, 3, *size)
    before, made = model(images), prepare(model, size)
    torch.testing.assert_close(made(images), before, rtol=1e-5, atol=1e-5)
    patches = -(-size[0] // 16) * -(-size[1] // 16)
    assert made.pos_embed.shape[1] == patches + 1 and torch.equal(model(images), before)
    assert "--size" in why_one_size(model) and why_one_size(timm.create_model("test_resnet")) == ""
    # Fused attention is taken apart in the copy
    fused, plain = ([x.fused_attn for x in one.modules() if hasattr(x, "fused_attn")] for one in (model, made))
    assert fused == [timm.layers.use_fused_attn()] * 6 and plain == [False] * 6


@torch.no_grad()
def test_prepare__lowers_a_copy_and_leaves_the_model_alone():
    model = randomize(timm.create_model("stvit_small", num_classes=3)).eval()
    images, kinds = torch.randn(2, 3, 64, 80), [type(module) for module in model.modules()]
    before, made = model(images), prepare(model)
    torch.testing.assert_close(made(images), before, rtol=1e-3, atol=1e-4)
    assert torch.equal(model(images), before) and [type(module) for module in model.modules()] == kinds
    assert {"LoweredBlock", "LoweredSuperTokenAttention"} <= {type(module).__name__ for module in made.modules()}
    assert not made.training


def test_positions_kept__gives_timms_function_back_whatever_happens():
    from timm.layers import pos_embed

    before = pos_embed.is_exporting
    with pytest.raises(KeyError), positions_kept():
        assert pos_embed.is_exporting is not before and not pos_embed.is_exporting()
        raise KeyError
    assert pos_embed.is_exporting is before


def test_capture__says_why_not():
    class Stubborn(Tiny):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > 0 else x

    refused("Stubborn cannot be captured for any batch: ", capture, Stubborn().eval(), (3, 32, 32))
