"""Partial attention against a slow reference that sorts all tokens and projects every row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from broadsight.layers import PartialAttention
from broadsight.layers.kernels import partial_attention as kernel
from broadsight.layers.partial_attention import select_foreground
from broadsight.papers.macs import PRODUCTS, count
from tests.compare import assert_close, assert_same_function, randomize
from tests.reference import partialformer as reference
from tests.refusals import refused


def pair(dim=12, heads=3, foreground=(1, 4), **switches) -> tuple[PartialAttention, nn.Module]:
    """Ours and the reference, both in float64, on weights that are far from their initial values."""
    ours = randomize(PartialAttention(dim, heads, foreground, **switches).double())
    same = dict(bg_identity=ours.background_identity, project_all=ours.project_all)
    hidden = switches.get("channel_hidden")
    return ours, reference.PartialAttention(dim, heads, ours.head_expansion, hidden, **same).double()


def distinct_scores(*shape: int) -> Tensor:
    return torch.rand(shape).argsort(-1).double()


def assert_agrees(ours: PartialAttention, slow: nn.Module, x: Tensor, scores: Tensor, n: int) -> None:
    assert ours.foreground_count(x.shape[1]) == n
    runs = dict(run_ours=lambda layer, x: layer(x, scores), run_reference=lambda layer, x: layer(x, scores, n))
    assert_same_function(ours, slow, x, **runs, tolerance=1e-10)


@pytest.mark.parametrize("project_all", [False, True])
@pytest.mark.parametrize("background_identity", [False, True])
@pytest.mark.parametrize(
    ("tokens", "switches", "n"),
    [
        (21, dict(foreground=(1, 4)), 5),
        (20, dict(foreground=(39, 3136)), 1),
        (21, dict(foreground=(9, 10)), 18),
        (20, dict(foreground=(7, 0)), 7),
        (5, dict(foreground=(7, 0)), 4),
        (20, dict(foreground=(1, 2), foreground_limit=3), 3),
        (20, dict(foreground=(1, 1)), 19),
        (20, dict(foreground=(1, 1), background_required=False), 20),
        (20, dict(foreground=(49, 0), background_required=False), 20),
        (20, dict(foreground=(1, 2), background_required=False), 10),
        (21, dict(foreground=(1, 4), heads=1, head_expansion=2), 5),
        (21, dict(foreground=(1, 4), heads=4, channel_hidden=5), 5),
        (1, dict(foreground=(1, 4)), 1),
        (1, dict(foreground=(1, 1), background_required=False), 1),
        (2, dict(foreground=(1, 4)), 1),
        (2, dict(foreground=(1, 1)), 1),
        (2, dict(foreground=(1, 1), background_required=False), 2),
    ],
)
def test_forward__agrees_with_the_slow_reference(tokens, switches, n, background_identity, project_all):
    ours, slow = pair(**switches, background_identity=background_identity, project_all=project_all)
    x = torch.randn(3, tokens, 12, dtype=torch.float64)
    assert_agrees(ours, slow, x, distinct_scores(3, tokens), n)


def test_forward__only_the_order_of_the_scores_matters_and_of_equals_the_lower_index_is_first():
    ours, slow = pair(foreground=(1, 4))
    x = torch.randn(2, 24, 12, dtype=torch.float64)
    scores = torch.zeros(2, 24, dtype=torch.float64)
    assert_agrees(ours, slow, x, scores, 6)
    first = torch.arange(24, 0, -1, dtype=torch.float64).expand(2, 24)
    assert_close(ours(x, scores), ours(x, first), "constant scores", 1e-12)
    assert not torch.allclose(ours(x, scores), ours(x, first.flip(1)))
    ours, _ = pair()
    x, scores = torch.randn(2, 20, 12, dtype=torch.float64, requires_grad=True), distinct_scores(2, 20)
    y = ours(x, scores.requires_grad_())
    assert torch.equal(ours(x, scores.exp() - 3), y)
    y.sum().backward()
    assert scores.grad is None and x.grad.abs().min() > 0


@pytest.mark.parametrize("background_identity", [False, True])
def test_forward__moving_the_tokens_moves_the_result_and_images_do_not_see_each_other(background_identity):
    ours, _ = pair(foreground=(1, 4), background_identity=background_identity)
    x, scores = torch.randn(8, 20, 12, dtype=torch.float64), distinct_scores(8, 20)
    y, order = ours(x, scores), torch.randperm(20)
    assert_close(ours(x[:, order], scores[:, order]), y[:, order], "moved", 1e-12)
    assert_close(torch.cat([ours(x[i : i + 1], scores[i : i + 1]) for i in range(8)]), y, "alone", 1e-12)


COUNTS = {(224, 224): (39, 16, 16, 17), (512, 2048): (815, 334, 334, 355)}
COUNTS |= {(800, 1333): (830, 340, 342, 364), (32, 32): (1, 1, 1, 1)}


@pytest.mark.parametrize(("grid", "expected"), COUNTS.items())
def test_foreground_count__of_the_four_stages(grid, expected):
    for i, (n, of) in enumerate([(39, 3136), (16, 784), (16, 196), (17, 49)]):
        stride = 4 * 2**i
        tokens = -(-grid[0] // stride) * -(-grid[1] // stride)
        assert PartialAttention(8, 2, (n, of)).foreground_count(tokens) == expected[i]


@pytest.mark.parametrize("switches", [{}, dict(foreground_limit=4), dict(background_required=False)])
@pytest.mark.parametrize("foreground", [(16, 49), (1, 1), (5, 0), (1, 1000)])
def test_foreground_count__agrees_with_exact_fractions(foreground, switches):
    layer, (n, of) = PartialAttention(8, 2, foreground, **switches), foreground
    limits = of == 0, "background_required" in switches, switches.get("foreground_limit")
    for tokens in range(1, 60):
        assert layer.foreground_count(tokens) == reference.foreground_count(tokens, n, of or 1, *limits)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_select_foreground__is_a_stable_sort(data):
    B, N = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    values = st.sampled_from([-1.5, 0.0, 0.25, 7.0])  # many ties
    rows = data.draw(st.lists(st.lists(values, min_size=N, max_size=N), min_size=B, max_size=B))
    assert_stable(torch.tensor(rows), data.draw(st.integers(1, N)))


@pytest.mark.parametrize("N", [1000, 3136])
def test_select_foreground__long_rows_with_ties(N):
    scores = torch.randint(-15, 15, (2, N)) / 4
    scores[:, ::2] *= -1  # zeros of either sign are equal
    for n in (N // 20, 2 * N // 3):
        assert_stable(scores, n)


def assert_stable(scores: Tensor, n: int) -> None:
    (B, N), rows = scores.shape, scores.tolist()
    chosen = [sorted(range(N), key=lambda i, row=row: (-row[i], i))[:n] for row in rows]
    expected = [sorted(b * N + i for i in row) for b, row in enumerate(chosen)]
    assert select_foreground(scores, n).view(B, n).sort(1).values.tolist() == expected


def test_macs__example_of_the_paper():
    """3136 tokens of width 64 in 8 heads: 40.13 M as the equations spend it, 4.90 M as it is executed here."""
    executed, extra = count(PartialAttention(64, 8, (39, 3136)), (1, 3136, 64), (1, 3136), convention=PRODUCTS)
    N, d, h, F, m = 3136, 64, 8, 40, 4
    published = 3 * (N + 1) * d**2 + 2 * F**2 * d + 8 * h**2 * F**2 + F * d**2 + 2 * (N - 39) * d + 2 * d * m
    assert executed + extra == published
    assert round(published / 1e6, 2) == 40.13 and round(executed / 1e6, 2) == 4.90


def test_reset_parameters__starts_as_ordinary_attention():
    """Without the noise of the head mixings, the foreground passes plain multi-head attention."""
    layer = PartialAttention(12, 3, (1, 4)).double()
    identity = torch.eye(3, dtype=torch.float64)
    assert (layer.head_up - identity.repeat(4, 1)).abs().max() < 0.15
    assert (layer.head_down - identity.repeat(1, 4) / 4).abs().max() < 0.15
    layer.head_up.data, layer.head_down.data = identity.repeat(4, 1), identity.repeat(1, 4) / 4
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = layer.qkv(x).view(2, 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
    expected = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 12)
    assert_close(layer.attend(x), expected, "attention", 1e-12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(dim=10, heads=3), "dim=10 does not split into heads=3; choose a divisor of 10"),
        (dict(dim=10, heads=0), "dim=10 does not split into heads=0"),
        (dict(foreground=(0, 4)), r"foreground=\(0, 4\) is not a pair \(n, of\) with n of at least 1"),
        (dict(foreground=(1, -4)), r"foreground=\(1, -4\) is not a pair"),
        (dict(foreground=(1, 2, 3)), r"foreground=\(1, 2, 3\) is not a pair"),
        (dict(foreground_limit=0), "foreground_limit=0 leaves no token; choose 1 or more, or None"),
        (dict(head_expansion=0), "head_expansion=0 leaves no head; choose 1 or more"),
    ],
)
def test_wrong_arguments__are_refused(arguments, words):
    refused(words, PartialAttention, **(dict(dim=8, heads=2, foreground=(1, 4)) | arguments))


@pytest.mark.parametrize("heads", [3, 4])  # 12 mixed ones; 16, which lie innermost in memory
@pytest.mark.parametrize("five", [False, True])  # queries at a time, the last slice shorter; or a single one
def test_attend__slices_of_queries_give_what_the_whole_gives(five, heads, monkeypatch):
    ours, slow = pair(foreground=(12, 40), heads=heads)
    x, scores = torch.randn(2, 40, 12).double(), torch.randn(2, 40).double()
    whole = ours(x, scores)
    seen = []
    softmax = Tensor.softmax  # of maps B e*h R F, or B R F e*h

    def record(x: Tensor, dim: int) -> Tensor:
        if x.ndim == 4:
            seen.append(x.shape[2 if dim == -1 else 1])
        return softmax(x, dim)

    monkeypatch.setattr(kernel, "QUERY_BYTES", 2 * 4 * heads * 13 * 8 * 5 if five else 1)
    monkeypatch.setattr(Tensor, "softmax", record)
    with torch.no_grad():
        assert_close(ours(x, scores), whole.detach())
    assert seen == ([5, 5, 3] if five else [1] * 13)
    ours(x, scores)  # with gradients the maps are kept anyway
    assert seen[-1] == 13
