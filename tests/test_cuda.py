"""CUDA without a GPU: fake tensors, which have the rules of its tensors and no numbers.

A tensor that was left on the CPU, an answer that the GPU would have to be waited for (`.item()`, an `if` of a tensor, a
shape that depends on values) and a dtype that an operation lacks fail here, in eager mode and traced by dynamo.
"""

from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from broadsight import add_context_broadcast, swap_pool
from broadsight.layers.context_broadcast import KINDS as BROADCASTS
from broadsight.layers.kernels import products, sliced_mlp, super_token, uniform
from broadsight.losses import MultiTokenDistillationLoss, MultiTokenLoss
from broadsight.models import FAMILIES
from broadsight.surgery.pooling import POOLS
from tests.dense.heads.small import DETECTORS, TWO_STAGE, small, two_images
from tests.dense.heads.small import KINDS as HEADS
from tests.zoo import KINDS, SMALLEST, marked, shallow

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REGISTERED = [name for name in timm.list_models(module=list(FAMILIES)) if name not in KINDS]
EACH_EDIT = ("map_mobilenetv1", "pvt_v2_b0_cb", "localvit_tiny_cb")  # the others differ in their sizes
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


class OnDevice(TorchDispatchMode):
    """Refuses tensors of the CPU."""

    @classmethod
    def is_infra_mode(cls) -> bool:  # lets dynamo trace
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, out)):
            assert not isinstance(one, Tensor) or one.device.type == "cuda", f"{func} has a tensor of {one.device}"
        return out


@contextmanager
def imagined():
    with FakeTensorMode(), OnDevice():
        yield


