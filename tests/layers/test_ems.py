"""The parts of the EMS block against literal loops, closed forms and the slow reference."""

import pytest
import torch
from torch import Tensor, nn

from broadsight.layers import CMHSA, GMHSA, MultiScaleInteraction
from broadsight.layers.coarse_attention import AttentionPath
from broadsight.layers.ems import VARIANTS, StaticBranch, Whiten
from broadsight.layers.patches import ChannelConv, Propagate, average_pool
from tests.compare import assert_close, assert_equal_to, assert_same_function, parameters, randomize
from tests.reference import emsnet as reference
from tests.refusals import refused


def on_channels_first(module: nn.Module, x: Tensor) -> Tensor:
    """Runs a channels-first module on (B, H, W, C)."""
    return module(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def loop_over_windows(layer: CMHSA, x: Tensor) -> Tensor:
    B, h, w, C = x.shape
    d = C // layer.heads
    value = x @ layer.value.weight.T
    places = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]

    def at(values: Tensor, i: int, j: int) -> Tensor:
        return values[:, i, j] if 0 <= i < h and 0 <= j < w else torch.zeros(B, C, dtype=x.dtype)

    sums = {(i, j): torch.zeros(B, C, dtype=x.dtype) for i in range(h) for j in range(w)}
    for i in range(0, h, 2):
        for j in range(0, w, 2):
            centre = sum(at(x, i + a, j + b) * layer.dw.weight[:, 0, a + 1, b + 1] for a, b in places)
            weights = (centre @ layer.mix.weight.T).view(B, layer.heads, 9, 9).softmax(-1)
            sources = torch.stack([at(value, i + a, j + b).view(B, layer.heads, d) for a, b in places], 2)  # B n 9 d
            mixed = torch.einsum("bnts,bnsd->btnd", weights, sources).flatten(2)
            for k, (a, b) in enumerate(places):
                if (i + a, j + b) in sums:
                    sums[i + a, j + b] = sums[i + a, j + b] + mixed[:, k]
    rows = [torch.stack([sums[i, j] for j in range(w)], 1) for i in range(h)]
    return torch.stack(rows, 1) @ layer.proj.weight.T


