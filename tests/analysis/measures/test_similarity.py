"""Similarity of attention rows: by hand, and against all pairs, one by one."""

import json
import math
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import broadsight
from broadsight.analysis import LayerSimilarity, attention_similarity, plot_attention_similarity
from broadsight.inspection import attention_rows
from tests.analysis.measures.toy_models import Attends
from tests.compare import randomize
from tests.inspection.timm_models import created, images
from tests.training.small_runs import refusal
from tests.zoo import shallow


def measured(weights: Tensor, heads: int | None = None, **options) -> LayerSimilarity:
    """Of a model with these attention weights."""
    model = Attends(lambda x: weights.log().softmax(-1), heads)
    (found,) = attention_similarity(model, torch.zeros(1, 1, 1, 1), **options).values()
    return found


def pairs(weights: Tensor) -> tuple[float, float]:
    """Between queries and between heads of weights (B, h, N, M), one pair after the other."""
    B, h, N, _ = weights.shape

    def mean(indices) -> float:
        cosines = [F.cosine_similarity(weights[one], weights[two], dim=0) for one, two in indices]
        return torch.stack(cosines).mean().item()

    queries = [((b, i, j), (b, i, k)) for b in range(B) for i in range(h) for j, k in permutations(range(N), 2)]
    heads = [((b, i, j), (b, k, j)) for b in range(B) for j in range(N) for i, k in permutations(range(h), 2)]
    return mean(queries), mean(heads)


def test_by_hand():
    """Head 1: (1 0), (0 1), (1 1)/2, whose cosines are 0, 1/sqrt 2 and 1/sqrt 2. Head 2: three times (1 0)."""
    weights = torch.tensor([[[1.0, 0], [0, 1], [0.5, 0.5]], [[1, 0], [1, 0], [1, 0]]])[None]
    found = measured(weights)
    first = math.sqrt(2) / 3
    assert found.by_head == pytest.approx([first, 1], abs=1e-6)
    assert found.queries == pytest.approx((first + 1) / 2, abs=1e-6)
    assert found.heads == pytest.approx((1 + 0 + math.sqrt(0.5)) / 3, abs=1e-6)
    assert (found.keys, found.reason) == (2, "")
    with_itself = measured(weights, with_itself=True)
    assert with_itself.by_head == pytest.approx([(3 + 6 * first) / 9, 1], abs=1e-6)
    assert with_itself.heads == pytest.approx((found.heads + 1) / 2, abs=1e-6)
    assert json.loads(json.dumps(found.record()))["queries"] == found.queries
    # uniform is one, apart is zero, and nonsense shows
    found = measured(torch.full((2, 3, 4, 5), 0.2))
    assert (found.queries, found.heads) == pytest.approx((1, 1), abs=1e-6) and found.queries <= 1
    found = measured(torch.eye(4).expand(2, 3, 4, 4))
    assert found.queries == pytest.approx(0, abs=1e-6) and found.heads == pytest.approx(1)
    assert math.isnan(measured(torch.full((2, 3, 5, 8), torch.nan)).queries)


@pytest.mark.parametrize("limit", [1 << 20, 4 * 3 * 60, 1], ids=["at once", "some rows", "row by row"])
@pytest.mark.parametrize("fused", [True, False])
def test_all_pairs__give_the_same(limit, fused, monkeypatch):
    monkeypatch.setattr(attention_rows, "WEIGHTS_BYTES", limit)
    x = 2 * torch.randn(3, 2, 7, 8)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x) if fused else (x * 8**-0.5 @ x.mT).softmax(-1)

    (found,) = attention_similarity(Attends(attend), x, batch_size=2).values()
    assert (found.queries, found.heads) == pytest.approx(pairs((x * 8**-0.5 @ x.mT).softmax(-1)), abs=1e-6)


def test_masked_rows__are_left_out_and_a_single_one_has_no_figure_but_a_reason():
    x, mask = torch.randn(2, 3, 5, 8), torch.ones(5, 5, dtype=torch.bool)
    mask[1] = False
    (found,) = attention_similarity(Attends(lambda x: F.scaled_dot_product_attention(x, x, x, mask)), x).values()
    rows = (x * 8**-0.5 @ x.mT).softmax(-1)[:, :, [0, 2, 3, 4]]
    assert (found.queries, found.heads) == pytest.approx(pairs(rows), abs=1e-6)
    for shape, heads, reason in (
        ((2, 3, 1, 4), None, "no two queries share their keys"),
        ((2, 1, 3, 4), None, "it has a single head"),
        ((2, 3, 4), 2, "its heads are not apart in an axis"),
        ((2, 1, 1, 4), None, "no two queries share their keys; it has a single head"),
    ):
        found = measured(torch.rand(shape).softmax(-1), heads)
        assert (found.queries is None, found.heads is None) == ("queries" in reason, "head" in reason)
        assert found.reason == reason and json.dumps(found.record(), allow_nan=False)


@torch.no_grad()
def test_partial_attention__compares_the_heads_of_its_single_query():
    model = randomize(shallow("partialformer_b0")).eval()
    softmaxes, x = [], torch.randn(2, 3, 64, 64)
    before = Tensor.softmax

    def kept(self: Tensor, *args, **options) -> Tensor:
        softmaxes.append(before(self, *args, **options))
        return softmaxes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "softmax", kept)
        model(x)
    found = attention_similarity(model, x)
    (name, layer), weights = list(found.items())[1], softmaxes[1]  # B h N
    assert name.endswith("#2") and layer.queries is None and layer.keys == weights.shape[-1]
    alike = F.cosine_similarity(weights[:, 0], weights[:, 1], dim=-1)
    assert weights.shape[1] == 2 and layer.heads == pytest.approx(alike.mean().item(), abs=1e-5)


def test_models__have_an_entry_for_every_layer_with_its_heads_apart():
    model = broadsight.swap_pool("test_resnet", "map", num_classes=5)
    ((_, found),) = attention_similarity(model, torch.randn(2, 3, 64, 64)).items()
    block = next(m for m in model.modules() if type(m).__name__ == "GroupClassAttention")
    assert len(found.by_head) == block.heads and found.reason == ""
    model, x, passed = created("test_vit"), images("test_vit", batch=3), []
    found = attention_similarity(model, x, batch_size=2, seen=passed.append)
    assert list(found) == [f"blocks.{i}.attn" for i in range(len(model.blocks))] and passed == [2, 3]
    assert all(0 < x.queries < 1 and 0 < x.heads < 1 for x in found.values())


def test_plot__two_panels_with_a_line_for_each_model():
    layers = {"a": LayerSimilarity(0.5, 0.25, (0.5,), 4), "b": LayerSimilarity(0.75, None, (0.75,), 4, "single")}
    first, second = plot_attention_similarity({"one": layers, "two": layers}).axes
    assert [line.get_ydata().tolist() for line in first.lines] == [[0.5, 0.75]] * 2
    assert second.lines[0].get_ydata()[0] == 0.25 and math.isnan(second.lines[0].get_ydata()[1])
    assert [text.get_text() for text in second.get_legend().get_texts()] == ["one", "two"]
    said = refusal(lambda: plot_attention_similarity({"x": {"a": 3}}))
    assert "is no result of attention_similarity but a dict" in said
