"""Recipes: strict settings, every published one readable, true to its table, and able to train."""

import json
import re
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path

import pytest
import timm
import torch
import yaml

from broadsight.dense import HEADS
from broadsight.dense.build import USUAL
from broadsight.options import assignments
from broadsight.training import recipes
from broadsight.training.optimisation import make_scheduler
from broadsight.training.recipes import Recipe
from broadsight.training.request import Request
from broadsight.training.settings import settings_of
from tests.refusals import refused

from .small_runs import SMALL_POOL, ask, fill, leave_run, ready, updates

ENTRIES = {name: recipes.find(name) for name in recipes.names()}
RAW = yaml.safe_load((files("broadsight.training") / "recipes.yaml").read_text())


READ = dict(epochs={"10": 10}, lr={"1e-3": 0.001, ".5": 0.5, "2": 2.0}, fit_batch={"true": True, "False": False})
READ |= dict(clip_norm={"none": None, "null": None, "": None, "1": 1.0}, image_size={"None": None}, loss={"bce": "bce"})
READ |= dict(scale=dict.fromkeys(("0.5,1", "0.5, 1", "[0.5, 1.0]"), (0.5, 1.0)), inter={"-0.5": -0.5})
READ |= dict(betas={"0.9,0.95": (0.9, 0.95), "none": None}, optimizer={"sgd": "sgd"}, distill={"none": "none"})
READ |= dict(auto_augment={"rand-m9": "rand-m9", "none": None})


def test_change__reads_text_as_its_field():
    for name, values in READ.items():
        for text, value in values.items():
            found = getattr(Recipe(warmup_epochs=0).change({name: text}), name)
            assert found == value and type(found) is type(value), (name, text)


REFUSED = {
    "a whole number": "epochs=ten epochs=1.5 epochs=none epochs=true",
    "a number": "lr=fast lr=nan lr=inf",
    "a number or none": "clip_norm=tight",
    "a whole number or none": "image_size=big",
    "true or false": "fit_batch=maybe",
    "two numbers, such as 0.08,1": "scale=0.5 scale=1,2,3",
    "one of cosine, constant, step, poly": "schedule=linear",
    "one of bicubic, bilinear, nearest, random or none": "interpolation=cubic",
    "one of auto, fp32, bf16, fp16": "precision=fp8",
    "1 or more": "epochs=0 batch_size=-4 repeated_aug=0",
    "more than 0": "lr=0 temperature=-1 eps=-1 image_size=0",
    "0 or more": "weight_decay=-1 warmup_lr=-1 color_jitter=-1 mixup_off_epoch=-1",
    "between 0 and 1": "smoothing=1.5 ema=2 drop_path=1.5 layer_decay=0 crop_pct=2",
    "less than 1": "smoothing=1",
    "two areas, the smaller first": "scale=1,0.5",
    "two aspects, the smaller first": "ratio=0,1",
    "two shares from 0 to 1, the smaller first": "mask_ratio=0.5,1.5 mask_ratio=-0.1,1 mask_ratio=1,0",
    "at most epochs=300": "warmup_epochs=301",
}
OUT_OF_RANGE = list(REFUSED)[list(REFUSED).index("1 or more") :]
UNKNOWN = {"epocs": "epochs", "warmup": "warmup_lr", "Lr": "lr"}
OF_EACH_OTHER = {
    "accumulate=3": "batch_size=1024 does not divide into accumulate=3 equal passes.*such as batch_size=1023",
    "distill=hard": "distill=hard without a teacher, a timm name or a run folder",
    "teacher=resnet50": "teacher=resnet50 without a distill: hard or soft",
}


