"""Every field of a recipe is read by a task, or refused where it would be ignored."""

import sys
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import pytest

from broadsight.training import run as training
from broadsight.training.objectives.steps import OF_GROUPS
from broadsight.training.parts import check_fields
from broadsight.training.recipes import Recipe, names
from broadsight.training.request import Request
from broadsight.training.settings import settings_of

from .dense_runs import SMALL_HEADS, TASKS, ask_dense
from .small_runs import SMALL_POOL, ask, ready, refusal, without_drawing

FIELDS = [setting.name for setting in fields(Recipe)]
# Of these, "read" would prove nothing: they make, check or write recipes.
ABOUT_RECIPES = {"recipes.py", "dataclasses.py"}


@pytest.fixture
def read(monkeypatch) -> set[str]:
    """The fields that anybody has read since."""
    seen, plain = set(), Recipe.__getattribute__

    def recorded(recipe: Recipe, name: str):
        code = sys._getframe(1).f_code
        if Path(code.co_filename).name not in ABOUT_RECIPES and code.co_name != "check_fields":
            seen.add(name)
        return plain(recipe, name)

    monkeypatch.setattr(Recipe, "__getattribute__", recorded)
    return seen


def refused(request: Request, name: str, model) -> bool:
    """Whether a field that the user sets, to what it is anyway, is refused."""
    recipe = settings_of(request, None)[1]
    asked = replace(request, set={**request.changes, name: getattr(recipe, name)})
    try:
        settings, recipe = settings_of(asked, None)
        check_fields(asked, recipe, settings, model)
    except ValueError as error:
        assert str(error).startswith(f"{name}=") and " is for " in str(error) and str(error).endswith("; leave it out")
        return True
    return False


OF_CLASSIFIERS = {"crop_pct", "interpolation", "scale", "ratio", "auto_augment", "erasing", "mixup", "cutmix"}
OF_CLASSIFIERS |= {"mixup_prob", "mixup_switch", "mixup_off_epoch", "smoothing", "repeated_aug", "drop_rate", "loss"}
OF_CLASSIFIERS |= {"distill", "teacher", "alpha", "temperature", "layer_decay", "mask_ratio", "mask_patch"}
IDLE = {"ema_warmup", "milestones", "power", "warmup_lr", "fit_batch"}  # with what tiny runs have
IDLE |= {*OF_GROUPS, "loss_reading"}
OF_DENSE = {"long_side", "resize", "crop", "rotation"}
REFUSED = {
    "classify": IDLE | OF_DENSE | {"mixup_prob", "mixup_switch", "mixup_off_epoch", "mask_patch"},
    "retinanet": IDLE | OF_CLASSIFIERS | {"rotation"},
    "mask_rcnn": IDLE | OF_CLASSIFIERS | {"rotation"},
    "semantic_fpn": IDLE | OF_CLASSIFIERS | {"rotation", "crop"},
    "simple_baseline": IDLE | OF_CLASSIFIERS | {"crop", "long_side", "eval_size", "color_jitter"},
}
REFUSED["classify"] |= {"alpha", "temperature"}
SLOW = {"mask_rcnn": pytest.mark.slow}  # as retinanet


@pytest.mark.parametrize("head", [pytest.param(head, marks=SLOW.get(head, ())) for head in REFUSED])
def test_field__is_read_or_refused(head, tmp_path, monkeypatch, read):
    without_drawing(monkeypatch)
    out = tmp_path / "run"
    request = ask("scenes:8", out=str(out)) if head == "classify" else ask_dense(head, out)
    prepared = ready(request)
    with ExitStack() as held:
        training._run(prepared, request, False, held)
    model = prepared.engine.plain
    turned_down = {name for name in FIELDS if refused(request, name, model)}
    assert turned_down == REFUSED[head]
    assert set(FIELDS) - turned_down <= read


def test_field__that_needs_another():
    model = ready(ask("scenes:8")).engine.plain
    for changes, fits, idle in (
        (dict(mixup=0.2), {"mixup_prob", "mixup_off_epoch"}, {"mixup_switch"}),
        (dict(mixup=0.2, cutmix=1.0), {"mixup_prob", "mixup_off_epoch", "mixup_switch"}, set()),
        (dict(mask_ratio=(0.0, 0.5)), {"mask_patch"}, set()),
        (dict(schedule="step"), {"milestones"}, {"min_lr", "power"}),
        (dict(schedule="poly"), {"min_lr", "power"}, {"milestones"}),
        (dict(schedule="constant"), set(), {"min_lr", "power", "milestones"}),
        (dict(ema=0.9), {"ema_warmup"}, set()),
        (dict(warmup_epochs=1), {"warmup_lr"}, set()),
        (dict(distill="hard", teacher="test_vit"), {"alpha"}, {"temperature"}),
        (dict(distill="soft", teacher="test_vit"), {"alpha", "temperature"}, set()),
        (dict(auto_augment="rand-m9"), set(), {"color_jitter"}),
        (dict(auto_augment="3a"), {"color_jitter"}, set()),
    ):
        request = ask("scenes:8", changes=changes)
        assert {name for name in fits | idle if refused(request, name, model)} == idle


def test_field_or_option__of_the_model_of_presets_and_what_would_be_ignored():
    for name in names():
        settings_of(Request(recipe=name), None)  # never refused
    of_groups = dict(intra=0.5, inter=-0.5, loss_reading="equations", label_loss="total", reduction="mean")
    of_groups |= dict(intra_direction="mean_to_tokens", inter_target="logit_sum", stop_gradient=False)
    ready(ask("scenes:8", pool="map", pool_args=SMALL_POOL, changes=of_groups))
    ready(ask("scenes:8", changes=dict(drop_rate=0.1, drop_path=0.1)))
    wrong = ask("scenes:8", changes=dict(intra=0.5))
    assert "intra=0.5 is for models with groups of tokens" in refusal(lambda: ready(wrong))
    wrong = ask("scenes:8", pool="gap", changes=dict(drop_rate=0.1))
    said = "drop_rate=0.1 is for classifiers with dropout; --pool gap has none; leave it out"
    assert refusal(lambda: ready(wrong)) == said
    for options, words in (
        (dict(init="x", changes=dict(pretrained=True)), "--init x and pretrained=true are two beginnings"),
        (dict(changes=dict(drop_path=0.1), model_args=dict(drop_path_rate=0.2)), "are the same; give one"),
        (dict(pool="gap", pool_args=dict(groups=4)), "--pool-args groups is for the pool map"),
        (dict(pool="ga", pool_args=dict(tokens=4)), "--pool-args tokens is for the pool map"),
        (dict(pool="map", pool_args=dict(token=4)), "did you mean 'tokens'?"),
        (dict(broadcast="cb", broadcast_args=dict(brunch="mlp")), "did you mean 'branch'?"),
        (dict(broadcast="cb", broadcast_args=dict(model=1)), "--broadcast-args model: there is no such argument"),
        (dict(head="fcos"), "--head is for dense tasks; this is --task classify"),
        (dict(task="detect", recipe=None, root="x"), "--root is for --task classify; this is --task detect"),
        (dict(task="detect", recipe=None, download=True), "--download is for --task classify; this is --task detect"),
    ):
        assert words in refusal(lambda options=options: settings_of(ask("scenes:8", **options), None))
    for option in (dict(root="x"), dict(download=True), dict(split=0.2)):
        assert refusal(lambda option=option: ready(ask("scenes:8", **option)))
    assert {TASKS[head] for head in SMALL_HEADS} == {"detect", "instances", "segment", "keypoints"}
