"""Dead neurons counted by hand, in every way that an activation is called."""

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broadsight.analysis import dead_neurons, plot_dead_neurons
from broadsight.inspection.passing import pass_images
from tests.analysis.measures.toy_models import Does, Made
from tests.inspection.timm_models import created, images
from tests.training.small_runs import refusal
from tests.zoo import shallow

# Two images of three channels at 1x2 places. Exactly 0 after a ReLU: 1 + 2 + 1 of 6 and 0 + 2 + 1 of 6.
IMAGES = torch.tensor([[[[-1.0, 2.0]], [[-3.0, -1.0]], [[0.0, 1.0]]], [[[1.0, 2.0]], [[-3.0, 0.0]], [[1.0, -1.0]]]])
RELUS = [F.relu, torch.relu, Tensor.relu, lambda x: F.relu(x, inplace=True), lambda x: x.clone().relu_(), F.relu6]
SMOOTH = [F.gelu, F.silu, F.leaky_relu, F.elu, lambda x: F.gelu(x, approximate="tanh"), torch.ops.aten.gelu]
MODULES = [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.GELU(), nn.SiLU(inplace=True), nn.Hardswish(), nn.PReLU()]
OF_TIMM = [getattr(timm.layers, name)() for name in ("Swish", "QuickGELU", "HardSwish", "Mish", "GELU")]
FUNCTIONS = [*RELUS, *SMOOTH, *MODULES, *OF_TIMM]


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_by_hand(function):
    """The mean of 4/6 and 3/6; the second channel of three is dead."""
    found = dead_neurons(Does(function), IMAGES.clone(), batch_size=1)
    (layer,) = found.layers
    assert layer.share == pytest.approx(7 / 12)
    assert (layer.dead, layer.channels, found.images) == (1, 3, 2)
    assert layer.exact == ("relu" in layer.function and layer.function not in ("leaky_relu", "prelu"))
    counted = "exactly 0" if layer.exact else "0 or less"
    record = dict(name=layer.name, function=layer.function, counted=counted, share=layer.share)
    record |= dict(dead_channels=1, channels=3, dead_channel_share=pytest.approx(1 / 3))
    assert layer.record() == record


def test_channels_are_found_in_every_layout_and_a_hard_sigmoid_is_a_gate():
    """(B, C, h, w), (B, h, w, C), (B, N, C) and (B, C)."""
    said = refusal(lambda: dead_neurons(Does(timm.layers.HardSigmoid()), IMAGES))
    assert said.startswith("Does calls no activation that can be dead") and "choose variance or spectrum" in said
    last = IMAGES.permute(0, 2, 3, 1)
    for x in (IMAGES, last, IMAGES.flatten(2).mT, last.reshape(-1, 3)):
        (layer,) = dead_neurons(Does(lambda _, x=x: F.relu(x)), IMAGES).layers
        assert (layer.dead, layer.channels) == (1, 3)


def test_an_activation_that_is_called_again_is_another_layer():
    """Also in passes of other lengths."""

    def twice(self: Made, x: Tensor) -> Tensor:
        return F.silu(self.act(self.act(x) - 1.5))

    counts = []
    found = dead_neurons(Made(twice, act=nn.ReLU()), IMAGES, batch_size=1, seen=counts.append)
    shares = {(layer.name, layer.function): layer.share for layer in found.layers}
    assert shares == pytest.approx({("act", "relu"): 7 / 12, ("act#2", "relu"): 10 / 12, ("model", "silu"): 10 / 12})
    assert counts == [1, 2]
    # images count alike, also of other sizes: one place that is 0, and four of which one is
    batches = [torch.zeros(1, 1, 1, 1), torch.tensor([[[[0.0, 1.0], [1.0, 1.0]]]])]
    assert dead_neurons(Does(F.relu), batches).layers[0].share == pytest.approx((1 + 0.25) / 2)


def test_resnet_and_norms_with_activation():
    model, x = created("resnet10t"), images("resnet10t")
    layers = dead_neurons(model, x).layers
    assert [layer.name for layer in layers][-2:] == ["layer4.0.act1", "layer4.0.act2"]
    assert all(layer.function == "relu" for layer in layers)
    outputs = []
    handle = model.layer4[0].act2.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    pass_images(model, x)
    handle.remove()
    assert layers[-1].share == pytest.approx(float((outputs[0] == 0).double().mean()))
    assert layers[-1].dead == int((outputs[0] == 0).all(0).flatten(1).all(1).sum())
    mobile = dead_neurons(created("mobilenetv3_small_050"), images("mobilenetv3_small_050")).layers
    assert {layer.function for layer in mobile} == {"relu", "hardswish"}
    assert mobile[0].name == "bn1.act"


def test_a_batch_of_ours_is_one_layer_and_the_answers_stay():
    """Unwatched, a batch of ours runs in slices; with hooks on its modules as a whole."""
    model, x = shallow("mat_1").eval(), torch.randn(9, 3, 96, 96)
    plain, watched = [], []
    pass_images(model, x, see=lambda y, _: plain.append(y))
    handle = model.register_forward_hook(lambda module, inputs, output: watched.append(output.clone()))
    found = dead_neurons(model, x)
    handle.remove()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, watched, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    names = [layer.name for layer in found.layers]
    assert names == ["stem.act", "stem.act#2", *(f"stages.{i}.blocks.0.mlp.act" for i in range(4)), "head.act"]
    assert dead_neurons(model, x, batch_size=1).record() == {
        "images": 9,
        "layers": [layer.record() | {"share": pytest.approx(layer.share, abs=1e-4)} for layer in found.layers],
    }


def test_plot():
    one, other = dead_neurons(Does(F.relu), IMAGES), dead_neurons(Does(F.gelu), IMAGES)
    figure = plot_dead_neurons({"relu": one, "gelu": other})
    assert figure.axes[0].get_title() == "activations that are exactly 0 (filled) or 0 or less (hollow)"
    assert figure.axes[0].lines[0].get_ydata()[0] == pytest.approx(700 / 12)
    assert plot_dead_neurons({"relu": one}).axes[0].get_title() == "activations that are exactly 0"
