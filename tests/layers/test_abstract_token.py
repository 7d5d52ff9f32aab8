"""Window attention with abstract tokens against a reference that visits the windows one at a time and never pads."""

import pytest
import torch

from broadsight.layers import AbstractTokenAttention
from broadsight.layers.kernels import dispatch, window_attention
from tests.compare import assert_close, assert_same_function, randomize, saved_bytes
from tests.reference import mat as reference
from tests.refusals import refused

SIZES = [(7, 7), (14, 7), (7, 21), (9, 16), (15, 8), (6, 5), (1, 1), (3, 10)]


@pytest.fixture(autouse=True, params=["as written", "by products", "by products of one image at a time"])
def form(request, monkeypatch):
    monkeypatch.setattr(window_attention, "SMALL", 1)
    if request.param == "as written":
        monkeypatch.setattr(dispatch, "runs_eagerly", lambda: False)
    elif request.param != "by products":
        monkeypatch.setattr(window_attention, "SLICE_BYTES", 1)


@pytest.mark.parametrize("token_projected", [False, True])
@pytest.mark.parametrize("token_is_key", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_forward__agrees_with_the_slow_reference_in_value_and_gradient(size, token_is_key, token_projected):
    switches = dict(token_is_key=token_is_key, token_projected=token_projected)
    ours = randomize(AbstractTokenAttention(6, 2, **switches).double())
    x = torch.randn(2, *size, 6, dtype=torch.float64)
    assert_same_function(ours, reference.MATAttention(6, 2, **switches).double(), x, tolerance=1e-10)
    assert_close(ours(x), torch.cat([ours(image[None]) for image in x]), "images alone", 1e-12)


@pytest.mark.parametrize("height", [1, 2, 4, 7, 8, 13, 15])
def test_forward__windows_are_never_larger_than_the_map(height, monkeypatch):
    """Rectangular windows where one side of the map is smaller, and never any padding in that direction."""
    ours, slow, padded = randomize(AbstractTokenAttention(4, 2).double()), reference.MATAttention(4, 2).double(), []
    pad = torch.nn.functional.pad
    monkeypatch.setattr(torch.nn.functional, "pad", lambda x, by: padded.append((by[5], by[3])) or pad(x, by))
    for width in (1, 2, 4, 7, 8, 13, 15):
        assert_same_function(ours, slow, torch.randn(1, height, width, 4, dtype=torch.float64), tolerance=1e-10)
        rows, columns = padded.pop() if padded else (0, 0)
        assert not (rows and height <= 7) and not (columns and width <= 7)


@pytest.mark.parametrize("size", [(14, 14), (8, 9), (7, 7)])
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_half_precision__is_close_in_value_and_gradient(how, size):
    layer = randomize(AbstractTokenAttention(16, 2, token_is_key=size == (8, 9)))
    narrow = AbstractTokenAttention(16, 2, token_is_key=size == (8, 9))
    narrow.load_state_dict(layer.state_dict())
    x, found = torch.randn(2, *size, 16), []
    for one in (layer, narrow if how == "autocast" else narrow.bfloat16()):
        leaf = x.detach().to(one.proj.weight.dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=one is narrow and how == "autocast"):
            y = one(leaf)
        assert y.dtype == (torch.bfloat16 if one is narrow else torch.float32)
        y.float().square().mean().backward()
        found.append({"output": y, "input": leaf.grad, **{name: p.grad for name, p in one.named_parameters()}})
    for name, expected in found[0].items():
        assert_close(found[1][name].float(), expected, name, 0.06)


def test_saved_for_backward__the_input_the_projections_and_little_more(request):
    layer, x = AbstractTokenAttention(32, 4), torch.randn(2, 14, 14, 32, requires_grad=True)
    if "written" not in request.node.name:
        weights = sum(p.numel() for p in layer.parameters())
        assert saved_bytes(lambda: layer(x)) <= 4 * (5.5 * x.numel() + weights)  # x, q, k, v, what proj takes


@pytest.mark.parametrize("size", SIZES)
def test_reading__of_the_equations_merges_the_token_with_the_pixels_of_each_window(size):
    """Eq. 4.2 word by word: w*w + 1 tokens are projected together, and attend to each other."""
    ours = randomize(AbstractTokenAttention(6, 2, reading="equations").double())
    x = torch.randn(2, *size, 6, dtype=torch.float64)
    assert_same_function(ours, reference.MergedAttention(6, 2).double(), x, tolerance=1e-10)
    assert ours.token_is_key and ours.token_projected
    fitted = AbstractTokenAttention(6, 2).double()
    fitted.load_state_dict(ours.state_dict())
    assert (fitted(x) - ours(x)).abs().max() > 1e-3
    one = AbstractTokenAttention(6, 2, reading="equations", token_is_key=False)
    assert (one.token_is_key, one.token_projected) == (False, True)


@pytest.mark.parametrize("size", SIZES)
def test_forward__without_mixing_is_plain_window_attention(size):
    ours = randomize(AbstractTokenAttention(6, 3, mixing=False).double())
    assert {name.split(".")[0] for name, _ in ours.named_parameters()} == {"qkv", "proj"}
    x = torch.randn(2, *size, 6, dtype=torch.float64)
    assert_same_function(ours, reference.WindowAttention(6, 3).double(), x, tolerance=1e-10)
    assert_close(ours(x), torch.cat([ours(image[None]) for image in x]), "images alone", 1e-12)


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_forward__other_windows(window, mixing, monkeypatch):
    monkeypatch.setattr(reference, "WINDOW", window)
    ours = randomize(AbstractTokenAttention(6, 2, window, mixing=mixing).double())
    slow = reference.MATAttention(6, 2) if mixing else reference.WindowAttention(6, 2)
    assert_same_function(ours, slow.double(), torch.randn(2, 5, 6, 6, dtype=torch.float64), tolerance=1e-10)


@pytest.mark.parametrize("token_is_key", [False, True])
def test_forward__padding_does_not_matter_where_it_would_draw_all_attention(token_is_key):
    """Keys and values of padding would be the biases, or zero; here either would win or lose every soft-max."""
    for sign in (-1, 1):
        ours = AbstractTokenAttention(6, 2, token_is_key=token_is_key).double()
        torch.nn.init.constant_(ours.qkv.bias, 4.0 * sign)
        x = torch.randn(1, 9, 16, 6, dtype=torch.float64)
        slow = reference.MATAttention(6, 2, token_is_key)
        assert_same_function(ours, slow.double(), x, tolerance=1e-10)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(dim=10, heads=3), "dim=10 does not split into heads=3; choose a divisor of 10"),
        (dict(dim=10, heads=0), "dim=10 does not split into heads=0"),
        (dict(dim=8, heads=2, window=0), "window=0 is not a side of at least 1 pixel"),
        (dict(dim=8, heads=2, reading="fited"), "unknown reading 'fited'; did you mean 'fitted'"),
    ],
)
def test_wrong_arguments__are_refused(arguments, words):
    refused(words, AbstractTokenAttention, **arguments)
