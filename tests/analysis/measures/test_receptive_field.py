"""Effective receptive fields of layers whose reach is known, and of models of every kind against plain autograd."""

import json

import pytest
import timm
import torch
from torch import Tensor, nn

from broadsight.analysis import ReceptiveField, effective_receptive_field, plot_receptive_field
from broadsight.analysis.measures.receptive_field import LayerMaps, _middle
from tests.analysis.measures.toy_models import Does
from tests.inspection.timm_models import created
from tests.refusals import refused
from tests.training.small_runs import refusal
from tests.zoo import shallow


def ones(layers: int) -> nn.Sequential:
    """So many 3x3 convolutions that add up what they see."""
    model = nn.Sequential(*(nn.Conv2d(1 if i else 3, 1, 3, padding=1, bias=False) for i in range(layers)))
    for convolution in model:
        nn.init.ones_(convolution.weight)
    return model


def outer(row: list[float], size: tuple[int, int], at: tuple[int, int]) -> Tensor:
    """(H, W) zeros with the product of a row with itself around a place."""
    expected, reach = torch.zeros(size), len(row) // 2
    rows, columns = (slice(n - reach, n + reach + 1) for n in at)
    expected[rows, columns] = torch.tensor(row)[:, None] * torch.tensor(row)
    return expected / expected.max()


