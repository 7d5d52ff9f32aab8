"""Super-token attention against golden tensors and a slow reference written from the equations."""

import pytest
import torch
from torch import Tensor

import broadsight
from broadsight.layers import SuperTokenAttention
from broadsight.layers.super_token import sample
from tests.compare import saved_bytes
from tests.refusals import refused


def reference(layer: SuperTokenAttention, x: Tensor) -> Tensor:
    """Pixel by pixel and neighbour by neighbour, on (B, C, H, W)."""
    B, C, H, W = x.shape
    h, w = layer.cell
    p, q = -(-H // h), -(-W // w)
    padded = torch.zeros(B, C, p * h, q * w, dtype=x.dtype)
    padded[:, :, :H, :W] = x.detach()
    tokens = torch.stack(
        [padded[:, :, i * h : (i + 1) * h, j * w : (j + 1) * w].mean((2, 3)) for i in range(p) for j in range(q)], -1
    ).view(B, C, p, q)

    def around(i: int, j: int) -> list[tuple[int, int] | None]:
        places = [(i + di, j + dj) for di in (-1, 0, 1) for dj in (-1, 0, 1)]
        return [place if 0 <= place[0] < p and 0 <= place[1] < q else None for place in places]

    def gather(tokens: Tensor, i: int, j: int) -> Tensor:  # B 9 C
        zero = torch.zeros(B, C, dtype=x.dtype)
        return torch.stack([zero if place is None else tokens[:, :, place[0], place[1]] for place in around(i, j)], 1)

    def sums(values: Tensor, share: dict) -> tuple[Tensor, Tensor]:
        total = [[torch.zeros(B, C, dtype=x.dtype) for _ in range(q)] for _ in range(p)]
        mass = torch.full((B, 1, p, q), 1e-12, dtype=x.dtype)
        for y in range(p * h):
            for z in range(q * w):
                for k, place in enumerate(around(y // h, z // w)):
                    if place is not None:
                        total[place[0]][place[1]] = (
                            total[place[0]][place[1]] + share[y, z][:, k, None] * values[:, :, y, z]
                        )
                        mass[:, 0, place[0], place[1]] += share[y, z][:, k]
        return torch.stack([torch.stack(row, -1) for row in total], -2), mass

    share: dict = {}
    for iteration in range(layer.iterations):
        if iteration:
            total, mass = sums(padded, share)
            tokens = total / mass
        share = {
            (y, z): (C**-0.5 * torch.einsum("bkc,bc->bk", gather(tokens, y // h, z // w), padded[:, :, y, z])).softmax(
                1
            )
            for y in range(p * h)
            for z in range(q * w)
        }
    values = torch.nn.functional.pad(x, (0, q * w - W, 0, p * h - H))
    total, mass = sums(values, share)
    tokens = attend(layer, total / mass)
    rows = [
        torch.stack([torch.einsum("bk,bkc->bc", share[y, z], gather(tokens, y // h, z // w)) for z in range(W)], -1)
        for y in range(H)
    ]
    return torch.stack(rows, -2)


def attend(layer: SuperTokenAttention, x: Tensor) -> Tensor:
    B, C, p, q = x.shape
    heads, d = layer.heads, C // layer.heads
    qkv = torch.einsum("oc,bcn->bon", layer.qkv.weight, x.flatten(2))
    if layer.qkv.bias is not None:
        qkv = qkv + layer.qkv.bias[:, None]
    out = []
    for head in range(heads):
        query, key, value = qkv[:, head * 3 * d : (head + 1) * 3 * d].split(d, 1)
        weights = (torch.einsum("bdn,bdm->bnm", query, key) * d**-0.5).softmax(-1)
        out.append(torch.einsum("bnm,bdm->bdn", weights, value))
    y = torch.einsum("oc,bcn->bon", layer.proj.weight, torch.cat(out, 1)) + layer.proj.bias[:, None]
    return y.view(B, C, p, q)


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
def test_agrees_with_the_slow_reference_in_value_and_gradient(cell, heads, iterations, qkv_bias, size):
    layer = SuperTokenAttention(12, cell, heads, iterations, qkv_bias).double()
    x = torch.randn(2, 12, *size, dtype=torch.float64, requires_grad=True)
    slow = attend(layer, x) if cell == (1, 1) else reference(layer, x)
    fast = layer(x)
    torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)
    cotangent = torch.randn_like(fast)
    inputs = [x, *layer.parameters()]
    for got, expected in zip(
        torch.autograd.grad(fast, inputs, cotangent), torch.autograd.grad(slow, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


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
def test_memory_format_in_is_memory_format_out(cell):
    layer = SuperTokenAttention(8, cell, 2)
    x = torch.randn(2, 8, 7, 5)
    plain, last = layer(x), layer(x.to(memory_format=torch.channels_last))
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain, last)


@pytest.mark.parametrize("cell", [1, 3])
def test_views_with_odd_strides_are_read_right(cell):
    layer = SuperTokenAttention(8, cell, 2)
    wide = torch.randn(2, 8, 7, 10)
    for view in (wide[..., ::2], wide[:1].expand(2, -1, -1, -1), wide.mT, wide[:, :, 1:4, 2:]):
        x = view.detach().requires_grad_()
        expected = view.contiguous().requires_grad_()
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
