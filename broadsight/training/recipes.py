"""How a model is trained, as data: the settings and the published recipes in `recipes.yaml`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

import yaml
from jsonargparse import ArgumentParser

from ..errors import did_you_mean, refuse_idle, unknown
from ..options import Precision
from ..visual.metrics import GOALS, label

CLASSIFY = "--task classify"
MIXING, BOTH_MIXINGS = "mixup or cutmix above 0", "mixup and cutmix together"
MASKING = "mask_ratio above 0"
# What only a model says, once it is there.
GROUPS, DROPOUT = "models with groups of tokens, such as those under --pool map", "classifiers with dropout"
DEPTH = "models with stochastic depth"

# What values fields may have, in words and as a check. A field whose type allows None may always have that.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("1 or more", lambda value: value >= 1, "epochs batch_size accumulate repeated_aug mask_patch"),
    ("more than 0", lambda value: value > 0, "lr temperature power eps clip_norm image_size eval_size long_side"),
    ("more than 0", lambda value: value > 0, "epoch_updates"),
    ("0 or more", lambda value: value >= 0, "warmup_epochs cooldown_epochs weight_decay mixup cutmix patience min_lr"),
    ("0 or more", lambda value: value >= 0, "warmup_lr color_jitter mixup_off_epoch rotation"),
    ("between 0 and 1", lambda value: 0 <= value <= 1, "hflip erasing mixup_prob mixup_switch smoothing alpha ema"),
    ("between 0 and 1", lambda value: 0 <= value <= 1, "drop_path drop_rate"),
    ("between 0 and 1", lambda value: 0 < value <= 1, "layer_decay crop_pct"),
    ("less than 1", lambda value: value < 1, "smoothing"),
    ("two areas, the smaller first", lambda value: 0 < value[0] <= value[1], "scale"),
    ("two aspects, the smaller first", lambda value: 0 < value[0] <= value[1], "ratio"),
    ("two shares from 0 to 1, the smaller first", lambda value: 0 <= value[0] <= value[1] <= 1, "mask_ratio"),
    ("two factors, the smaller first", lambda value: 0 < value[0] <= value[1], "resize"),
    ("two parts of the epochs, the earlier first", lambda value: 0 < value[0] <= value[1] <= 1, "milestones"),
)


def _of(default: Any, *of: str) -> Any:
    """A field that only counts for some of these; elsewhere it is refused, not ignored, by `refuse_ignored`."""
    return field(default=default, metadata={"of": of})


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run, as timm's factories take them where they have the name; see docs/recipes.md.

    A None that is not explained is the own value of the data, the model or the optimiser.
    """

    epochs: int = 300  # passes over the data, or of `epoch_updates`
    warmup_epochs: float = 5  # the first of them
    cooldown_epochs: int = 0  # that follow, at the lowest learning rate
    epoch_updates: int | None = None  # updates of an epoch; None: as many as a pass over the data has
    batch_size: int = 1024  # images of an update, over all processes and accumulated passes
    accumulate: int = 1  # passes that an update is divided into
    fit_batch: bool = _of(False, "batches that nobody has asked for")  # a smaller batch for few images
    optimizer: str = "adamw"
    lr: float = 1e-3
    min_lr: float = _of(1e-6, "schedule=cosine", "schedule=poly")
    warmup_lr: float = _of(1e-6, "warmup_epochs above 0")
    weight_decay: float = 0.05
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    schedule: Literal["cosine", "constant", "step", "poly"] = "cosine"
    milestones: tuple[float, float] = _of((8 / 12, 11 / 12), "schedule=step")  # parts of the epochs; then a tenth
    power: float = _of(0.9, "schedule=poly")
    layer_decay: float | None = _of(None, CLASSIFY)  # of the rate from each layer to the one below; None: one rate
    clip_norm: float | None = None  # None: gradients of any norm
    image_size: int | None = 224  # detectors: the shorter side; pose models: the height of a person's image
    eval_size: int | None = _of(None, "models of whole images")  # None: as in training
    long_side: int | None = _of(None, "heads that take any shape")  # at most; None: any
    resize: tuple[float, float] = _of((1.0, 1.0), "dense tasks")  # factors; (0.5, 2.0) trains at many scales
    crop: Literal["none", "random", "detr", "iou"] = _of("none", "heads that find objects")  # as DETR or SSD does
    rotation: float = _of(0.0, "the head simple_baseline")  # degrees at most
    crop_pct: float | None = _of(None, CLASSIFY)
    interpolation: Literal["bicubic", "bilinear", "nearest", "random"] | None = _of(None, CLASSIFY)
    scale: tuple[float, float] = _of((0.08, 1.0), CLASSIFY)
    ratio: tuple[float, float] = _of((3 / 4, 4 / 3), CLASSIFY)
    hflip: float = 0.5
    color_jitter: float = _of(0.4, "images whose colours nothing else decides")
    auto_augment: str | None = _of(None, CLASSIFY)  # such as "rand-m9-mstd0.5-inc1"; None: none
    erasing: float = _of(0.0, CLASSIFY)
    mask_ratio: tuple[float, float] = _of((0.0, 0.0), CLASSIFY)  # least and greatest share of patches that are hidden
    mask_patch: int = _of(14, MASKING)  # pixels of a patch's side
    mixup: float = _of(0.0, CLASSIFY)
    cutmix: float = _of(0.0, CLASSIFY)
    mixup_prob: float = _of(1.0, MIXING)
    mixup_switch: float = _of(0.5, BOTH_MIXINGS)  # how often cutmix
    mixup_off_epoch: int = _of(0, MIXING)  # from which on nothing is mixed; 0: never
    smoothing: float = _of(0.0, CLASSIFY)
    repeated_aug: int = _of(1, CLASSIFY)  # times that an image comes in an epoch, which keeps its length
    drop_path: float | None = _of(None, DEPTH)
    drop_rate: float | None = _of(None, DROPOUT)
    loss: Literal["ce", "bce"] = _of("ce", CLASSIFY)
    intra: float = _of(1.0, GROUPS)
    inter: float = _of(-0.8, GROUPS)
    loss_reading: Literal["fitted", "equations"] = _of("fitted", GROUPS)  # as released, or as printed; or each singly:
    label_loss: Literal["groups", "total", "sum"] | None = _of(None, GROUPS)
    intra_direction: Literal["tokens_to_mean", "mean_to_tokens"] | None = _of(None, GROUPS)
    inter_target: Literal["logit_mean", "probability_mean", "logit_sum"] | None = _of(None, GROUPS)
    reduction: Literal["mean", "batchmean"] | None = _of(None, GROUPS)
    stop_gradient: bool | None = _of(None, GROUPS)
    distill: Literal["none", "hard", "soft"] = _of("none", CLASSIFY)
    teacher: str | None = _of(None, CLASSIFY)  # a timm name or a run folder
    alpha: float = _of(0.5, "distill=hard", "distill=soft")  # the teacher's share of the loss
    temperature: float = _of(3.0, "distill=soft")
    ema: float = 0.0  # decay of the averaged weights, which are evaluated and kept then; 0: none
    ema_warmup: bool = _of(False, "ema above 0")
    precision: Precision = "fp32"  # a run's own says which "auto" was
    channels_last: bool = False
    compile: bool = False
    sync_bn: bool = False
    frozen_stats: bool = False  # the model stays in eval mode while it learns
    pretrained: bool = False
    patience: int = 0  # epochs without improvement after which training ends; 0: never

    def __post_init__(self) -> None:
        warm_up = (f"at most epochs={self.epochs}", lambda value: value <= self.epochs, "warmup_epochs")
        side = (any(self.mask_ratio) and self.image_size) or float("inf")
        patch = (f"at most image_size={side}", lambda value: value <= side, "mask_patch")
        for expected, fits, which in (*RANGES, warm_up, patch):
            for name in which.split():
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise ValueError(f"{name}={value}; expected {expected}")
        if self.batch_size % self.accumulate:
            what = f"batch_size={self.batch_size} does not divide into accumulate={self.accumulate} equal passes"
            multiple = self.accumulate * max(1, self.batch_size // self.accumulate)
            raise ValueError(f"{what}; take a multiple, such as batch_size={multiple}")
        if (self.distill == "none") != (self.teacher is None):
            given = f"distill={self.distill}" if self.teacher is None else f"teacher={self.teacher}"
            missing = "teacher, a timm name or a run folder" if self.teacher is None else "distill: hard or soft"
            raise ValueError(f"{given} without a {missing}")

    def change(self, values: Mapping[str, Any]) -> "Recipe":
        """The recipe with other values, which may be texts; fewer epochs than warm up shorten the warm-up."""
        known = [setting.name for setting in fields(self)]
        if strange := [name for name in values if name not in known]:
            raise unknown("recipe field", strange[0], known)
        typed = {name: _typed(name, value) for name, value in values.items()}
        if "epochs" in typed and "warmup_epochs" not in typed:  # a short trial of a long recipe
            typed["warmup_epochs"] = min(self.warmup_epochs, typed["epochs"])
        return replace(self, **typed)


def refuse_ignored(
    given: Mapping[str, Any], recipe: Recipe, task: str, head: str | None, of_model: Mapping[str, str | None]
) -> None:
    """Refuse fields that the user has `given` and that have no effect; `of_model` says why, where only a model can."""
    from ..dense.heads import HEADS  # here, since torch is not needed to list recipes

    kind = HEADS.get(str(head))
    here, classify, pose = f"this is --task {task}", task == "classify", kind is not None and kind.top_down
    by_head = f"the head is {head}" if head else here
    policy = recipe.auto_augment if classify and "3a" not in (recipe.auto_augment or "") else None
    asked_for = recipe.fit_batch and "batch_size" in given
    alone = here if not classify else "nothing is mixed so"
    untaught = here if not classify else f"this has distill={recipe.distill}"
    rows: list[tuple[str, Any, str]] = [(name, classify, here) for name in (CLASSIFY, GROUPS, DROPOUT)]
    rows += [
        (DEPTH, True, here),
        (MIXING, classify and (recipe.mixup or recipe.cutmix), alone),
        (BOTH_MIXINGS, classify and recipe.mixup and recipe.cutmix, alone),
        (MASKING, classify and any(recipe.mask_ratio), here if not classify else "nothing is hidden"),
        ("dense tasks", not classify, here),
        ("heads that find objects", task not in ("classify", "segment") and not pose, by_head),
        ("heads that take any shape", not classify and not pose and not (kind and kind.square), by_head),
        ("the head simple_baseline", pose, by_head),
        ("models of whole images", not pose, f"{head} takes crops of image_size alone"),
        ("images whose colours nothing else decides", not pose and not policy, f"auto_augment={policy}, {by_head}"),
        ("warmup_epochs above 0", recipe.warmup_epochs, "there are none"),
        ("ema above 0", recipe.ema, "no weights are averaged"),
        ("batches that nobody has asked for", not asked_for, f"batch_size={recipe.batch_size} is set"),
    ]
    rows += [(f"distill={kind}", classify and kind == recipe.distill, untaught) for kind in ("hard", "soft")]
    scheduled = f"this has schedule={recipe.schedule}"
    rows += [(f"schedule={kind}", kind == recipe.schedule, scheduled) for kind in ("cosine", "step", "poly")]
    facts = {fact: of_model.get(fact) if holds else why for fact, holds, why in rows}
    needs = {setting.name: setting.metadata.get("of", ()) for setting in fields(Recipe)}
    refuse_idle({name: f"{name}={value}" for name, value in given.items()}, needs, facts)


@dataclass(frozen=True)
class Entry:
    """A named recipe, and what its paper says of it; `recipes.yaml` explains the fields."""

    name: str
    about: str
    source: str
    recipe: Recipe  # with what it inherits
    task: str = "classify"
    head: str | None = None
    head_args: Mapping[str, Any] = field(default_factory=dict)
    neck: str | None = None
    neck_args: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    pool: str | None = None
    pool_args: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    cost: str | None = None
    published: Mapping[str, float] = field(default_factory=dict)

    def reported(self) -> str | None:
        """The paper's figure in words, such as "83.6 % top-1"; of instances both boxes and masks."""
        figures = {name.removesuffix("_320"): value for name, value in self.published.items()}
        goals = [name for name in figures if name in GOALS.values()]
        return ", ".join(f"{figures[name]} % {label(name)}" for name in goals) or None


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((files("broadsight.training") / "recipes.yaml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """All recipes, as the file orders them."""
    return list(_entries())


@cache
def find(name: str) -> Entry:
    """A recipe by name, with the settings that it inherits; a ValueError names the nearest if there is none."""
    if name not in _entries():
        hint = did_you_mean(name, names(), alike=0)
        raise ValueError(f"unknown recipe {name!r}; {hint}docs/recipes.md lists all of them")
    entry = dict(_entries()[name])
    base, settings = entry.pop("base", None), entry.pop("settings", {})
    recipe = find(base).recipe if base else Recipe()
    return Entry(name=name, recipe=recipe.change(settings), **entry)


def _typed(name: str, value: Any) -> Any:
    """A value as its field has it; text and YAML's values alike."""
    kind: Any = next(setting.type for setting in fields(Recipe) if setting.name == name)
    nothing = value is None or (isinstance(value, str) and value.lower() in ("none", "null", ""))
    if nothing and type(None) in get_args(kind):
        return None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    pair = "tuple" in str(kind) and isinstance(value, str) and "[" not in value
    try:
        parsed = parser.parse_object({"value": f"[{value}]" if pair else value}).value  # 0.5,1 as well as [0.5, 1]
    except Exception:
        meant = did_you_mean(value, _choices(kind), alike=0.6)
        raise ValueError(f"{name}={value}; {meant}expected {_words(kind)}") from None
    return tuple(parsed) if isinstance(parsed, list) else parsed


def _choices(kind: Any) -> list[str]:
    """The words that a type allows."""
    found = [choice for part in (kind, *get_args(kind)) for choice in get_args(part) if isinstance(choice, str)]
    return list(dict.fromkeys(found))


def _words(kind: Any) -> str:
    """A type, for people."""
    if choices := _choices(kind):
        return "one of " + ", ".join(choices) + (" or none" if type(None) in get_args(kind) else "")
    if "tuple" in str(kind):
        return "two numbers, such as 0.08,1"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    return " or ".join(plain[part] for part in get_args(kind) or (kind,))