def on_cuda(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With empty parameters and buffers on the device; half precision is that of all of them."""
    return module._apply(lambda t: empty(dtype if t.is_floating_point() else t.dtype, *t.shape))


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def runs(model: nn.Module, dtypes: tuple[torch.dtype, ...] = DTYPES, side: int = 64) -> None:
    """The model in both modes, with the dtype that comes out."""
    for dtype in dtypes:
        copy = deepcopy(model)
        with imagined():
            copy = on_cuda(copy, dtype)
            for training in (False, True):
                assert copy.train(training)(empty(dtype, 2, 3, side, side)).dtype == dtype


@pytest.mark.parametrize("wrong", [lambda x: x + torch.arange(2), lambda x: x * x.sum().item(), Tensor.cpu, bool])
def test_mistakes__are_found(wrong):
    with imagined(), pytest.raises((AssertionError, RuntimeError)):
        wrong(empty(torch.float32, 2)[:1] if wrong is bool else empty(torch.float32, 2))


@pytest.mark.parametrize("name", KINDS)
def test_models__each_kind(name):
    runs(shallow(name, device="meta"), side=72)  # windows and cells are padded


@pytest.mark.parametrize("name", KINDS)
def test_models__autocast_in_training(name):
    model = shallow(name, device="meta")
    with imagined():
        model = on_cuda(model, torch.float32).train()
        torch.set_autocast_enabled("cuda", True)  # torch.autocast would say that there is no GPU
        try:
            assert model(empty(torch.float32, 2, 3, 72, 72)).dtype == torch.get_autocast_dtype("cuda")
        finally:
            torch.set_autocast_enabled("cuda", False)


MODES = [
    (torch.bfloat16, True),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in product(DTYPES, (True, False))),
]


@pytest.mark.parametrize(("dtype", "training"), MODES)
@pytest.mark.parametrize("name", SMALLEST)
def test_models__each_family_traced_as_one_graph(name, dtype, training):
    model = shallow(name, device="meta").train(training)
    torch._dynamo.reset()
    with imagined():
        traced = torch.compile(on_cuda(model, dtype), backend="eager", fullgraph=True)
        assert traced(empty(dtype, 2, 3, 64, 64)).dtype == dtype


@pytest.mark.parametrize("name", marked(REGISTERED, slow=[name for name in REGISTERED if name not in EACH_EDIT]))
def test_models__each_registered_name(name):
    model = timm.create_model(name, device="meta")
    runs(model, DTYPES[2:], side=model.default_cfg["input_size"][-1])


@pytest.mark.parametrize("pool", POOLS)
def test_pools(pool):
    runs(swap_pool("test_resnet", pool, num_classes=5))
    runs(swap_pool("test_vit", pool, num_classes=5), DTYPES[2:], side=160)


@pytest.mark.parametrize("kind", BROADCASTS)
def test_broadcasts(kind):
    runs(add_context_broadcast(timm.create_model("test_vit"), kind, branch="both"), side=160)


@pytest.mark.parametrize("kind", HEADS)
def test_dense_heads(kind):
    """Losses where no box is chosen, else what is computed before."""
    model = small(kind).train(kind not in DETECTORS)
    images, targets = two_images(model)
    for dtype in DTYPES if kind != "rtdetr" else DTYPES[:1]:  # transformers adds positions in single precision
        copy = deepcopy(model)
        with imagined():
            copy, given = on_cuda(copy, dtype), empty(dtype, 2, 3, 64, 96)
            if kind not in DETECTORS:
                answers = tree_map_only(Tensor, lambda t: empty(t.dtype, *t.shape), targets)
                found = copy(empty(dtype, *images.shape), answers)
            elif kind == "rtdetr":
                found = copy.detector(given, pixel_mask=copy.stages(given)[1:]).logits
            else:
                head = copy.rpn.head if kind in TWO_STAGE else copy.head
                found = head([x.to(dtype) for x in copy.backbone(given).values()])
            assert all(one.dtype == torch.float32 for one in tree_leaves(found))


@each_dtype
@pytest.mark.parametrize("reading", ["fitted", "equations"])
def test_losses(reading, dtype):
    options = dict(groups=2, tokens=1, dim=24, pool_options={"distill_tokens": 1})
    model = swap_pool("test_resnet", "map", num_classes=5, **options)
    with imagined():
        groups = on_cuda(model, dtype)(empty(dtype, 2, 3, 64, 64), groups=True)
        labels = empty(torch.int64, 2)
        for kind, criterion in (("hard", "ce"), ("soft", "bce")):
            options: Any = dict(reading=reading, smoothing=0.1, inter=0.8)
            assert MultiTokenLoss(criterion, **options)(groups, labels).dtype == torch.float32
            loss = MultiTokenDistillationLoss(criterion, None, kind=kind, **options)
            assert loss(None, groups, labels, teacher_logits=empty(dtype, 2, 5)).dtype == torch.float32


class Context:
    """What an autograd function is given, without the engine, which asks for a GPU."""

    def __init__(self, inputs: tuple):
        self.needs_input_grad = [isinstance(one, Tensor) and one.is_floating_point() for one in inputs]
        self.mark_dirty = self.mark_non_differentiable = lambda *_: None
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def places(*shape: int) -> Tensor:
    return empty(torch.int64, *shape)


MLP = ((2, 4, 4, 6), (2, 4, 4, 6), (12, 6), (12,), (12, 1, 3, 3), (12,), (6, 12), (6,))
# Of each function its inputs, from what draws numbers in a shape.
FUNCTIONS = [
    (products.GroupProduct, lambda x: (x(2, 3, 4), x(2, 5, 4))),
    (products.MapProduct, lambda x: (x(2, 4, 3), x(5, 4))),
    (products.MapProduct, lambda x: (x(2, 3, 4).mT, x(5, 4))),
    (products.MiddleSample, lambda x: (x(2, 3, 8, 8), 2)),
    (products.MiddleSample, lambda x: (x(2, 3, 8, 8), 4)),
    (products.GramTriangle, lambda x: (x(4, 3, 2), places(3), places(4), 2)),
    (uniform.Uniform, lambda x: (x(2, 3, 4), None, 2, [1], False)),
    (uniform.Uniform, lambda x: (x(2, 3, 4), x(4), 2, [1], False)),
    (super_token._Sample, lambda x: (x(2, 4, 5, 6), (2, 2), 2, 0.5)),
    (super_token._Spread, lambda x: (x(2, 3, 3, 4), x(18, 9, 4), None, (2, 4, 5, 6), (120, 30, 6, 1), (2, 2))),
    (super_token._Spread, lambda x: (x(2, 3, 3, 4), x(18, 9, 4), x(2, 4, 6, 6), (2, 4, 6, 6), (144, 1, 24, 4), (2, 2))),
    (sliced_mlp._SlicedMlp, lambda x: (*(x(*shape) for shape in MLP), "after", True)),
]


@each_dtype
@torch.no_grad()
def test_autograd_functions__backward_by_hand(dtype):
    own = [one for module in (products, uniform, super_token, sliced_mlp) for one in vars(module).values()]
    own = [one for one in own if isinstance(one, type) and issubclass(one, torch.autograd.Function)]
    assert {kind for kind, _ in FUNCTIONS} == {*own} - {products.Product}
    for kind, draw in FUNCTIONS:
        with imagined():
            inputs = draw(lambda *shape: empty(dtype, *shape))
            context: Any = Context(inputs)
            apart = "setup_context" in dir(kind) and kind.setup_context is not torch.autograd.Function.setup_context
            found = kind.forward(*inputs) if apart else kind.forward(context, *inputs)
            if apart:
                kind.setup_context(context, inputs, found)
            gradients = kind.backward(context, *map(torch.empty_like, tree_leaves(found)))
        for one, gradient in zip(inputs, tree_leaves(gradients, is_leaf=lambda x: x is None), strict=True):
            learned = isinstance(one, Tensor) and gradient is not None
            assert not learned or (gradient.shape, gradient.dtype) == (one.shape, one.dtype), kind
        assert gradients[0] is not None
