"""Interaction strength against functions of patches whose interactions are known, and against plain enumeration."""

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from torch import Tensor, nn

from broadsight.analysis import interaction_strength, plot_interaction_strength
from broadsight.analysis.measures.interaction import GRID as WHOLE
from broadsight.analysis.measures.interaction import ORDERS, Design, _Answers, masked
from tests.refusals import refused
from tests.training.small_runs import refusal
from tests.zoo import shallow

GRID = (2, 3)
EVERYTHING = dict(grid=GRID, orders=range(5), pairs=99, contexts=99)


class OfPatches(nn.Module):
    """A classifier of two classes, whose log-odds are a function of the patches' mean values, (B, n) -> (B,)."""

    def __init__(self, function: Callable[[Tensor], Tensor], grid: tuple[int, int] = GRID):
        super().__init__()
        self.function, self.grid, self.passed = function, grid, []

    def forward(self, images: Tensor) -> Tensor:
        self.passed.append(len(images))
        patches = nn.functional.adaptive_avg_pool2d(images.mean(1), self.grid).flatten(1).double()
        score = self.function(patches)
        return torch.stack([score, torch.zeros_like(score)], 1)


def make_images(values: Tensor, grid: tuple[int, int] = GRID, side: int = 2) -> Tensor:
    """(B, n) -> (B, 3, H, W) whose patches show these values."""
    maps = values.view(-1, 1, *grid).repeat_interleave(side, 2).repeat_interleave(side, 3)
    return maps.expand(-1, 3, -1, -1).contiguous()


def enumerated(function: Callable[[Tensor], Tensor], values: Tensor, orders: range) -> list[float]:
    """E_ij |I(i, j)| of one image (n,) by its definition, all pairs and all contexts."""

    def v(subset: set[int]) -> float:
        there = torch.tensor([float(k in subset) for k in range(len(values))], dtype=torch.float64)
        return function((values * there)[None]).item()

    def size(i: int, j: int, order: int) -> float:
        contexts = itertools.combinations([k for k in range(len(values)) if k not in (i, j)], order)
        return abs(fmean(v({*s, i, j}) - v({*s, i}) - v({*s, j}) + v({*s}) for s in contexts))

    pairs = list(itertools.combinations(range(len(values)), 2))
    return [fmean(size(i, j, order) for i, j in pairs) for order in orders]


def curved(x: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, x.shape[1], dtype=x.dtype)
    return torch.tanh(x @ weights) + x[:, 0] * x[:, 3] * x[:, -1] / 2


def test_pairs__interact_alike_in_every_order():
    """f = sum of w_ij x_i x_j has I(i, j) = w_ij x_i x_j whatever is around."""
    weights = torch.randn(6, 6, dtype=torch.float64).triu(1)
    x = torch.rand(1, 6, dtype=torch.float64) + 0.5
    model = OfPatches(lambda x: torch.einsum("bi,ij,bj->b", x, weights, x))
    found = interaction_strength(model, make_images(x), **EVERYTHING, target=0)
    size = (weights * x.T * x).abs().sum().item() / 15
    assert found.absolute == pytest.approx([size] * 5) and found.strength == pytest.approx([1] * 5)
    assert found.error == pytest.approx([0] * 5, abs=1e-7) and found.floor == (0,) * 5


def test_by_hand_and_by_the_definition():
    for function, absolute, strength in (
        (lambda x: 64 * x.prod(1), [0, 0, 0, 0, 64], [0, 0, 0, 0, 5]),
        # The third patch is in a context of m of n - 2 with the chance m / (n - 2), and 3 of 15 pairs see it
        (lambda x: x[:, :3].prod(1), [3 / 15 * m / 4 for m in range(5)], [m / 2 for m in range(5)]),
        (lambda x: x.sum(1), [0] * 5, [0] * 5),
    ):
        found = interaction_strength(OfPatches(function), make_images(torch.ones(2, 6)), **EVERYTHING)
        assert found.absolute == pytest.approx(absolute) and found.strength == pytest.approx(strength)
        assert found.error == found.floor == (0,) * 5  # all images are the same, and all contexts taken
    x = torch.randn(2, 6, dtype=torch.float64)
    found = interaction_strength(OfPatches(curved), make_images(x), **EVERYTHING, target=0)
    expected = torch.tensor([enumerated(curved, one, range(5)) for one in x])  # images, orders
    assert found.absolute == pytest.approx(expected.mean(0).tolist(), rel=1e-6)
    assert found.strength == pytest.approx((expected.mean(0) / expected.mean()).tolist(), rel=1e-6)
    assert math.fsum(found.strength) / 5 == pytest.approx(1)