def test_change__refuses_or_takes_several():
    for expected, texts in REFUSED.items():
        for text in texts.split():
            (name,) = given = assignments([text])
            value = r"[\d(), .-]+" if expected in OUT_OF_RANGE else given[name]  # as it was read, or as it came
            meant = "(did you mean '.*'[?] )?"
            refused(f"^{name}={value}; {meant}expected {expected}$", Recipe().change, given)
    refused(
        "^loss_reading=equation; did you mean 'equations'[?] expected one",
        Recipe().change,
        {"loss_reading": "equation"},
    )
    for name, meant in UNKNOWN.items():
        refused(f"^unknown recipe field '{name}'; did you mean '{meant}'[?]", Recipe().change, {name: "3"})
    for text, message in OF_EACH_OTHER.items():
        refused(f"^{message}", Recipe().change, assignments([text]))
    recipe = Recipe()
    refused("unknown recipe field 'bananas'", recipe.change, assignments(["lr=1", "bananas=3"]))
    changed = recipe.change(assignments(["lr=1", "epochs=400", "warmup_epochs=350"]))  # valid together alone
    assert (changed.lr, changed.epochs, changed.warmup_epochs) == (1.0, 400, 350.0)
    assert recipe == Recipe()
    for entry in list(ENTRIES.values())[::10]:
        assert recipe.change(json.loads(json.dumps(asdict(entry.recipe)))) == entry.recipe
    long = ENTRIES["stvit-small"].recipe  # fewer epochs than warm up shorten the warm-up
    assert [long.change({"epochs": epochs}).warmup_epochs for epochs in ("2", "20")] == [2, 5]
    words = r"warmup_epochs=3\.0; expected at most epochs=2"
    refused(words, long.change, {"epochs": "2", "warmup_epochs": "3"})
    assert recipe.change({"mask_ratio": "0,1"}).mask_ratio == (0.0, 1.0)
    large = dict(image_size=32, mask_ratio=(0.0, 1.0), mask_patch=64)
    refused("mask_patch=64; expected at most image_size=32", Recipe, **large)


def test_names_and_what_the_docs_say_of_every_field():
    table = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8").partition("## The fields")[2]
    assert {setting.name for setting in fields(Recipe)} <= set(re.findall(r"`(\w+)`", table))
    assert recipes.names() == list(RAW) and len(RAW) >= 117
    refused("unknown recipe 'stvit-smal'; did you mean 'stvit-small'", recipes.find, "stvit-smal")
    teachers = {entry.recipe.teacher for entry in ENTRIES.values()} - {None}
    assert teachers and all(timm.is_model(teacher) for teacher in teachers)


@pytest.mark.parametrize("name", RAW)
def test_entry__is_complete(name):
    entry = ENTRIES[name]
    assert entry.about.strip().endswith(".") and "\n" not in entry.about.strip()
    assert entry.source.strip()
    if entry.model:
        assert timm.is_model(entry.model.split(".")[0])
        assert ("published" in RAW[name] and entry.data) or entry.source.startswith("Ours")
        if "." in entry.model:
            assert entry.model in timm.list_pretrained(entry.model.split(".")[0] + ".*")
    else:
        assert not (entry.published or entry.pool or entry.model_args)
    assert all(0 < figure < 100 for figure in entry.published.values())
    for word in RAW[name]["source"].replace(",", " ").replace(";", " ").rstrip(".").split():
        if word.count("-") and word in RAW:  # "As NAME" refers to another
            assert word != name
    # It inherits settings alone
    chain, settings = [name], {}
    while base := RAW[chain[-1]].get("base"):
        assert base in RAW and base not in chain, f"{chain} goes round in a circle"
        chain.append(base)
    for link in reversed(chain):
        settings |= RAW[link].get("settings", {})
    assert entry.recipe == Recipe().change(settings)
    assert (entry.model, entry.pool, entry.data) == tuple(RAW[name].get(key) for key in ("model", "pool", "data"))


# ---- published figures

# Rows of the MAP paper's tables: backbone and pool, by the recipes that are about them.
BOTH = ("resnet50", "deit-small", "pit-s", "resmlp-24")
MAP_ROWS = {f"{pool}-{name}-paper": (name.replace("-", "_"), pool) for name in BOTH for pool in ("cap", "map")}
MAP_ROWS |= {f"map-convnext-{size}-paper": (f"convnext_{size}", "map") for size in ("tiny", "small")}
MAP_ROWS |= {"map-maxvit-tiny-release": ("maxvit_tiny", "map"), "map-maxvit-small": ("maxvit_small", "map")}
MAP_ROWS |= {"map-mobilenetv1-release": ("mobilenetv1_100", "map"), "gap-resnet50-paper": ("resnet50", "gap")}


@pytest.fixture(scope="module")
def tables() -> dict:
    path = Path(__file__).parents[3] / "shared" / "paper_tables.yaml"
    if not path.exists():
        pytest.skip("paper_tables.yaml is not beside the repository")
    return yaml.safe_load(path.read_text())


def top1(name: str, metric: str = "top1") -> float:
    return round(ENTRIES[name].published[metric], 1)


@pytest.mark.parametrize("family", ["emsnet", "mat", "partialformer"])
def test_published__models_of_one_table(tables, family):
    rows = {row["model"]: row for row in tables[family]["models"]}
    found = {entry.model: name for name, entry in ENTRIES.items() if entry.model in rows and entry.task == "classify"}
    assert found.keys() == rows.keys()
    for model, name in found.items():
        printed = {key: value for key, value in rows[model].items() if key.startswith("top1")}
        assert {key: ENTRIES[name].published[key] for key in printed} == printed


