"""The watcher: what it tells of a model's soft-maxes, and that the model does not notice."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from broadsight.inspection import attention_rows
from broadsight.inspection.attention_rows import Rows
from broadsight.inspection.attention_weights import watch_attention
from tests.compare import randomize
from tests.inspection.timm_models import created, images
from tests.zoo import shallow


class Attends(nn.Module):
    """Attention of an image's rows, written out or fused, in a module that keeps nothing else."""

    def __init__(self, fused: bool = True):
        super().__init__()
        self.attn = nn.Module()
        self.attn.qkv, self.attn.num_heads = nn.Identity(), 2
        self.attn.forward = self.attend
        self.fused = fused

    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) if self.fused else (x * 8**-0.5 @ x.mT).softmax(-1) @ x

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


def all_weights(rows: Rows) -> Tensor:
    """Put together again from the pieces."""
    whole = torch.full(rows.shape, torch.nan)
    for part, queries, logits, weights, _ in rows:
        assert torch.allclose(logits.softmax(-1), weights)
        whole[part, ..., queries, :] = weights
    return whole


@pytest.mark.parametrize("limit", [1 << 20, 1], ids=["at once", "row by row"])
@pytest.mark.parametrize("fused", [True, False])
def test_rows__are_all_weights(fused, limit, monkeypatch):
    monkeypatch.setattr(attention_rows, "WEIGHTS_BYTES", limit)
    x, found = torch.randn(3, 2, 5, 8), []
    model = Attends(fused)

    def see(name: str, rows: Rows, module: nn.Module) -> None:
        assert name == "attn" and module is model.attn and rows.shape == (3, 2, 5, 5) and rows.head_axis == 1
        found.append(all_weights(rows))

    with watch_attention(model, see):
        model(x)
    assert len(found) == 1 and torch.allclose(found[0], (x * 8**-0.5 @ x.mT).softmax(-1), atol=1e-6)


def test_split__takes_an_axis_apart():
    x, found = torch.randn(3, 6, 5), []
    model = Attends()
    model.attn.forward = lambda x: x.softmax(-1)
    with watch_attention(model, lambda name, rows, module: found.append(all_weights(rows.split((2, -1), 1)))):
        model(x)
    assert torch.equal(found[0], x.softmax(-1).view(3, 2, 3, 5))


def test_wanted__spares_the_others():
    model, told = created("test_vit"), []
    for wanted, expected in ((None, 6), (lambda name: name == "blocks.2.attn", 1), (lambda name: False, 0)):
        told.clear()
        with torch.no_grad(), watch_attention(model, lambda name, *_: told.append(name), wanted):
            model(images("test_vit"))
        assert len(told) == expected


MODELS = ["test_vit", "swin_tiny_patch4_window7_224", "stvit_small", "mat_1", "partialformer_b0", "emsnet_xxtiny"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_outputs__are_the_same_to_the_bit(name, layout):
    if name in ("test_vit", "swin_tiny_patch4_window7_224"):
        model, x = created(name), images(name)
    else:
        model, x = randomize(shallow(name)).eval(), torch.randn(2, 3, 96, 64)
    x = x.contiguous(memory_format=layout)
    expected = model(x)
    with watch_attention(model, lambda name, rows, module: all_weights(rows)):
        found = model(x)
    assert torch.equal(found, expected) and torch.equal(model(x), expected)


def test_hooks__are_gone_also_after_an_error():
    model, x = Attends(), torch.randn(1, 2, 5, 8)

    def fails(*_) -> None:
        raise RuntimeError("seen enough")

    for see in (lambda *_: None, fails):
        with (
            pytest.raises(RuntimeError, match="enough") if see is fails else nullcontext(),
            watch_attention(model, see),
        ):
            model(x)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        with watch_attention(model, lambda name, *_: None if name == "attn" else pytest.fail(name)):
            model(x)  # numbered from the start again


def test_others__see_nothing_of_what_is_computed_for_us():
    class Counts(TorchFunctionMode):
        softmaxes = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.softmaxes += func in (torch.softmax, torch.Tensor.softmax)
            return func(*args, **(kwargs or {}))

    model, x, counts = Attends(fused=False), torch.randn(1, 2, 5, 8), Counts()
    told = []
    outer = watch_attention(model, lambda name, rows, _: all_weights(rows))
    with counts, outer, watch_attention(model, lambda name, rows, _: told.append(all_weights(rows))):
        model(x)
    assert counts.softmaxes == 1 and len(told) == 1


def test_refused__without_attention():
    words, model = (
        r"Sequential has no attention weights; .* pass a vision transformer",
        nn.Sequential(nn.Conv2d(3, 3, 1)),
    )
    with pytest.raises(ValueError, match=words), watch_attention(model, lambda *_: None):
        pass