@pytest.mark.parametrize("size", [(9, 9), (8, 13)])
def test_one_convolution__sees_a_square(size):
    found = effective_receptive_field(ones(1), torch.randn(3, 3, *size))
    assert found.values.equal(outer([1.0, 1, 1], size, (size[0] // 2, size[1] // 2)))
    assert found.grid == found.size == size and found.centre == (size[0] // 2, size[1] // 2) and found.images == 3
    assert [found.held(share).side for share in (0.1, 0.12, 0.99, 1)] == [1, 3, 3, 3]
    assert found.held(0.99).area == found.held(0.99).densest == pytest.approx(9 / (size[0] * size[1]))
    assert found.held(0.3).densest == pytest.approx(3 / (size[0] * size[1]))  # three of nine pixels, any of them
    assert found.radial()[:4] == [1, 1, 0, 0]
    model = nn.Sequential(*ones(1), nn.ReLU(inplace=True), nn.Conv2d(1, 1, 1))  # which changes the map in place
    found = effective_receptive_field(model, -torch.ones(1, 3, 5, 5), layer="0")  # behind the ReLU nothing is left
    assert found.values.equal(outer([1.0, 1, 1], (5, 5), (2, 2)))


def test_two_convolutions__see_a_pyramid():
    found = effective_receptive_field(ones(2), torch.randn(1, 3, 9, 9))
    torch.testing.assert_close(found.values, outer([1.0, 2, 3, 2, 1], (9, 9), (4, 4)))
    # Of 81: the centre holds 9, the inner square 9 + 4 * 6 + 4 * 4.
    sides = {9 / 81: 1, 9.1 / 81: 3, 49 / 81: 3, 49.1 / 81: 5, 1: 5}
    assert [found.held(share).side for share in sides] == list(sides.values())
    assert found.radial()[:4] == pytest.approx([1, (4 * 6 + 4 * 4) / 8 / 9, (4 * 3 + 8 * 2) / 12 / 9, 4 / 16 / 9])
    first = effective_receptive_field(ones(2), torch.randn(1, 3, 9, 9), layer="0")
    assert first.values.equal(outer([1.0, 1, 1], (9, 9), (4, 4)))


def test_mean__sees_everything_alike_and_patches_their_own():
    everywhere = Does(lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 4, 6))
    found = effective_receptive_field(everywhere, torch.randn(2, 3, 8, 12))
    assert found.values.equal(torch.ones(8, 12)) and found.layer == "output"
    assert found.held(0.5).densest == 0.5 and found.held(1).area == 1 and set(found.radial()) == {1.0}

    def attend(x: Tensor) -> Tensor:  # to all alike: keys are zero
        tokens = x.flatten(2).mT
        return ((tokens @ (0 * tokens.mT)).softmax(-1) @ tokens).mT.unflatten(2, x.shape[-2:])

    found = effective_receptive_field(Does(attend), torch.randn(1, 3, 6, 6))
    torch.testing.assert_close(found.values, torch.ones(6, 6))
    # a place of a stride of 4 covers pixels 8 to 11 of 16, whose middle is between two of them
    patches = nn.Conv2d(3, 2, 4, stride=4)
    nn.init.ones_(patches.weight)
    found = effective_receptive_field(patches, torch.randn(1, 3, 16, 16))
    expected = torch.zeros(16, 16)
    expected[8:12, 8:12] = 1
    assert found.values.equal(expected) and found.centre == (9.5, 9.5)
    assert (found.held(0.25).side, found.held(0.26).side, found.held(1).side) == (2, 4, 4)
    assert found.radial()[:2] == [1, 1]


def test_centre__is_the_place_nearest_to_the_middle():
    for pixels, places, expected in (
        *((224, 7, (3, 111.5)), (9, 9, (4, 4.0)), (9, 5, (2, 4.5)), (32, 1, (0, 15.5))),
        (224, 14, (7, 119.5)),  # the later of two
        (224, 16, (8, 118.5)),  # patches of 14
        (112, 4, (1, 47.5)),  # of 32, the last of which is padded
        (100, 6, (3, 55.5)),  # of 16, four pixels left out
    ):
        assert _middle(pixels, places) == expected
        assert ReceptiveField(torch.ones(pixels, 8), "x", (places, 2), 1).centre == (expected[1], 5.5)


def test_absolute_values__are_added_over_colours_and_images():
    """x**2 / 2 has the gradient x: |x| of each image, and nothing cancels."""
    images = torch.randn(5, 3, 3, 3)
    images[:, :, 1, 1] = torch.tensor([3.0, -4.0, 5.0])

    def spread(x: Tensor) -> Tensor:
        return (x**2 / 2).sum((1, 2, 3), keepdim=True).expand(-1, 1, 3, 3)

    found = effective_receptive_field(Does(spread), images, batch_size=2)
    expected = images.abs().sum(1).mean(0)
    torch.testing.assert_close(found.values, expected / expected.max())


@pytest.mark.parametrize("name", ["stvit_small", "mat_1", "partialformer_b0"])
def test_own_models__as_plain_autograd_has_it(name):
    model = shallow(name).train().requires_grad_(False)
    images = torch.randn(3, 3, 64, 96)
    with torch.inference_mode():
        found = effective_receptive_field(model, (x for x in images.split(1)))
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert found.grid == (2, 3) and found.size == (64, 96) and found.layer.startswith("stages.3")
    torch.testing.assert_close(found.values, at_layer(model.eval(), found.layer, images), atol=1e-4, rtol=1e-3)


def at_layer(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """By a hook on a block of ours, which gives (B, h, w, C), image by image, by backward."""
    kept: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda module, args, output: kept.append(output))
    total = torch.zeros(images.shape[-2:])
    for image in images[:, None]:
        leaf = image.clone().requires_grad_()
        model(leaf)
        kept[-1][0, kept[-1].shape[1] // 2, kept[-1].shape[2] // 2].sum().backward()
        total += leaf.grad.abs()[0].sum(0)
    handle.remove()
    return total / total.max()


@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224", "resnet10t"])
def test_timm__is_read_in_its_form(name):
    model = created(name).eval()
    size = timm.data.resolve_model_data_config(model)["input_size"][1:] if name == "test_vit" else (64, 64)
    images = torch.randn(1, 3, *size, dtype=next(model.parameters()).dtype)
    found = effective_receptive_field(model, images)
    leaf = images.clone().requires_grad_()
    features = model.forward_intermediates(leaf, intermediates_only=True)[-1]  # B C h w
    features[0, :, features.shape[2] // 2, features.shape[3] // 2].sum().backward()
    expected = leaf.grad.abs()[0].sum(0)
    torch.testing.assert_close(found.values, (expected / expected.max()).float(), atol=1e-4, rtol=1e-3)
    assert found.grid == tuple(features.shape[2:])
    if name == "test_vit":  # whose tokens are read behind any layer
        maps, tokens = LayerMaps(model, images), torch.randn(2, 101, 8)
        key, module = maps.layer("norm")
        assert module is model.norm and maps.read(key, tokens).equal(tokens[:, 1:].mT.unflatten(2, (10, 10)))


def test_checkpointing__changes_nothing_and_bfloat16_is_close():
    for model in (created("test_vit").eval(), shallow("mat_1").eval()):
        images = torch.randn(1, 3, 160, 160, dtype=next(model.parameters()).dtype)
        expected = effective_receptive_field(model, images).values
        model.set_grad_checkpointing(True)
        torch.testing.assert_close(effective_receptive_field(model, images).values, expected)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).eval()
    images = torch.randn(4, 3, 9, 9)
    expected = effective_receptive_field(model, images).values
    found = effective_receptive_field(model.bfloat16(), images.contiguous(memory_format=torch.channels_last)).values
    assert (found - expected).abs().max() < 0.05


def test_record_and_plot():
    told = []
    found = effective_receptive_field(ones(2), torch.randn(5, 3, 9, 9), batch_size=2, seen=told.append)
    assert told == [2, 4, 5]
    record = json.loads(json.dumps(found.record()))
    assert record["held"][3] == {"share": 0.99, "side": 5, "area": 25 / 81, "densest": 25 / 81}
    assert record["layer"] == "1" and record["size"] == record["grid"] == [9, 9] and len(record["radial"]) == 7
    patches = effective_receptive_field(nn.Conv2d(3, 2, 4, stride=4), torch.randn(1, 3, 16, 20))
    for log in (True, False):
        figure = plot_receptive_field({"one": found, "two": patches}, log=log)
        titles = [panel.get_title() for panel in figure.axes if panel.images]
        assert titles[0] == "one\n1\n50 % in 3 px, 99 % in 5 px" and len(titles) == 2


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(243, 5)), {}, "'output' gives shape .1, 5., which is no map"),
        (ones(2), dict(layer="2"), "no layer '2'; .*blocks are 0, 1"),
        (ones(2), dict(batch_size=0), "batch_size=0 lets no image pass"),
        (nn.Sequential(*ones(2), nn.Flatten()), dict(layer="2"), "'2' gives shape .1, 81., which is no map"),
        (Does(lambda x: 0 * x), {}, "does not depend on the images"),
        (Does(lambda x: torch.zeros(1, 2, 9, 9)), {}, "does not depend on the images"),
        (Does(lambda x: x * float("inf")), {}, "not finite"),
        (Does(lambda x: x - x.mean(1, keepdim=True)), {}, "add up to a constant, as behind a norm"),
        (nn.Linear(3, 4), {}, "Linear does not take an image of 3x9x9"),
        ("resnet50", {}, "model is a str"),
    ],
)
def test_bad_input__says_what_to_do(model, options, words):
    refused(words, effective_receptive_field, model, torch.randn(1, 3, 9, 9), **options)


def test_bad_images_and_results():
    two = [torch.randn(1, 3, 9, 9), torch.randn(1, 3, 9, 8)]
    assert "images are empty" in refusal(lambda: effective_receptive_field(ones(2), []))
    said = refusal(lambda: effective_receptive_field(ones(2), two))
    assert said == "images are 9x9, and then 9x8; pass images of one size"
    said = refusal(lambda: effective_receptive_field(shallow("mat_1"), torch.randn(1, 3, 64, 64), layer="stages.3"))
    assert said.startswith("the channels of 'stages.3' add up to a constant, as behind a norm")
    assert "share=0 is no share" in refusal(lambda: ReceptiveField(torch.ones(2, 2), "x", (2, 2), 1).held(0))
