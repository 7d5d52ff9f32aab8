"""Points of tokens and groups, against logits that are given and against torch's singular values."""

import json

import pytest
import torch

import broadsight
from broadsight.analysis import plot_token_logits, token_logits
from tests.analysis.measures.test_tokens import BY_HAND, TINY, Says, numbered
from tests.training.small_runs import refusal

BIAS = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 4.0]])


def test_by_hand():
    # With the bias, groups say (2, 1, 2), (1, 2, 4) of the first image and (0, 2, 4), (0, 2, 4) of the second
    found = token_logits(Says(BY_HAND, BIAS), numbered(2), torch.tensor([0, 1]))
    assert found.answers.tolist() == [2, 2] and found.labels is not None and found.labels.tolist() == [0, 1]
    assert found.classes is not None and found.classes.tolist() == [[0, 2], [1, 2]]  # true, strongest other
    assert found.groups.tolist() == [[[2, 2], [1, 4]], [[2, 4], [2, 4]]]
    assert found.aggregate.tolist() == [[1.5, 3], [2, 4]]
    assert found.tokens.tolist() == [[[[1, 0], [1, 0]], [[1, 0], [0, 0]]], [[[0, 2], [1, 0]], [[1, 0], [1, 0]]]]
    # twice the share and the bias: the mean of a group's tokens is the group
    assert found.placed().tolist() == [[[[2, 2], [2, 2]], [[2, 4], [0, 4]]], [[[1, 6], [3, 2]], [[2, 4], [2, 4]]]]
    assert torch.equal(found.placed().mean(2), found.groups)
    record = found.record()
    assert json.loads(json.dumps(record)) == record
    assert record["points"][0]["classes"] == [0, 2] and record["points"][0]["tokens"][1] == [[1.0, 0.0], [0.0, 0.0]]
    assert (record["images"], record["groups"], record["tokens"]) == (2, 2, 2)
    # without labels, and by choice
    single = token_logits(Says(BY_HAND[:, :, :1], BIAS), numbered(2))  # tokens that are their groups
    assert torch.equal(single.tokens[:, :, 0], single.groups) and torch.equal(single.placed(), single.tokens)
    found = token_logits(Says(BY_HAND), numbered(2))  # the answer is first
    assert found.classes is not None and found.classes.tolist() == [[0, 1], [1, 2]] and found.labels is None
    assert (found.aggregate[:, 0] >= found.aggregate[:, 1]).all()
    found = token_logits(Says(BY_HAND), numbered(2), torch.tensor([0, 1]), classes=[2, 0])
    assert found.classes is not None and found.classes.tolist() == [[2, 0], [2, 0]] and found.chosen
    assert found.groups.tolist() == [[[0, 2], [0, 1]], [[2, 0], [0, 0]]]


@pytest.mark.parametrize("shape", [(7, 2, 3, 5), (2, 2, 2, 30)])  # more points than classes, and fewer
def test_principal_directions(shape):
    torch.manual_seed(0)
    shares, bias = torch.randn(shape), torch.randn(2, shape[-1])
    found = token_logits(Says(shares, bias), numbered(len(shares)), view="pca", batch_size=3)
    placed = shape[2] * shares + bias[:, None]
    rows = placed.flatten(0, 2).double()
    mean = rows.mean(0)
    _, values, directions = torch.linalg.svd(rows - mean)
    slow = (rows - mean) @ directions[:2].T
    for axis in range(2):
        sign = 1 if directions[axis][directions[axis].abs().argmax()] > 0 else -1
        ours = found.tokens.flatten(0, 2)[:, axis].double()
        torch.testing.assert_close(ours, sign * slow[:, axis], atol=1e-5, rtol=1e-5)
    assert found.explained == pytest.approx((values[:2] ** 2 / (values**2).sum()).tolist())
    torch.testing.assert_close(found.tokens.mean(2), found.groups, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.groups.mean(1), found.aggregate, atol=1e-5, rtol=1e-5)
    again = token_logits(Says(shares, bias), numbered(len(shares)), view="pca")
    assert torch.equal(again.tokens, found.tokens) and torch.equal(found.placed(), found.tokens)


def test_principal_directions_of_next_to_nothing_and_refusals():
    one = token_logits(Says(BY_HAND[:1, :1, :1]), numbered(1), view="pca")
    assert one.tokens.tolist() == [[[[0, 0]]]] and one.explained == (0.0, 0.0) and "explained" in one.record()
    line = torch.zeros(1, 1, 2, 3)
    line[0, 0, 0, 0] = 3.0  # two points 6 apart, and nothing beside their line
    found = token_logits(Says(line), numbered(1), view="pca")
    assert found.tokens.flatten(0, 2).tolist() == [[3, 0], [-3, 0]] and found.explained == (1.0, 0.0)
    model, x = Says(BY_HAND), numbered(2)
    for classes in ((0,), (1, 1), (0, 1, 2), ("a", "b")):
        assert "two different classes" in refusal(lambda classes=classes: token_logits(model, x, classes=classes))
    assert "expected 0 to 2" in refusal(lambda: token_logits(model, x, classes=(0, 3)))
    assert "leave them out" in refusal(lambda: token_logits(model, x, classes=(0, 1), view="pca"))
    assert "view='tsne'" in refusal(lambda: token_logits(model, x, view="tsne"))
    assert "one class" in refusal(lambda: token_logits(Says(BY_HAND[..., :1]), x))


def test_a_real_model():
    model = broadsight.swap_pool("test_resnet", "map", **TINY).eval()
    x = torch.randn(3, 3, 64, 64)
    found = token_logits(model, x, torch.tensor([0, 1, 2]), batch_size=2)
    with torch.no_grad():
        logits, groups = model(x), model.forward_groups(x, per_token=True)
    assert found.classes is not None
    for i, (first, second) in enumerate(found.classes.tolist()):
        assert first == i and second == max(set(range(5)) - {i}, key=lambda c: float(logits[i, c]))
        for axis, number in enumerate((first, second)):
            torch.testing.assert_close(found.aggregate[i, axis], logits[i, number], atol=1e-5, rtol=1e-5)
            shares = groups.per_token[i, ..., number]
            torch.testing.assert_close(found.tokens[i, ..., axis], shares, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.placed().mean(2), found.groups, atol=1e-5, rtol=1e-5)


def test_plot():
    both = {"classes": token_logits(Says(BY_HAND, BIAS), numbered(2), classes=(2, 0))}
    both["pca"] = token_logits(Says(BY_HAND), numbered(2), view="pca")
    first, second = plot_token_logits(both, names=("cat", "dog", "owl")).axes
    assert (first.get_xlabel(), first.get_ylabel()) == ("logit of owl", "logit of cat")
    assert second.get_xlabel().startswith("principal direction 1, ")
    drawn = [[tuple(place) for place in marks.get_offsets()] for marks in first.collections]
    assert drawn[0] == [tuple(place) for place in both["classes"].placed()[:, 0].flatten(0, 1).tolist()]
    assert drawn[-1] == [tuple(place) for place in both["classes"].aggregate.tolist()]
