"""Super-token attention against golden tensors and a slow reference written from the equations."""

from itertools import product

import pytest
import torch

import broadsight
from broadsight.layers import RelativePositionBias, SuperTokenAttention
from broadsight.layers.super_token import sample
from tests.compare import assert_close, assert_same_function, saved_bytes
from tests.reference import stvit as reference
from tests.refusals import refused


@pytest.mark.parametrize("reading", ["fitted", "equations"])
@pytest.mark.parametrize(
    ("cell", "heads", "iterations", "qkv_bias", "size"),
    [
        ((3, 3), 2, 1, True, (7, 8)),
        ((2, 4), 3, 2, False, (6, 9)),
        ((1, 2), 1, 3, True, (3, 5)),
        ((8, 8), 2, 1, True, (5, 8)),
        ((1, 1), 6, 1, False, (4, 3)),
    ],
)
def test_agrees_with_the_slow_reference_in_value_and_gradient(cell, heads, iterations, qkv_bias, size, reading):
    arguments = 12, cell, heads, iterations, qkv_bias
    ours = SuperTokenAttention(*arguments, reading=reading).double()
    slow = reference.Attention(*arguments, differentiated=reading == "equations").double()
    assert_same_function(ours, slow, torch.randn(2, 12, *size, dtype=torch.float64), tolerance=1e-10)


def test_reading__changes_the_gradient_alone():
    layers = [SuperTokenAttention(8, 2, 2, reading=reading).double() for reading in ("fitted", "equations")]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 8, 5, 6, dtype=torch.float64)
    outputs, gradients = [], []
    for layer in layers:
        image = x.clone().requires_grad_()
        outputs.append(layer(image))
        gradients += torch.autograd.grad(outputs[-1].square().sum(), image)
    torch.testing.assert_close(*outputs)
    assert (gradients[0] - gradients[1]).norm() > 1e-3 * gradients[0].norm()
    torch.autograd.gradcheck(layers[1], x.requires_grad_(), nondet_tol=0.0)  # nothing of it is constant
    refused("unknown reading 'equation'; did you mean 'equations'", SuperTokenAttention, 8, 2, 2, reading="equation")


@pytest.mark.parametrize("name", ["a", "iter2", "single"])
def test_golden_unit(golden, name):
    tensors, config = golden(f"stvit_sta_unit_{name}")
    cell = tuple(config["grid"])
    layer = SuperTokenAttention(config["dim"], cell, config["num_heads"], config["n_iter"], config["qkv_bias"])
    broadsight.load_release(layer, {key[2:]: value for key, value in tensors.items() if key.startswith("w.")})
    x = tensors["input"].requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, tensors["output"], rtol=0, atol=2e-5)
    (y * tensors["cotangent"]).sum().backward()
    gradients = {"grad_input": x.grad}
    gradients |= {f"grad_w.stoken_refine.{name}": p.grad for name, p in layer.named_parameters()}
    for name, gradient in gradients.items():
        expected = tensors[name]
        assert (gradient.reshape(expected.shape) - expected).abs().max() <= 5e-4 * expected.abs().max()


