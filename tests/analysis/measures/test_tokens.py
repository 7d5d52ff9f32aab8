"""Bias and variance of tokens: worked out by hand for tokens whose answers are given, and slowly for real ones."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import broadsight
from broadsight.analysis import MEASURES, GroupVotes, TokenVotes, plot_token_votes, token_votes
from broadsight.analysis.measures.tokens import curves_of
from broadsight.layers import GroupLogits
from tests.refusals import refused
from tests.training.small_runs import refusal

TINY = dict(groups=2, tokens=4, dim=24, mlp_dim=48, num_classes=5)


class Says(nn.Module):
    """Answers image i, which is full of the number i, with given shares (N, G, T, C), and a bias (G, C)."""

    def __init__(self, shares: Tensor, bias: Tensor | None = None, distill: Tensor | None = None):
        super().__init__()
        self.shares, self.bias, self.distill, self.calls = shares, bias, distill, []

    def forward_groups(self, x: Tensor, per_token: bool = False) -> GroupLogits:
        assert not self.training and not torch.is_grad_enabled()
        self.calls.append(len(x))
        chosen = x[:, 0, 0, 0].long()
        shares = self.shares[chosen]
        groups = shares.sum(2) + (0 if self.bias is None else self.bias)
        distill = None if self.distill is None else self.distill[chosen]
        return GroupLogits(groups, None, shares if per_token else None, distill)


def numbered(count: int) -> Tensor:
    return torch.arange(count).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).float()


def votes(*classes: int, weight: float = 1.0, of: int = 3) -> Tensor:
    """A share of the logits for each class that is named."""
    return weight * torch.nn.functional.one_hot(torch.tensor(classes), of).float()


# Two images, two groups of two tokens, three classes.
# First: tokens say 0, 0 | 0, 1. All together: 0. Groups: 0 and, since token 2 is louder, 1.
# Second: tokens say 2, 1 | 1, 1. All together: 1. Groups: 2, since its first token is louder, and 1.
BY_HAND = torch.stack([votes(0, 0), votes(0, 1), votes(2, 1), votes(1, 1)]).view(2, 2, 2, 3)
BY_HAND[0, 1, 1] *= 2
BY_HAND[1, 0, 0] *= 2


def test_by_hand():
    found = token_votes(Says(BY_HAND), numbered(2), torch.tensor([0, 2]))
    expected = TokenVotes(
        *(2, 2, 2),
        bias=0.5,  # 1 is not 2
        variance=1 / 4,  # one of four apart in the first image, one in the second
        bias_error=pytest.approx(0.5),  # of 0 and 1: deviation 0.7071 over the root of 2
        variance_error=0,
        token_error=(1 + 3) / 8,
        per_group=(GroupVotes(0.0, 0.25, 0.25), GroupVotes(1.0, 0.25, 0.25)),  # of the first 0 and 2 are right
        per_token=((0.5, 0.0), (0.0, 0.5)),
    )
    assert found == expected
    record = json.loads(json.dumps(found.record()))
    assert (record["total"], record["accuracy"], record["series"]) == (4, 0.5, "")
    assert record["per_token"] == [[0.5, 0.0], [0.0, 0.5]] and record["variance"] == 0.25
    assert record["per_group"][0] == {"bias": 0.0, "variance": 0.25, "differing": 0.25}
    unlabelled = token_votes(Says(BY_HAND), numbered(2))
    groups = tuple(replace(group, bias=None) for group in found.per_group)
    assert unlabelled == replace(expected, bias=None, bias_error=None, token_error=None, per_group=groups)
    assert token_votes(Says(BY_HAND), numbered(1)).variance_error is None


def test_the_bias_and_distillation_tokens_count_for_the_aggregate_and_not_for_tokens():
    shares = votes(0, 0)[None, None]  # two tokens for 0
    found = token_votes(Says(shares, bias=torch.tensor([[0.0, 5.0, 0.0]])), numbered(1), torch.tensor([1]))
    assert found.bias == 0 and found.variance == 1
    found = token_votes(Says(shares, distill=3 * votes(1)[None]), numbered(1))
    assert found.variance == 1 and found.per_group[0].variance == 0
    shares = torch.stack([votes(0), votes(2)])[None]  # groups of one token, which answers as its group does
    bias = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]])  # the first group says 1, all together too
    found = token_votes(Says(shares, bias), numbered(1), torch.tensor([1]))
    assert found.tokens == 1 and found.bias == 0 and found.per_token == ((0.0,), (1.0,))
    assert [(group.variance, group.bias) for group in found.per_group] == [(0, 0), (0, 1)]


def test_batches_add_up():
    torch.manual_seed(1)
    shares, labels = torch.randn(11, 3, 4, 6), torch.randint(6, (11,))
    whole = token_votes(Says(shares), numbered(11), labels, batch_size=11)
    model, counts = Says(shares), []
    parts = [(numbered(11)[:4], labels[:4]), (numbered(11)[4:], labels[4:], ["more"] * 7)]
    found = token_votes(model, parts, batch_size=3, seen=counts.append)
    assert found == whole
    assert model.calls == [3, 1, 3, 3, 1] and counts == [3, 4, 7, 10, 11]
    together, by_token = shares.sum((1, 2)).argmax(-1), shares.argmax(-1)
    slow = [[int(y != together[i]) for y in by_token[i].flatten()] for i in range(11)]
    assert found.variance == pytest.approx(np.mean(slow))
    assert found.variance_error == pytest.approx(np.std(np.mean(slow, 1), ddof=1) / 11**0.5)
    assert found.bias == pytest.approx(np.mean([int(together[i] != labels[i]) for i in range(11)]))


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_real_model(tokens):
    torch.manual_seed(0)
    model = broadsight.swap_pool("test_resnet", "map", **TINY | dict(tokens=tokens)).train()
    model.backbone.eval()
    with torch.no_grad():
        model.head.classifier.fc.bias.normal_(std=0.5)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    x, labels = torch.randn(6, 3, 64, 64), torch.randint(5, (6,))
    found = token_votes(model, x, labels, batch_size=4)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    with torch.no_grad():
        model.eval()
        answers, groups = model(x).argmax(-1), model.forward_groups(x, per_token=True)
    said = groups.per_token if tokens > 1 else groups.tokens[:, :, None]
    differing = (said.argmax(-1) != answers[:, None, None]).double()
    assert found.variance == pytest.approx(float(differing.mean()))
    assert found.bias == float((answers != labels).double().mean())
    assert [group.differing for group in found.per_group] == pytest.approx(differing.mean((0, 2)).tolist())
    if tokens > 1:
        assert 0 < found.variance < 1


def test_what_fits_of_any_size_type_and_wrapper_and_what_is_refused():
    model = broadsight.swap_pool("test_resnet", "map", **TINY).to(torch.bfloat16)
    compiled = nn.Module()  # as torch.compile wraps it, without the seconds that its import takes
    compiled._orig_mod = model
    assert token_votes(compiled, torch.randn(2, 3, 40, 72)).images == 2
    grouped = broadsight.swap_pool("test_resnet", "ga", **TINY | dict(groups=3))
    assert token_votes(grouped, torch.randn(1, 3, 64, 64)).groups == 3
    x, pooled = torch.zeros(1, 3, 64, 64), broadsight.swap_pool("test_resnet", "gap", num_classes=5)
    light = broadsight.swap_pool("test_resnet", "map", **TINY, light=True)
    for model, words in (
        (pooled, "AveragePool has no groups of class tokens; pass one that has: broadsight.swap_pool"),
        (pooled.backbone, "ResNet has no groups of class tokens; pass one that has: broadsight.swap_pool"),
        (light, "the pool is light"),
        ("map_resnet50", "model"),
    ):
        refused(f"^{words}", token_votes, model, x)
    model, x = Says(BY_HAND), numbered(2)
    assert "3 labels for 2 images" in refusal(lambda: token_votes(model, x, torch.zeros(3).long()))
    assert "a label is 3, but the model has 3" in refusal(lambda: token_votes(model, x, torch.tensor([0, 3])))
    assert "a label is -1" in refusal(lambda: token_votes(model, x, torch.tensor([0, -1])))
    assert "class numbers" in refusal(lambda: token_votes(model, x, torch.zeros(2, 3)))
    assert "class numbers" in refusal(lambda: token_votes(model, [(x, ["a", "b"])]))
    assert "apart" in refusal(lambda: token_votes(model, [x], torch.tensor([0, 1])))
    assert "others without" in refusal(lambda: token_votes(model, [(x, torch.tensor([0, 1])), x]))
    assert "not finite" in refusal(lambda: token_votes(Says(BY_HAND * torch.nan), x))


def test_plot():
    labelled = token_votes(Says(BY_HAND), numbered(2), torch.tensor([0, 2]))
    whole, by_group = plot_token_votes({"one": labelled, "two": token_votes(Says(BY_HAND), numbered(1))}).axes
    bars = [one for one in whole.containers if hasattr(one, "patches")]
    heights = {one.get_label(): [bar.get_height() for bar in one] for one in bars}
    assert heights == {"bias": [50.0], "variance": [25.0, 25.0]}
    assert list(by_group.lines[0].get_ydata()) == [25.0, 25.0]


def votes_of(series: str, groups: int, tokens: int, bias: float | None, variance: float = 0.25) -> TokenVotes:
    of_groups = (GroupVotes(bias, 0.1, 0.2),) * groups
    return TokenVotes(9, groups, tokens, bias, variance, 0.02, 0.01, None, of_groups, (), series)


def test_curves__one_for_each_series_over_the_number_of_tokens():
    both = {f"{name}{t}": votes_of(name, 1, t, b) for name, b in (("with", 0.2), ("without", 0.3)) for t in (1, 2, 4)}
    both["with2"] = votes_of("with", 1, 2, 0.1, 0.5)
    both["again"] = votes_of("with", 1, 2, 0.3, 0.25)  # another seed: the curve goes through the mean
    figure = plot_token_votes(both)
    assert [panel.get_title() for panel in figure.axes] == ["accuracy", "bias error", "variance error"]
    lines = [[line for line in panel.lines if len(line.get_xdata()) > 1] for panel in figure.axes]
    assert [[list(line.get_xdata()) for line in panel] for panel in lines] == [[[1, 2, 4]] * 2] * 3
    heights = [[pytest.approx(list(line.get_ydata())) for line in panel] for panel in lines]
    assert heights == [[[80, 80, 80], [70, 70, 70]], [[20, 20, 20], [30, 30, 30]], [[25, 37.5, 25], [25, 25, 25]]]
    bars = [one for one in figure.axes[0].containers if one.has_yerr]
    assert len(bars) == 7 and bars[0][2][0].get_segments()[0][:, 1].tolist() == pytest.approx([78, 82])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["with", "without"]
    assert [one.get_text() for one in figure.axes[0].get_xticklabels()] == ["1", "2", "4"]
    # unlabelled: variance alone
    unlabelled = plot_token_votes({"a": votes_of("s", 1, 2, None), "b": votes_of("s", 1, 4, None)})
    assert [any(len(x.get_xdata()) for x in panel.lines) for panel in unlabelled.axes] == [False, False, True]


def test_curves__what_they_join_and_what_they_need():
    ways = {f"{g} x {t}": votes_of("s", g, t, 0.2) for g, t in ((1, 1), (2, 4), (2, 2), (4, 2))}
    found = {name: [(one.groups, one.tokens) for one in curve] for name, curve in curves_of(ways).items()}
    assert found == {"s, 1 group": [(1, 1)], "s, 2 groups": [(2, 2), (2, 4)], "s, 4 groups": [(4, 2)]}
    alone = {"a": votes_of("", 1, 2, 0.2), "b": votes_of("", 1, 4, 0.2)}  # nothing says that they belong together
    assert list(curves_of(alone)) == ["a", "b"] and len(plot_token_votes(alone).axes) == 2
    (note,) = MEASURES["tokens"].notes(alone)
    assert note.startswith("curves over the number of class tokens need runs that differ in --pool-args groups or")
    assert MEASURES["tokens"].notes(ways) == []


def test_curves__published_ones_are_broken_lines_of_their_own():
    accuracy, _, variance = plot_token_votes({"a": votes_of("", 1, 2, 0.2)}, paper=True).axes
    broken = {tuple(x.get_xdata()): list(x.get_ydata()) for x in accuracy.lines if x.get_linestyle() == "--"}
    assert broken == {(1, 2, 4, 8, 16): [78.5, 78.7, 79.1, 79.2, 79.0], (2, 4, 8, 16): [79.2, 79.5, 79.8, 80.2]}
    labels = [line.get_label() for line in variance.lines if line.get_linestyle() == "--"]
    assert [label.partition(" (MAP, Table 7")[0] for label in labels] == [
        "published, without distillation", "published, with distillation"
    ]  # fmt: skip
