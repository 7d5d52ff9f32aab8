"""The soft-maxes that a watch of attention finds, and that the model does not notice."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from broadsight.inspection.attention import AttentionWatch, find_attention, watch_attention
from broadsight.inspection.attention_rows import Rows
from tests.analysis.measures.toy_models import Attends
from tests.compare import randomize
from tests.inspection.timm_models import created, images
from tests.zoo import shallow


def attends(fused: bool = True) -> Attends:
    """Attention of an image's rows, written out or fused."""
    if fused:
        return Attends(lambda x: F.scaled_dot_product_attention(x, x, x), heads=2)
    return Attends(lambda x: (x * 8**-0.5 @ x.mT).softmax(-1) @ x, heads=2)


@pytest.mark.parametrize("fused", [True, False])
def test_watch__has_the_name_the_rows_and_the_module(fused):
    x, found, model = torch.randn(3, 2, 5, 8), [], attends(fused)

    def see(name: str, rows: Rows, module: nn.Module) -> None:
        assert name == "attn" and module is model.attn and rows.shape == (3, 2, 5, 5) and rows.head_axis == 1
        found.append(rows.weights())

    with watch_attention(model, see):
        model(x)
    assert len(found) == 1 and torch.allclose(found[0], (x * 8**-0.5 @ x.mT).softmax(-1), atol=1e-6)


def test_capture__has_the_calls_that_run_and_soft_maxes_over_any_axis():
    model, x, found, begun = attends(fused=False), torch.randn(3, 6, 5), [], []
    model.attn.forward = lambda x: x.softmax(1)

    def see(calls, rows: Rows) -> None:
        found.append(([call.name for call in calls], calls[-1].args[0] is x, rows.axis, rows.weights()))

    with AttentionWatch({model: "outer", model.attn: "inner"}, see, lambda call: begun.append(call.name)):
        model(x)
        x.softmax(-1)  # in none of them
    ((names, given, axis, weights),) = found
    assert (names, given, axis, begun) == (["outer", "inner"], True, -2, ["outer", "inner"])
    assert torch.equal(weights, x.softmax(1).mT)


def test_hooks__of_others_on_any_module_are_called_and_wanted_spares_layers():
    model, x, noted = created("test_vit"), images("test_vit"), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: noted.append(module))
    model.blocks[0].attn.qkv.register_forward_hook(lambda module, args, output: 2 * output)
    with torch.no_grad():
        expected, plain = model(x), list(noted)
        noted.clear()
        with watch_attention(model, lambda name, rows, _: rows.received()):
            assert torch.equal(model(x), expected)
    assert noted == plain and set(find_attention(model)) <= set(noted)
    noted.clear()
    model = created("test_vit")
    for wanted, expected in ((None, 6), (lambda name: name == "blocks.2.attn", 1), (lambda name: False, 0)):
        noted.clear()
        with torch.no_grad(), watch_attention(model, lambda name, *_: noted.append(name), wanted):
            model(images("test_vit"))
        assert len(noted) == expected


OURS = ["stvit_small", "mat_1", "partialformer_b0", "emsnet_xxtiny"]


@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224", *OURS])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_outputs__are_the_same_to_the_bit(name, layout):
    model, x = (randomize(shallow(name)).eval() if name in OURS else created(name)), torch.randn(2, 3, 64, 96)
    x = x.contiguous(memory_format=layout)
    expected = model(x)
    with watch_attention(model, lambda name, rows, module: rows.weights()):
        found = model(x)
    assert torch.equal(found, expected) and torch.equal(model(x), expected)


def test_hooks__are_gone_also_after_an_error():
    model, x = attends(), torch.randn(1, 2, 5, 8)

    def fails(*_) -> None:
        raise RuntimeError("seen enough")

    for see in (lambda *_: None, fails):
        expected = pytest.raises(RuntimeError, match="enough") if see is fails else nullcontext()
        with expected, watch_attention(model, see):
            model(x)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert torch.overrides._get_current_function_mode() is None
        with watch_attention(model, lambda name, *_: None if name == "attn" else pytest.fail(name)):
            model(x)  # numbered from the start again