def test_golden_association(golden):
    tensors, config = golden("stvit_sta_unit_iter2")
    B, C, H, W = tensors["input"].shape
    (h, w), (p, q) = config["grid"], tensors["stokens_initial"].shape[2:]
    cells = tensors["input"].view(B, C, p, h, q, w).permute(0, 2, 4, 3, 5, 1).reshape(B * p * q, h * w, C)
    tokens, share, mass = sample(cells, (B, p, q), config["n_iter"], C**-0.5)
    torch.testing.assert_close(tokens.permute(0, 3, 1, 2), tensors["stokens_before_mhsa"], rtol=0, atol=2e-5)
    expected = tensors["association"].flatten(0, 2).transpose(1, 2)
    torch.testing.assert_close(share, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(mass, tensors["association_sum"].permute(0, 2, 3, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", [1, 3])
def test_memory_format_in_is_memory_format_out_and_views_are_read_right(cell):
    layer = SuperTokenAttention(8, cell, 2)
    wide = torch.randn(2, 8, 7, 10)
    plain, last = layer(wide), layer(wide.to(memory_format=torch.channels_last))
    assert plain.is_contiguous() and last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain, last)
    for view in (wide[..., ::2], wide[:1].expand(2, -1, -1, -1), wide.mT, wide[:, :, 1:4, 2:]):
        x, expected = view.detach().requires_grad_(), view.contiguous().requires_grad_()
        torch.testing.assert_close(layer(x), layer(expected))
        layer(x).square().sum().backward()
        layer(expected).square().sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)


def test_keeps_nothing_but_shares_of_the_pixels_for_backward():
    layer = SuperTokenAttention(64, 8, 1)
    x = torch.randn(1, 64, 56, 56, requires_grad=True)
    weights = sum(p.numel() for p in layer.parameters())
    assert saved_bytes(lambda: layer(x)) < 4 * (9 * 56 * 56 + weights + 20 * 49 * 64)  # far below one map: 64 * 56 * 56


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(dim=10, cell=2, heads=3), "dim=10 does not split into heads=3"),
        (dict(dim=8, cell=0, heads=2), r"cell=\(0, 0\)"),
        (dict(dim=8, cell=2, heads=2, iterations=0), "iterations=0"),
        (dict(dim=8, cell=(1, 2, 3), heads=2), "cell="),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    refused(words, SuperTokenAttention, **arguments)


@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (2, 1), (1, 1)])
def test_position__reference_grid_is_read_without_rounding(grid):
    H, W = grid
    layer = RelativePositionBias(2, grid)
    bias = layer(H, W)
    assert bias.shape == (2, H * W, H * W)
    for query, key in product(range(H * W), repeat=2):
        dy, dx = query // W - key // W, query % W - key % W
        assert torch.equal(bias[:, query, key], layer.table[:, dy + H - 1, dx + W - 1])


@pytest.mark.parametrize("size", [(2, 3), (3, 5), (7, 2), (1, 4), (5, 1), (1, 1)])
def test_position__other_grids_resize_the_table_bilinearly(size):
    """A table that is linear in the offset stays linear: corners stay the largest offsets, the centre stays zero."""
    layer = RelativePositionBias(1, (3, 4)).double()
    dy = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    dx = torch.linspace(-1, 1, 7, dtype=torch.float64)
    layer.table.data = (3 * dy + 5 * dx + 2 * dy * dx)[None]
    H, W = size
    bias = layer(H, W)
    assert bias.shape == (1, H * W, H * W)
    for query, key in product(range(H * W), repeat=2):
        y, x = (query // W - key // W) / max(1, H - 1), (query % W - key % W) / max(1, W - 1)
        assert bias[0, query, key].item() == pytest.approx(3 * y + 5 * x + 2 * y * x, abs=1e-12)


def test_position__gradient_counts_the_pairs_and_the_bias_is_added_to_the_scaled_logits():
    layer = RelativePositionBias(1, (2, 3)).double()
    layer(2, 3).sum().backward()
    # An offset (dy, dx) occurs (2 - |dy|) * (3 - |dx|) times.
    assert layer.table.grad.tolist() == [[[1, 2, 3, 2, 1], [2, 4, 6, 4, 2], [1, 2, 3, 2, 1]]]
    layer = SuperTokenAttention(8, 1, 2, relative_grid=(3, 2)).double()
    torch.nn.init.normal_(layer.position.table)
    x = torch.randn(2, 8, 3, 2, dtype=torch.float64)
    tokens = x.flatten(2).mT
    bias, out = layer.position(3, 2), []
    for head, rows in enumerate(layer.qkv(tokens).chunk(2, -1)):  # each head's query, key and value side by side
        q, k, v = rows.split(4, -1)
        out.append((q @ k.mT / 2 + bias[head]).softmax(-1) @ v)
    expected = layer.proj(torch.cat(out, -1)).mT.reshape(x.shape)
    assert_close(layer(x), expected, "output", 1e-12)
