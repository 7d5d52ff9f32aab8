"""The four kinds of context broadcasting against a loop over tokens, in every layout, and all that a layer promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models import get_notrace_modules
from torch import Tensor, fx, nn
from torch.export import Dim

from broadsight.layers import ContextBroadcast
from broadsight.layers.context_broadcast import KINDS, context_broadcast
from tests.compare import assert_close, assert_equal_to
from tests.refusals import refused

LAYOUTS = {"tokens": (2, 5, 6), "NCHW": (2, 6, 3, 4), "NHWC": (2, 3, 4, 6)}
DIM = 6

each_kind = pytest.mark.parametrize("kind", KINDS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def reference(tokens: Tensor, kind: str, scale: Tensor | None = None, class_token: bool = False) -> Tensor:
    """The equations, token by token. (B, N, C) -> (B, N, C)."""
    equations = {
        "cb": lambda token, mean, first: (token + mean) / 2,
        "scaled": lambda token, mean, first: token + scale * mean,
        "gate": lambda token, mean, first: token * (first + 1),
        "hybrid": lambda token, mean, first: token * first + (token + mean) / 2,
    }
    images = []
    for image in tokens:
        mean = sum(image[1:], start=image[0]) / len(image)
        first = image[0] if class_token else mean
        images.append(torch.stack([equations[kind](token, mean, first) for token in image]))
    return torch.stack(images)


def as_tokens(x: Tensor, layout: str) -> Tensor:
    return {"tokens": lambda: x, "NCHW": lambda: x.flatten(2).mT, "NHWC": lambda: x.flatten(1, 2)}[layout]()


def layer(kind: str, layout: str = "tokens", **options) -> ContextBroadcast:
    """In float64, its scale far from zero, no class token unless asked for."""
    made = ContextBroadcast(kind, DIM, **{"class_token": False, **options}).double()
    if kind == "scaled":
        nn.init.normal_(made.scale)
    return made


def assert_equations(module: ContextBroadcast, x: Tensor, layout: str = "tokens") -> None:
    """The layer without a class token, against the loop."""
    expected = reference(as_tokens(x, layout), module.kind, module.scale)
    assert_close(as_tokens(module(x), layout), expected, tolerance=1e-13)


def test_values__by_hand():
    """Tokens 1 and 3 of one channel: mean 2."""
    x = torch.tensor([[[1.0], [3.0]]])
    calls = [("cb", {}, [1.5, 2.5]), ("scaled", dict(scale=torch.tensor([10.0])), [21.0, 23.0])]
    calls += [("gate", {}, [3.0, 9.0]), ("gate", dict(class_token=True), [2.0, 6.0])]
    calls += [("hybrid", {}, [3.5, 8.5]), ("hybrid", dict(class_token=True), [2.5, 5.5])]
    for kind, options, expected in calls:
        assert context_broadcast(x, kind, **options).flatten().tolist() == expected


@pytest.mark.parametrize("kind", ["cb", "gate", "hybrid"])
@pytest.mark.parametrize("learns", [False, True])
def test_values__a_scale_is_for_the_scaled_kind_alone(kind, learns):
    x = torch.randn(2, 5, DIM, requires_grad=learns)
    assert torch.equal(context_broadcast(x, kind, torch.ones(DIM)), context_broadcast(x, kind))


@each_kind
@each_layout
@pytest.mark.parametrize("inplace", [False, True])
def test_values__and_gradients_are_the_equations(kind, layout, inplace):
    def slow(module: ContextBroadcast, x: Tensor) -> Tensor:
        return reference(as_tokens(x, layout), kind, module.scale)

    def ours(module: ContextBroadcast, x: Tensor) -> Tensor:
        return as_tokens(module(x * 1), layout)  # times one: what is overwritten is nobody's leaf

    module, x = layer(kind, inplace=inplace), torch.randn(LAYOUTS[layout], dtype=torch.float64)
    assert len(list(module.parameters())) == (kind == "scaled") and module(x.clone()).shape == x.shape
    assert_equal_to(slow, module, x, run=ours, tolerance=1e-12)


@pytest.mark.parametrize("kind", ["gate", "hybrid"])
def test_values__class_token_is_the_first_of_the_tokens(kind):
    x = torch.randn(3, 5, DIM, dtype=torch.float64)
    for class_token, expected in [(None, True), (True, True), (False, False)]:
        slow = lambda _, x, first=expected: reference(x, kind, class_token=first)  # noqa: E731
        assert_equal_to(slow, layer(kind, class_token=class_token), x, tolerance=1e-12)
    assert not torch.allclose(layer(kind, class_token=True)(x), layer(kind, class_token=False)(x))


@pytest.mark.parametrize("kind", ["gate", "hybrid"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_values__maps_have_no_class_token(kind, layout):
    x = torch.randn(LAYOUTS[layout], dtype=torch.float64)
    assert_equations(layer(kind, class_token=None), x, layout)
    refused(r"^a class token in shape \[.*\]; only tokens \(B, N, C\) have one$", layer(kind, class_token=True), x)


@each_kind
@pytest.mark.parametrize("channels_last", [True, False])
def test_layout__said_where_the_channels_could_be_either_axis(kind, channels_last):
    x = torch.randn(2, DIM, 4, DIM, dtype=torch.float64)
    module = layer(kind, channels_last=channels_last)
    assert_equations(module, x, "NHWC" if channels_last else "NCHW")
    other = layer(kind)  # the second axis, unless told
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x)) != channels_last


@each_kind
def test_layout__tokens_with_the_channels_first(kind):
    module, x = layer(kind, channels_last=False), torch.randn(2, DIM, 7, dtype=torch.float64)
    assert_close(module(x).mT, reference(x.mT, kind, module.scale), tolerance=1e-13)


@pytest.mark.parametrize("dim", [None, DIM])
def test_layout__maps_are_channels_first_unless_dim_says_otherwise(dim):
    x = torch.randn(2, 3, 4, DIM, dtype=torch.float64)
    assert_equations(ContextBroadcast("cb", dim), x, "NCHW" if dim is None else "NHWC")


@each_kind
@pytest.mark.parametrize("inplace", [False, True])
def test_memory__channels_last_stays(kind, inplace):
    x = torch.randn(2, DIM, 3, 4, dtype=torch.float64)
    module = layer(kind, inplace=inplace)
    expected = module(x.clone())
    got = module(x.contiguous(memory_format=torch.channels_last))
    assert_close(got, expected, tolerance=1e-13)
    assert got.is_contiguous(memory_format=torch.channels_last) and expected.is_contiguous()


@each_kind
@pytest.mark.parametrize(("layout", "class_token"), [*((layout, False) for layout in LAYOUTS), ("tokens", True)])
def test_gradients__numerically(kind, layout, class_token):
    module = layer(kind, class_token=class_token)
    x = torch.randn(LAYOUTS[layout], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    if kind == "scaled":
        by_scale = lambda scale: torch.func.functional_call(module, {"scale": scale}, (x.detach(),))  # noqa: E731
        assert torch.autograd.gradcheck(by_scale, (module.scale.detach().requires_grad_(),))
    else:
        assert torch.autograd.gradgradcheck(module, (x,))


def test_gradients__of_scaled_twice_are_refused_or_right_under_func():
    module = layer("scaled")
    x = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()

    def hessian(function, argument: int) -> Tensor:
        loss = torch.func.hessian(lambda x, scale: function(x, "scaled", scale).pow(3).sum(), argument)
        return loss(x.detach()[:, :, :2], module.scale.detach()[:2])

    for argument in (0, 1):
        assert_close(hessian(context_broadcast, argument), hessian(reference, argument), tolerance=1e-11)


@pytest.mark.parametrize("learns", ["x", "scale"])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients__of_what_learns_alone(learns, inplace):
    module = layer("scaled", inplace=inplace)
    x = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=learns == "x")
    module.scale.requires_grad_(learns == "scale")
    module(x * 1).square().sum().backward()
    leaves = dict(x=x.detach().requires_grad_(), scale=module.scale.detach().requires_grad_())
    reference(leaves["x"], "scaled", leaves["scale"]).square().sum().backward()
    grads = dict(x=x.grad, scale=module.scale.grad)
    assert_close(grads.pop(learns), leaves[learns].grad, tolerance=1e-12)
    assert list(grads.values()) == [None]


@pytest.mark.parametrize("shape", [(1, 1, DIM), (3, 1, DIM), (1, 4, DIM), (1, DIM, 1, 1), (1, 1, 1, DIM)])
@each_kind
def test_edges__one_token_and_one_image(kind, shape):
    x = torch.randn(shape, dtype=torch.float64)
    module = layer(kind)
    assert_equations(module, x, "tokens" if x.ndim == 3 else "NCHW" if shape[1] == DIM else "NHWC")
    if kind == "cb" and x.numel() == len(x) * DIM:
        assert torch.equal(module(x), x)  # a token alone is its own mean


@each_kind
@pytest.mark.parametrize("inplace", [False, True])
def test_precision__what_is_or_becomes_half_stays_half(kind, inplace):
    """A layer in half precision, and one in single precision behind a linear layer under autocast."""
    module, linear, x = layer(kind, inplace=inplace).float(), nn.Linear(DIM, DIM), torch.randn(2, 9, DIM)
    scale = None if module.scale is None else module.scale.double()
    with torch.autocast("cpu", torch.bfloat16):
        between = linear(x)
        expected = reference(between.double(), kind, scale)
        got = module(between)
    assert between.dtype == got.dtype == torch.bfloat16
    assert_close(got.double(), expected, tolerance=0.02)
    got.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in [*linear.parameters(), *module.parameters()])
    narrow = module.to(torch.bfloat16)(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert_close(narrow.double(), reference(x.bfloat16().double(), kind, scale), tolerance=0.02)


@each_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("inplace", [False, True])
def test_scaled__starts_as_the_identity(layout, dtype, inplace):
    module = ContextBroadcast("scaled", DIM, inplace=inplace).to(dtype)
    assert module.scale.shape == (DIM,) and not module.scale.any()
    x = torch.randn(LAYOUTS[layout]).to(dtype)
    assert torch.equal(module(x.clone()), x)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x.clone())
    assert got.dtype == dtype and torch.equal(got, x)


def test_scaled__zero_learns_and_is_all_that_is_stored_or_named():
    module = ContextBroadcast("scaled", DIM)
    x = torch.randn(4, 9, DIM)
    module(x).sum().backward()
    assert_close(module.scale.grad, 9 * x.mean(1).sum(0), tolerance=1e-5)
    stored = {kind: list(ContextBroadcast(kind, DIM).state_dict()) for kind in KINDS}
    assert stored == {"cb": [], "scaled": ["scale"], "gate": [], "hybrid": []}
    names = [repr(one) for one in (ContextBroadcast(), ContextBroadcast("scaled", 8))]
    assert names == ["ContextBroadcast('cb')", "ContextBroadcast('scaled', dim=8)"]


@each_kind
@pytest.mark.parametrize("class_token", [False, True])
@torch.no_grad()
def test_inplace__same_values_and_the_input_is_kept_unless_asked(kind, class_token):
    slow, fast = layer(kind, class_token=class_token), layer(kind, class_token=class_token, inplace=True)
    fast.load_state_dict(slow.state_dict())
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    before, y = x.clone(), slow(x)
    assert torch.equal(x, before) and y.data_ptr() != x.data_ptr()
    assert_close(fast(x), y, tolerance=1e-14)


@each_kind
def test_inplace__overwrites_unless_autograd_needs_the_input(kind):
    module = layer(kind, inplace=True)
    x = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True) * 1
    before = x.detach().clone()
    y = module(x)
    overwrites = kind in ("cb", "scaled")
    assert (y.data_ptr() == x.data_ptr()) == overwrites and torch.equal(x, y if overwrites else before)
    if kind == "gate":
        with torch.no_grad():
            assert module(x).data_ptr() == x.data_ptr() and torch.equal(x, y)


sizes = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5))


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(KINDS), st.integers(0, 1000))
def test_invariance__permuted_tokens_images_alone_and_the_mean_token(shape, kind, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw, dtype=torch.float64)
    scale = torch.randn(shape[-1:], generator=draw, dtype=torch.float64) if kind == "scaled" else None
    y = context_broadcast(x, kind, scale)
    assert_close(torch.cat([context_broadcast(image[None], kind, scale) for image in x]), y, tolerance=1e-12)
    order = torch.randperm(shape[1], generator=draw)
    assert_close(context_broadcast(x[:, order], kind, scale), y[:, order], tolerance=1e-12)
    # With a class token, those after it.
    order = torch.cat([torch.zeros(1, dtype=torch.long), order[order > 0]])
    got = context_broadcast(x[:, order], kind, scale, class_token=True)
    assert_close(got, context_broadcast(x, kind, scale, class_token=True)[:, order], tolerance=1e-12)
    if kind == "cb":
        assert_close(y.mean(1), x.mean(1), tolerance=1e-12)
        assert_close(y - y.mean(1, keepdim=True), (x - x.mean(1, keepdim=True)) / 2, tolerance=1e-12)


@each_kind
def test_export__any_batch_and_number_of_tokens(kind):
    module = layer(kind, class_token=True)
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("tokens", min=2, max=4096)},)
    program = torch.export.export(module, (torch.randn(2, 5, DIM).double(),), dynamic_shapes=shapes)
    for shape in [(2, 5, DIM), (1, 17, DIM), (7, 2, DIM)]:
        x = torch.randn(shape, dtype=torch.float64)
        assert_close(program.module()(x), module(x), tolerance=1e-13)


@each_kind
@pytest.mark.parametrize("inplace", [False, True])
def test_compile__is_one_graph(kind, inplace):
    torch._dynamo.reset()
    module = layer(kind, inplace=inplace)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    runs = dict(run=lambda _, x: compiled(x * 1), tolerance=1e-12)
    assert_equal_to(lambda module, x: module(x * 1), module, torch.randn(2, 5, DIM, dtype=torch.float64), **runs)


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return type(m) in get_notrace_modules() or super().is_leaf_module(m, name)


def test_fx__is_a_leaf_of_a_traced_model():
    model = nn.Sequential(nn.Linear(DIM, DIM), layer("scaled").float())
    graph = fx.GraphModule(model, Leaves().trace(model))
    x = torch.randn(2, 5, DIM)
    assert ContextBroadcast in get_notrace_modules() and torch.equal(graph(x), model(x))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bc",), "^unknown kind 'bc'; .*expected one of cb, scaled, gate, hybrid$"),
        (("scaled",), r"^kind='scaled' learns a scale for each channel; pass dim"),
        (("cb", 0), r"^dim=0; expected the number of channels$"),
    ],
)
def test_refused__arguments(arguments, words):
    refused(words, ContextBroadcast, *arguments)


@each_kind
@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((DIM,), {}, r"\[6\]; expected tokens \(B, N, C\) or maps of four axes"),
        ((4, DIM), {}, r"\[4, 6\]; expected tokens \(B, N, C\) or maps of four axes"),
        ((2, 5, 7), {}, r".*; expected 6 channels on axis 2"),
        ((2, 7, 3, 4), {}, r".*; expected 6 channels on axis 1"),
        ((2, DIM, 3, 4), dict(channels_last=True), r".*; expected 6 channels on axis 3"),
        ((2, 3, 4, DIM), dict(channels_last=False), r".*; expected 6 channels on axis 1"),
    ],
)
def test_refused__shapes(kind, shape, options, words):
    refused(f"^got shape {words}$", layer(kind, **options), torch.zeros(shape, dtype=torch.float64))