def test_published__rows_of_other_tables(tables):
    rows = {(row["backbone"], row["pool"].split(" ")[0]): row for row in tables["map"]["models"]}
    for name, row in MAP_ROWS.items():
        assert top1(name) == rows[row]["top1"], name
    assert top1("map-resnet50-paper", "top1_light") == rows["resnet50", "map-light"]["top1"]
    for pool in ("vgg", "dft"):
        assert top1(f"{pool}-resnet50-100") == rows["resnet50", pool]["top1_100ep"]
    ablation = tables["map"]["ablation_resnet50_groups_tokens"]
    assert top1("map-resnet50-100") == next(row["top1"] for row in ablation if (row["groups"], row["tokens"]) == (2, 4))
    for row in tables["map"]["scaled_resnet_d"]:
        name = row["model"].replace("_", "-")
        assert (top1(name), top1(f"{name}-320", "top1_320")) == (row["top1_224"], row["top1_320"])
    for row in tables["context_broadcast"]["models"]:
        model, kind = row["model"].split(" + ")
        assert top1(f"{model}_{kind}".replace("_", "-")) == row["top1"]
    for row in tables["stvit"]["models"]:
        assert ENTRIES[row["model"].replace("_", "-")].recipe.drop_path == row["drop_path"]


@pytest.mark.parametrize("family", ["emsnet", "mat", "partialformer", "map"])
def test_published__dense_tables(tables, family):
    of_family = [entry for name, entry in ENTRIES.items() if name.startswith(f"{family}-") and "-100-" not in name]
    found = {(entry.head, entry.model): entry for entry in of_family if "assigner" not in entry.head_args}
    rows = {}
    for row in tables[family]["dense"]:
        model = "resnet50" if row["backbone"] == "map_resnet50" else row["backbone"]
        figures = {key.replace("kp_ap", "keypoint_ap"): row[key] for key in row if key.endswith(("ap", "miou"))}
        rows[row["task"], model] = figures
    assert rows and rows.keys() == {pair for pair in found if pair[0]}
    for pair, figures in rows.items():
        entry = found[pair]
        assert figures.items() <= entry.published.items(), entry.name
        assert all(key.endswith(("ap50", "ap75")) for key in entry.published.keys() - figures.keys())
        assert (entry.neck == "map") == (family == "map")


# ---- dense tasks

DENSE = {name: entry for name, entry in ENTRIES.items() if entry.task != "classify"}
COCO, PERSONS = 117_266, 149_813  # images of train2017 with objects, persons with keypoints


@pytest.mark.parametrize("name", DENSE)
def test_dense_entry__fits_its_head_and_begins_from_a_recipe_of_its_model(name):
    entry, recipe = DENSE[name], DENSE[name].recipe
    if entry.model:
        (start,) = re.findall(r"Begin from what (\S+) gives", entry.source)
        assert ENTRIES[start].task == "classify" and ENTRIES[start].model == entry.model
        assert not entry.pool or (entry.neck == "map" and entry.pool == ENTRIES[start].pool)
    assert HEADS[entry.head or USUAL[entry.task]].task == entry.task
    assert entry.neck in (None, "map") and not entry.cost
    if entry.source.startswith("Ours"):
        assert (recipe.pretrained, recipe.image_size, recipe.fit_batch) == (False, None, True)
        return
    assert recipe.pretrained and recipe.image_size and (entry.head or not entry.model)
    assert entry.data == ("ade20k" if entry.task == "segment" else "coco-2017")
    assert (recipe.schedule == "poly") == (entry.task == "segment") == (recipe.epoch_updates is not None)