@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("size", [(5, 4), (1, 1), (6, 6), (2, 3)])
def test_cmhsa__agrees_with_a_loop_over_windows_in_value_and_gradient(size, dim):
    layer = CMHSA(dim).double()
    assert layer.heads == max(1, dim // 32)
    assert_equal_to(loop_over_windows, layer, torch.randn(2, *size, dim, dtype=torch.float64))


@pytest.mark.parametrize(("dim", "heads"), [(8, 1), (64, 2)])
def test_gmhsa__agrees_with_an_explicit_soft_max_in_value_and_gradient(dim, heads):
    def explicit(layer: GMHSA, x: Tensor) -> Tensor:
        parts = [(x.flatten(1, 2) @ weight.T).chunk(heads, -1) for weight in layer.qkv.weight.chunk(3)]
        out = [(q @ k.mT / (dim // heads) ** 0.5).softmax(-1) @ v for q, k, v in zip(*parts, strict=True)]
        return (torch.cat(out, -1) @ layer.proj.weight.T).view(x.shape)

    assert_equal_to(explicit, GMHSA(dim).double(), torch.randn(2, 3, 5, dim, dtype=torch.float64))


@pytest.mark.parametrize("height, stride, kernel", [(1, 2, (3, 3)), (3, 2, (3, 3)), (5, 1, (3, 3)), (4, 1, (1, 3))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channel_conv__one_column_of_pixels_in_value_and_gradient(height, stride, kernel, dtype):
    conv = randomize(ChannelConv(16, kernel, stride)).to(dtype)
    x = torch.randn(2, height, 1, 16).to(dtype)
    y = conv(x)
    border = (0, 0, kernel[1] // 2, kernel[1] // 2, kernel[0] // 2, kernel[0] // 2)
    padded, weight = nn.functional.pad(x.float(), border), conv.weight.detach().float().requires_grad_()
    rows = [padded[:, i : i + kernel[0]] for i in range(0, height, stride)]  # each B k k C
    expected = torch.stack([(row * weight[:, 0].permute(1, 2, 0)).sum((1, 2)) for row in rows], 1)[:, :, None]
    direction = torch.randn(y.shape).to(dtype)
    y.backward(direction)
    expected.backward(direction.float())
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    assert_close(y.float(), expected, tolerance=tolerance)
    assert_close(conv.weight.grad.float(), weight.grad, tolerance=tolerance)


@pytest.mark.parametrize("patch", [2, 4, 6])
def test_propagate__is_a_transposed_convolution_cropped(patch):
    class Cropped(Propagate):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, 2 * patch + 1, patch + 1)

    def transposed(layer: Propagate, x: Tensor) -> Tensor:
        y = nn.functional.conv_transpose2d(x.permute(0, 3, 1, 2), layer.weight, stride=patch, groups=3)
        return y[:, :, : 2 * patch + 1, : patch + 1].permute(0, 2, 3, 1)

    layer = Cropped(3, patch).double()
    assert torch.equal(layer.weight, torch.ones(3, 1, patch, patch))  # at first every cell is copied to its tile
    nn.init.normal_(layer.weight)
    assert_equal_to(transposed, layer, torch.randn(2, 3, 2, 3, dtype=torch.float64), tolerance=1e-12)


def test_average_pool__is_the_mean_of_the_pixels_that_exist():
    x = torch.arange(35.0).view(1, 5, 7, 1)
    cells = [[x[0, i : i + 3, j : j + 3].mean() for j in (0, 3, 6)] for i in (0, 3)]
    assert [round(cell.item(), 4) for cell in cells[1]] == [25.5, 28.5, 30.5]  # two rows; the last column alone
    torch.testing.assert_close(average_pool(x, 3)[0, :, :, 0], torch.tensor(cells))
    assert average_pool(torch.randn(2, 7, 7, 3), 6).shape == (2, 2, 2, 3)
    assert average_pool(torch.randn(2, 1, 1, 3), 6).shape == (2, 1, 1, 3)


# W x is (1, 3) and (4, 11), whose means over channels are 2 and 7.5. The mean pixel is (1.5, 0.5), which W maps to
# (2.5, 7).
@pytest.mark.parametrize(
    ("mean", "expected"), [("channel", [-1.0, 1.0, -3.5, 3.5]), ("spatial", [-1.5, -4.0, 1.5, 4.0])]
)
def test_whiten__subtracts_the_mean_in_value_and_gradient(mean, expected):
    def subtracted(layer: Whiten, x: Tensor) -> Tensor:
        y = x @ layer.weight.T
        return y - y.mean((1, 2) if mean == "spatial" else -1, keepdim=True)

    assert_equal_to(subtracted, Whiten(6, mean).double(), torch.randn(2, 3, 4, 6, dtype=torch.float64))
    layer = Whiten(2, mean)
    layer.weight.data = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    x = torch.tensor([[1.0, 0.0], [2.0, 1.0]]).view(1, 1, 2, 2)
    torch.testing.assert_close(layer(x).flatten(), torch.tensor(expected))


def test_attention_path__pooling_and_projection_may_change_places():
    path = AttentionPath(4, 8, 4, GMHSA(8)).double()

    def projects_first(path: AttentionPath, x: Tensor) -> Tensor:
        return path.prop(path.attn(average_pool(path.expand(x), 4)), x.shape[1], x.shape[2])

    nn.init.normal_(path.prop.weight)
    assert_equal_to(projects_first, path, torch.randn(2, 9, 6, 4, dtype=torch.float64))


SIZES = [(13, 9), (1, 1), (12, 24)]
POOLING = ["full", "patch4", "gated", "c_mhsa", "no_split", "no_fusion"]
RATIOS = [(2, 1, 1), (1, 1, 2), (2, 2, 0), (1, 3, 0), (3, 0, 1), (2, 0, 2), (4, 0, 0)]
CASES = [(variant, (1, 2, 1), size, w) for variant in VARIANTS for size in SIZES for w in ("channel", "spatial")]
CASES += [(variant, ratios, (7, 5), "channel") for variant in POOLING for ratios in RATIOS]


@pytest.mark.parametrize(("variant", "ratios", "size", "whiten"), CASES)
def test_multi_scale_interaction__agrees_with_the_slow_reference_in_value_and_gradient(variant, ratios, size, whiten):
    ours = randomize(MultiScaleInteraction(16, variant, ratios, whiten).double())
    slow = reference.MSI(16, variant, ratios, whiten).double()
    x = torch.randn(2, *size, 16, dtype=torch.float64)
    assert_same_function(ours, slow, x, run_reference=on_channels_first, tolerance=1e-10)


def test_static_branch__nothing_pooled():
    """All channels kept: only the whitening, the 3x3 convolution, the merge and the gate remain."""
    branch = StaticBranch(8, (0, 4, 0), "channel").double()

    def by_hand(branch: StaticBranch, x: Tensor) -> Tensor:
        y = x @ branch.whiten.weight.T
        y = (y - y.mean(-1, keepdim=True)).permute(0, 3, 1, 2)
        y = nn.functional.conv2d(y, branch.dw.weight, padding=1, groups=8).permute(0, 2, 3, 1)
        return (x @ branch.gate.weight.T) * (y @ branch.merge.weight.T).sigmoid()

    assert parameters(branch) == 3 * 64 + 8 * 9
    assert_equal_to(by_hand, branch, torch.randn(2, 5, 4, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (32, (1024, 256, 144, 112, 208, 384, 128, 1952, 256, 64, 256, 288, 384, 6736)),
        (64, (4096, 1024, 288, 288, 480, 1536, 512, 4928, 512, 256, 1024, 576, 1536, 22176)),
        (128, (16384, 4096, 576, 832, 1216, 6144, 2048, 19136, 1024, 1024, 4096, 1152, 6144, 84352)),
        (192, (36864, 9216, 864, 1632, 2208, 13824, 4608, 42624, 1536, 2304, 9216, 1728, 13824, 186528)),
    ],
)
def test_multi_scale_interaction__parameters_of_every_part(dim, expected):
    block = MultiScaleInteraction(dim)
    static, local, global_ = block.static, block.dynamic.local, block.dynamic.global_
    parts = [block.out_proj, static.gate, static.dw, static.pool2, static.pool4, static.merge, local.expand, local.attn]
    parts += [local.prop, global_.expand, global_.attn, global_.prop, block.dynamic.merge, block]
    assert tuple(map(parameters, parts)) == expected
    assert block.in_proj.weight.numel() == expected[0] and static.whiten.weight.numel() == expected[1]
    assert [parameters(MultiScaleInteraction(dim)) for dim in (96, 256)] == [46320, 328704]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(dim=12), "dim=12 does not split into the slices of an EMS block; choose a multiple of 8"),
        (dict(dim=16, variant="fuller"), "unknown variant 'fuller'; .*expected one of full, baseline"),
        (dict(dim=16, ratios=(1, 1, 1)), r"ratios=\(1, 1, 1\) are not three quarters-of-the-channels that add up to 4"),
        (dict(dim=16, ratios=(2, 2)), r"ratios=\(2, 2\) are not three"),
        (dict(dim=16, ratios=(5, 0, -1)), r"ratios=\(5, 0, -1\) are not three"),
        (dict(dim=16, whiten="pixel"), "unknown whiten 'pixel'; .*expected one of channel, spatial"),
        (dict(dim=200), "an attention of width 100 does not split into 3 heads; choose a multiple of 32"),
    ],
)
def test_wrong_arguments__are_refused(arguments, words):
    refused(words, MultiScaleInteraction, **arguments)