def test_log_odds__of_a_class_among_several():
    logits = torch.tensor([[3.0, -1.0, 0.5], [800.0, 0.0, 1.0]])
    answers = _Answers(2, "log-odds")
    answers.see(logits, ())
    p = logits[0].double().softmax(0)[2]
    assert answers.scores[0].tolist() == pytest.approx([(p / (1 - p)).log().item(), -799], rel=1e-9)
    answers = _Answers(None, "log-odds")  # the first, which is the whole image, says which class
    answers.see(logits.flip(0), ())
    assert answers.label == 0 and answers.scores[0][0] == pytest.approx(800 - math.log(1 + math.e))


@pytest.mark.parametrize("size", [(2, 3), (5, 7), (4, 6)])
def test_masked__shows_the_patches_of_a_subset_alone(size):
    image = torch.rand(3, *size) + 1
    (shown,) = masked(image, iter([(), (0, 5), (1,)]), GRID, [-1.0, -2.0, -3.0], 8)
    for photo, subset in zip(shown, [(), (0, 5), (1,)], strict=True):
        for row, column in itertools.product(range(size[0]), range(size[1])):
            patch = (row * 2 // size[0]) * 3 + column * 3 // size[1]
            expected = image[:, row, column] if patch in subset else torch.tensor([-1.0, -2.0, -3.0])
            assert photo[:, row, column].equal(expected)


@pytest.fixture(scope="module")
def population() -> tuple[Tensor, Tensor]:
    """Images (B, n), and the true strength of each order over all of them."""
    x = 0.5 + torch.rand(60, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = interaction_strength(OfPatches(curved), make_images(x), **EVERYTHING, target=0, batch_size=4096)
    return x, torch.tensor(found.strength)


def test_sample__is_within_its_error(population):
    """Of deviations from the truth in units of the error, the root mean square is about 1, and few are beyond 2."""
    x, truth = population
    deviations = []
    for seed in range(20):
        chosen = torch.randint(60, (30,), generator=torch.Generator().manual_seed(seed))
        options = dict(grid=GRID, orders=range(5), pairs=2, contexts=6, seed=seed, batch_size=512)
        found = interaction_strength(OfPatches(curved), make_images(x[chosen]), target=0, **options)
        deviations.append((torch.tensor(found.strength) - truth) / torch.tensor(found.error))
    found = torch.stack(deviations)
    assert 0.75 < found.square().mean().sqrt() < 1.3
    assert (found.abs() < 2).float().mean() > 0.85


def test_orders__are_shares_or_numbers_and_contexts_of_their_size():
    assert Design((7, 7), (0.05, 0.5, 0.95, 1.0), 1, 1).orders == (2, 24, 47)  # round(0.95 * 49) = n - 2
    assert Design((2, 2), ORDERS, 1, 1).orders == (0, 1, 2)
    assert Design((7, 7), (3, 0), 1, 1).orders == (0, 3)
    design = Design(GRID, (2, 3), 15, 3)  # of 6 and 4
    subsets = list(design.subsets(random.Random(0)))
    assert subsets[0] == tuple(range(6)) and len(subsets) == 1 + 4 * 15 * 6
    pairs = set()
    for at in range(1, len(subsets), 24):
        (pair,) = {tuple(set(subsets[k + 3]) - set(subsets[k])) for k in range(at, at + 24, 4)}
        pairs.add(frozenset(pair))
        for k in range(at, at + 24, 4):
            alone, with_i, with_j, both = map(set, subsets[k : k + 4])
            assert with_i | with_j == both and with_i & with_j == alone and len(both) == len(alone) + 2
        contexts = [frozenset(subsets[k]) for k in range(at, at + 24, 4)]
        assert len(set(contexts)) == 6 and list(map(len, contexts)) == [2, 2, 2, 3, 3, 3]
    assert len(pairs) == 15 and all(len(pair) == 2 for pair in pairs)


def test_error__shrinks_with_the_root_of_the_images_and_of_one_is_that_of_its_pairs(population):
    def error(count: int) -> float:
        options = dict(grid=GRID, orders=range(5), pairs=2, contexts=1, target=0)
        return math.hypot(*interaction_strength(OfPatches(curved), make_images(population[0][:count]), **options).error)

    assert error(4) / error(60) == pytest.approx(15**0.5, rel=0.4)
    image = make_images(population[0][:1])
    options = dict(grid=GRID, orders=range(5), contexts=99, target=0)
    found = interaction_strength(OfPatches(curved), image, pairs=8, **options)
    assert found.record()["error_over"] == "pairs" and all(e > 0 for e in found.error)
    single = interaction_strength(OfPatches(curved), image, pairs=1, **options)
    assert all(map(math.isnan, single.error)) and {order["error"] for order in single.record()["orders"]} == {None}


def test_floor__is_what_noise_shows():
    """Coins that the contexts toss, with no interaction on average: the strength is that of the floor."""
    draw = torch.Generator().manual_seed(0)
    noise = OfPatches(lambda x: torch.randn(len(x), generator=draw, dtype=torch.float64), (4, 4))
    found = interaction_strength(noise, torch.ones(10, 3, 4, 4), grid=(4, 4), orders=(3, 8), pairs=20, contexts=9)
    assert found.floor == pytest.approx(found.strength, rel=0.1)
    assert found.absolute == pytest.approx([2 * math.sqrt(2 / math.pi) / 3] * 2, rel=0.15)  # sd 2 over 9 contexts
    single = interaction_strength(noise, torch.ones(2, 3, 4, 4), grid=(4, 4), orders=(3, 8), pairs=2, contexts=1)
    assert all(math.isnan(f) for f in single.floor) and single.record()["orders"][0]["floor"] is None


def test_seed__decides_and_nothing_else_and_passes_are_counted_and_bounded(population):
    images = make_images(population[0][:5]).float()
    options = dict(grid=GRID, orders=(0.3, 0.6), pairs=3, contexts=3)
    first = interaction_strength(OfPatches(curved), images, **options)
    torch.manual_seed(5)
    again = interaction_strength(OfPatches(curved), iter([(images[:2], "x y"), images[2:]]), batch_size=7, **options)
    assert again.strength == pytest.approx(first.strength, rel=1e-6)
    assert again.error == pytest.approx(first.error, rel=1e-5)
    assert interaction_strength(OfPatches(curved), images, **options) == first
    assert interaction_strength(OfPatches(curved), images, seed=1, **options).strength != first.strength
    model, told = OfPatches(curved), []
    options = dict(grid=GRID, orders=(0, 2, 4), pairs=3, contexts=5)
    interaction_strength(model, make_images(population[0][:3]), batch_size=8, seen=told.append, **options)
    assert sum(model.passed) == 3 * (1 + 4 * 3 * (1 + 5 + 1))
    assert max(model.passed) == 8 and told == sorted(told) and told[-1] == 3
    assert len(list(Design(WHOLE, ORDERS, 6, 6).subsets(random.Random(0)))) == 1441


def test_model__is_measured_and_left_as_it_was():
    model = shallow("emsnet_xtiny", num_classes=5).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    options = dict(grid=(3, 4), orders=(0.1, 0.5, 0.9), pairs=1, contexts=2)
    found = interaction_strength(model, torch.randn(2, 3, 48, 64), target=torch.tensor([3, 1]), **options)
    assert all(module.training for module in model.modules())
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert sum(found.strength) == pytest.approx(3) and all(map(math.isfinite, (*found.error, *found.floor)))
    assert json.loads(json.dumps(found.record()))["orders"][0]["order"] == 1
    other = interaction_strength(model, [(torch.randn(2, 3, 48, 64), torch.tensor([3, 1]))], target="label", **options)
    (panel,) = plot_interaction_strength({"one": found, "other": other}).axes
    assert [text.get_text() for text in panel.get_legend().get_texts()][:2] == ["one", "other"]


MISTAKES = yaml.safe_load(Path(__file__).with_name("interaction_mistakes.yaml").read_text("utf-8"))


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_bad_input__says_what_to_do(options, words):
    refused(words, interaction_strength, OfPatches(curved), torch.ones(2, 3, 4, 6), **EVERYTHING | options)


def test_bad_model__says_what_to_do():
    def said(model: nn.Module, images: int = 1) -> str:
        return refusal(lambda: interaction_strength(model, torch.ones(images, 3, 4, 6), **EVERYTHING))

    assert "need a classifier" in said(nn.Identity()) and "images are empty" in said(OfPatches(curved), 0)
    assert "not finite" in said(OfPatches(lambda x: x.sum(1) / 0))
    assert "pass score='logit'" in said(nn.Sequential(nn.Flatten(), nn.Linear(72, 1)))