def rate(name: str, update: float, updates: int) -> float:
    """Learning rate of a recipe after so many updates, of so many in an epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=ENTRIES[name].recipe.lr)
    make_scheduler(optimizer, ENTRIES[name].recipe, updates).step_update(round(update))
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("name", "images", "steps", "peak"),
    [
        ("mat-4-retinanet-1x", COCO, (8, 11), 1e-4),  # thesis, Table 4.11
        ("emsnet-tiny-mask-rcnn-1x", COCO, (8, 11), 1e-4),
        ("map-resnet50-mask-rcnn-1x", COCO, (8, 11), 1e-4),
        ("mat-1-ssdlite", COCO, (40, 55), 1e-4),
        ("stvit-base-cascade-mask-rcnn-3x", COCO, (27, 33), 1e-4),
        ("partialformer-b1-simple-baseline", PERSONS, (170, 200), 5e-4),
    ],
)
def test_step_recipes__fall_where_they_should_after_500_updates_of_warm_up(name, images, steps, peak):
    updates = images // ENTRIES[name].recipe.batch_size
    assert rate(name, 0, updates) == pytest.approx(peak / 1000)  # printed: 500 (0.001)
    assert rate(name, 250, updates) == pytest.approx(peak / 2, rel=0.01)
    assert rate(name, 498, updates) < peak and rate(name, 502, updates) == pytest.approx(peak)
    for times, step in enumerate(steps):
        assert rate(name, step * updates - 2, updates) == pytest.approx(peak / 10**times)
        assert rate(name, step * updates, updates) == pytest.approx(peak / 10 ** (times + 1))


@pytest.mark.parametrize(
    ("name", "total", "batch", "peak", "half", "warm"),
    [
        ("mat-3-semantic-fpn", 80_000, 16, 2e-4, 0.5**0.9, 0),
        ("partialformer-b3-semantic-fpn", 80_000, 16, 2e-4, 0.5**0.9, 0),
        ("partialformer-b3-upernet", 160_000, 16, 2e-4, 0.5, 1500),
        ("stvit-base-upernet", 160_000, 16, 6e-5, 0.5, 1500),
        ("map-resnet50-semantic-fpn", 40_000, 32, 2e-4, 0.5**0.9, 0),  # supplement; Table 5 counts batches of 16
        ("map-convnext-tiny-upernet", 80_000, 32, 2e-4, 0.5, 1500),
    ],
)
def test_poly_recipes__count_updates(name, total, batch, peak, half, warm):
    recipe = ENTRIES[name].recipe
    updates = recipe.epoch_updates or 0
    assert (recipe.epochs * updates, recipe.batch_size) == (total, batch)
    assert rate(name, total / 2, updates) == pytest.approx(half * peak)
    assert rate(name, total - 1, updates) < 1e-4 * peak
    assert rate(name, warm, updates) == pytest.approx(peak * (1 - warm / total) ** recipe.power)
    if warm:
        assert rate(name, 0, updates) == pytest.approx(peak / 1e6) and rate(name, warm / 2, updates) < 0.51 * peak


def test_dense_recipes__are_as_the_papers_print_them():
    assert {task: ENTRIES[f"{task}-quick"].task for task in USUAL} == {task: task for task in USUAL}
    one = ENTRIES["partialformer-b2-mask-rcnn-1x"].recipe  # thesis, section 5.4.2
    assert (one.epochs, one.batch_size, one.optimizer, one.weight_decay) == (12, 16, "adamw", 0.05)
    assert (one.image_size, one.long_side, one.resize, one.crop) == (800, 1333, (1.0, 1.0), "none")
    assert ENTRIES["emsnet-tiny-retinanet-1x"].recipe.batch_size == 4  # section 3.4.2
    assert ENTRIES["mat-3-ssdlite"].recipe.batch_size == 192  # section 4.6.2
    decays = [ENTRIES[f"{name}-semantic-fpn"].recipe.weight_decay for name in ("mat-5", "partialformer-b3")]
    assert decays == [1e-4, 0.01]  # sections 4.6.2, 5.4.3
    neck = ENTRIES["map-resnet50-mask-rcnn-1x"]  # supplement, section 2.2
    assert (neck.recipe.batch_size, neck.recipe.weight_decay, neck.pool) == (32, 0.1, "map")
    tweaks = {"gap": (38.1, 37.1), "cap": (37.7, 36.6), "cap-tweak": (39.2, 37.7), "map": (40.1, 39.5)}
    for row, figures in tweaks.items():  # supplement, Table 5
        pool, _, tweak = row.partition("-")
        names = (f"{pool}-resnet50-100{'-tweak' if tweak else ''}-{of}" for of in ("mask-rcnn-1x", "semantic-fpn"))
        entries = [ENTRIES[name] for name in names]
        assert [entry.published.get("box_ap", entry.published.get("miou")) for entry in entries] == [*figures]
        assert {entry.neck for entry in entries} == {"map" if tweak or pool == "map" else None}
    many = ENTRIES["stvit-small-mask-rcnn-3x"].recipe  # supplement, section C
    sides = [factor * (many.image_size or 0) for factor in many.resize]
    assert (many.epochs, many.drop_path, sides, many.crop) == (36, 0.1, [480.0, 800.0], "none")
    assert ENTRIES["map-convnext-tiny-cascade-mask-rcnn-3x"].recipe.crop == "detr"  # ConvNeXt's configuration
    assert ENTRIES["stvit-base-mask-rcnn-3x"].recipe.drop_path == 0.3


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("data"), a=6, b=6)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    return str(leave_run(tmp_path_factory.mktemp("teacher") / "run")[0])


def pooled(name: str) -> str | None:
    """The pooling that a recipe's model has: its own, or that of a model of this package."""
    entry = ENTRIES[name]
    own = (entry.model or "").partition("_")[0]
    return entry.pool or (own if own in ("map", "cap") else None)


