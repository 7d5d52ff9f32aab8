"""Optimiser, schedule and average: every rate and every average worked out by hand."""

import math
from collections.abc import Sequence

import pytest
import timm
import torch
from torch import nn

from broadsight.models.edited import edit
from broadsight.training.optimisation import make_average, make_optimizer, make_scheduler
from broadsight.training.recipes import Recipe
from tests.refusals import refused


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return timm.create_model("test_vit", num_classes=3)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """The group that each parameter is in."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    assert len(groups) == sum(len(group["params"]) for group in optimizer.param_groups)
    return {name: groups[id(parameter)] for name, parameter in model.named_parameters()}


def test_optimizer__decays_matrices_alone_and_lower_layers_less(vit):
    groups = by_name(vit, make_optimizer(vit, Recipe(weight_decay=0.05)))
    assert groups.keys() == dict(vit.named_parameters()).keys()
    kept = {name for name, group in groups.items() if group["weight_decay"] == 0}
    assert kept == {n for n, p in vit.named_parameters() if p.ndim <= 1} | {"cls_token", "pos_embed"}
    assert {group["weight_decay"] for name, group in groups.items() if name not in kept} == {0.05}
    groups = by_name(vit, make_optimizer(vit, Recipe(layer_decay=0.75)))
    last = len(vit.blocks) + 1  # the stem is layer 0, the norm goes with the last block, the classifier comes last
    for name, group in groups.items():
        layer = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
        layer = {"norm": last - 1, "head": last}.get(name.split(".")[0], layer)
        assert group["lr_scale"] == pytest.approx(0.75 ** (last - layer)), name
    assert groups["patch_embed.proj.weight"]["lr_scale"] == pytest.approx(0.75**7)
    kept = {name for name, group in groups.items() if group["weight_decay"] == 0}
    assert kept == {n for n, p in vit.named_parameters() if p.ndim <= 1} | {"cls_token", "pos_embed"}
    # Of a pool in the classifier
    model = edit("test_resnet", pool="gap", num_classes=3)
    groups = by_name(model, make_optimizer(model, Recipe(layer_decay=0.5)))
    scales = {name: group["lr_scale"] for name, group in groups.items()}
    assert {scale for name, scale in scales.items() if name.startswith("head.")} == {1.0}
    assert max(scale for name, scale in scales.items() if not name.startswith("head.")) <= 0.5
    assert scales["backbone.conv1.0.weight"] == min(scales.values())


def test_optimizer__settings_reach_it_or_are_refused():
    for settings, kind, expected in (
        (dict(optimizer="sgd", momentum=0.8), torch.optim.SGD, dict(momentum=0.8, nesterov=True)),
        (dict(optimizer="sgd"), torch.optim.SGD, dict(momentum=0.9)),
        (dict(optimizer="momentum", momentum=0.7), torch.optim.SGD, dict(momentum=0.7, nesterov=False)),
        (dict(betas=(0.8, 0.95), eps=1e-5), torch.optim.AdamW, dict(betas=(0.8, 0.95), eps=1e-5)),
        (dict(), torch.optim.AdamW, dict(betas=(0.9, 0.999), eps=1e-8)),
        (dict(optimizer="AdamW", lr=0.5), torch.optim.AdamW, dict(lr=0.5)),
    ):
        optimizer = make_optimizer(nn.Linear(2, 2), Recipe(**settings))
        assert type(optimizer) is kind
        for group in optimizer.param_groups:
            assert {name: group[name] for name in expected} == expected
    model = nn.Linear(2, 2)
    refused("unknown optimizer 'adamx'; did you mean 'adamax'", make_optimizer, model, Recipe(optimizer="adamx"))
    refused(r"^optimizer sgd: .*betas", make_optimizer, model, Recipe(optimizer="sgd", betas=(0.9, 0.9)))


def rates(recipe: Recipe, per_epoch: int, at: Sequence[int]) -> list[float]:
    """The learning rate of some updates, as the engine sets it: after update u for u + 1."""
    optimizer = make_optimizer(nn.Linear(2, 2), recipe)
    scheduler = make_scheduler(optimizer, recipe, per_epoch)
    found = []
    for update in range(max(at) + 1):
        if update in at:
            found.append(max(group["lr"] for group in optimizer.param_groups))
        scheduler.step_update(update + 1)
    return found


def cosine(recipe: Recipe, per_epoch: int, update: int) -> float:
    warm, whole = recipe.warmup_epochs * per_epoch, recipe.epochs * per_epoch
    if update < warm:
        return recipe.warmup_lr + update * (recipe.lr - recipe.warmup_lr) / warm
    if update >= whole:
        return recipe.min_lr
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * (1 + math.cos(math.pi * update / whole)) / 2


AT = [0, 1, 9, 19, 20, 21, 50, 99, 100, 105, 119]


def test_schedule__warm_up_cosine_cooldown_constant_polynomial_and_steps_at_the_milestones():
    for warmup in (0, 0.25, 2, 10):
        recipe = Recipe(epochs=10, warmup_epochs=warmup, cooldown_epochs=2, lr=0.4, min_lr=0.01, warmup_lr=0.001)
        assert rates(recipe, 10, AT) == pytest.approx([cosine(recipe, 10, update) for update in AT])
    recipe = Recipe(epochs=10, warmup_epochs=1, schedule="constant", lr=0.4, min_lr=0.01, warmup_lr=0.0)
    assert rates(recipe, 10, [0, 5, 10, 50, 99]) == pytest.approx([0, 0.2, 0.4, 0.4, 0.4])
    recipe = recipe.change({"warmup_epochs": 0})
    assert rates(recipe, 10, [0, 99, 500]) == pytest.approx([0.4, 0.4, 0.4])
    recipe = Recipe(epochs=4, warmup_epochs=0, lr=1.0, schedule="poly", power=0.5, min_lr=0.0)
    assert rates(recipe, 25, range(100)) == pytest.approx([(1 - update / 100) ** 0.5 for update in range(100)])
    found = rates(Recipe(epochs=12, warmup_epochs=0.5, lr=1e-4, schedule="step", warmup_lr=1e-7), 10, range(120))
    assert found[0] == 1e-7 and found[5:80] == [1e-4] * 75  # 8 and 11 of 12 epochs
    assert found[80:110] == pytest.approx([1e-5] * 30) and found[110:] == pytest.approx([1e-6] * 10)


@pytest.mark.parametrize("warmup", [0, 1])
def test_schedule__every_layer_at_its_own_rate_from_the_first_update_on(vit, warmup):
    recipe = Recipe(epochs=4, warmup_epochs=warmup, lr=0.4, min_lr=0.1, warmup_lr=0.2, layer_decay=0.5)
    optimizer = make_optimizer(vit, recipe)
    scheduler = make_scheduler(optimizer, recipe, 5)
    for update in (0, 1, 7, 12, 3, 9):  # it has no memory
        if update:
            scheduler.step_update(update)
        for name, group in by_name(vit, optimizer).items():
            assert group["lr"] == pytest.approx(group["lr_scale"] * cosine(recipe, 5, update)), (update, name)


@pytest.mark.parametrize(("warmup", "decays"), [(False, (0.9, 0.9)), (True, (1 - 2 ** (-2 / 3), 1 - 3 ** (-2 / 3)))])
def test_average__by_hand(warmup, decays):
    model = nn.BatchNorm1d(2)
    average = make_average(model, Recipe(ema=0.9, ema_warmup=warmup))
    expected = None
    for step, decay in enumerate((0.0, *decays), 1):  # the first update is taken as it is
        with torch.no_grad():
            model.weight.uniform_()
            model.running_mean.uniform_()
        average.update(model, step=step)
        now = torch.stack([model.weight.detach(), model.running_mean])
        expected = now if expected is None else decay * expected + (1 - decay) * now
        torch.testing.assert_close(torch.stack([average.module.weight, average.module.running_mean]), expected)
    assert not average.module.training and make_average(model, Recipe()) is None