def trained(data: Path, teacher: str, name: str, **options) -> None:
    """Two updates of a recipe, with nothing changed but what takes long."""
    entry = ENTRIES[name]
    recipe = entry.recipe
    changes = dict(epochs=recipe.epochs, warmup_epochs=recipe.warmup_epochs, fit_batch=False, pretrained=False)
    changes |= dict(precision="fp32") if recipe.precision == "fp16" else {}
    changes |= dict(teacher=teacher) if recipe.teacher else {}
    changes |= dict(eval_size=64) if recipe.eval_size not in (None, recipe.image_size) else {}
    prepared = ready(ask(data, recipe=name, changes=changes, **options))
    engine = prepared.engine
    before = {key: value.clone() for key, value in engine.plain.named_parameters()}
    first = engine.optimizer.param_groups[0]["lr"]
    losses = updates(prepared, 2)
    assert len(losses) == 2 and torch.tensor(losses).isfinite().all()
    after = dict(engine.plain.named_parameters())
    assert all(value.isfinite().all() for value in after.values())
    assert any(not torch.equal(before[key], after[key]) for key in after)
    expected = first if recipe.schedule == "constant" and not recipe.warmup_epochs else None
    rate = engine.optimizer.param_groups[0]["lr"]
    assert rate == expected if expected is not None else rate != first
    stays = {"batch_size", "image_size", "eval_size", *changes}
    for setting in fields(Recipe):
        if setting.name not in stays:
            assert getattr(engine.recipe, setting.name) == getattr(recipe, setting.name), setting.name
    if engine.average is not None:
        averaged = dict(engine.average.module.named_parameters())
        assert any(not torch.equal(averaged[key], after[key]) for key in after)


DIFFERENT: dict[tuple, list[str]] = {}
for _name in (name for name in recipes.names() if ENTRIES[name].task == "classify"):
    DIFFERENT.setdefault((ENTRIES[_name].recipe, pooled(_name)), []).append(_name)


@pytest.mark.parametrize("names", DIFFERENT.values(), ids=lambda names: f"{names[0]}+{len(names) - 1}")
def test_every_recipe__trains_a_tiny_model(data, teacher, names):
    """Recipes that differ in nothing but the model share a run."""
    pool = pooled(names[0])
    small = SMALL_POOL if pool in ("map", "cap") else {}
    small = {"heads": 1} if pool == "cap" else small
    trained(data, teacher, names[0], model="test_resnet", pool=pool, pool_args=small)


@pytest.mark.parametrize("name", ["segment-80k", "detect-3x-ms", "pose-210"])
def test_dense_recipe__trains_a_tiny_model(teacher, name):
    trained(Path("scenes:24"), teacher, name, model="test_resnet")


OWN = ["emsnet-xxtiny", "mat-1", "partialformer-b0", "stvit-small", "vit-tiny-cb", "map-mobilenetv1-release"]
OWN += [pytest.param(name, marks=pytest.mark.slow) for name in ("pvt-v2-b0-cb", "deit-tiny-distilled-cb")]


@pytest.mark.parametrize("name", OWN)
def test_recipe__trains_its_own_model(data, teacher, name):
    trained(data, teacher, name, model=None)


@pytest.mark.parametrize("name", ["map-resnet50d-distilled", "gap-deit-small-paper", "map-resnet50-cifar10"])
def test_recipe__brings_model_arguments_and_pool(name):
    settings, _ = settings_of(Request(recipe=name), None)
    entry = ENTRIES[name]
    assert (settings["model"], settings["model_args"]) == (entry.model, entry.model_args)
    assert settings["pool"] == entry.pool
    other, _ = settings_of(Request(recipe=name, model="test_resnet"), None)
    assert (other["model"], other["model_args"], other["pool"]) == ("test_resnet", {}, None)
