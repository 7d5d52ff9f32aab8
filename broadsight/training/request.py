"""What a user asks of `train` and `recipes`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .. import options
from ..errors import UsageError
from ..options import ALLOW_OUTSIDE, DATASET_ROOT, DOWNLOAD, HEADS, NECKS, STRICT, Machine, Options, arguments, option

DENSE, CLASSIFY = ("dense tasks",), ("--task classify",)
# What is said of options in more words than a line of the fields below has room for
DATA = "images in a folder, tar or shards, COCO .json, images/ and masks/, timm dataset; none: built-in scenes"
TASKS = "classify, detect, instances, segment or keypoints"
RECIPE = "named settings, see docs/recipes.md; without it quick, or finetune if weights are given"
TWIN = "train the same model with this pooling too, in DIR/twin-POOL, and compare"
# Options that are short for fields of the recipe, by these.
SHORT = dict(image_size="size", batch_size="batch", epochs="epochs", lr="lr", pretrained="pretrained")
SHORT |= dict(compile="compile", precision="precision")


@dataclass(frozen=True)
class Request(Machine):
    """Train a classifier, detector, segmenter or pose model on images of your own or on drawn ones.

    What is None is left to the recipe, the data, the model or the run that is continued.
    """

    verb = "train"

    data: str | None = option(None, DATA, positional=True, metavar="DATA")
    model: str | None = option(None, "timm name; without it the recipe's, or a small one")
    pool: str | None = option(None, "another pooling: gap, cap, ga, map, vgg, dft")
    broadcast: str | None = option(None, "context broadcasting: cb, scaled, gate, hybrid")
    task: str | None = option(None, f"what is learned: {TASKS}; without it the recipe's")
    head: str | None = option(None, f"of dense tasks: {HEADS}", of=DENSE)
    neck: str | None = option(None, f"of dense tasks: {NECKS}", of=DENSE)
    recipe: str | None = option(None, RECIPE)
    set: Mapping[str, Any] = option(dict, "fields of the recipe, such as epochs=10 lr=1e-3", metavar="KEY=VALUE")
    out: str | None = option(None, "folder of the run; without it a new one in runs/", metavar="DIR")
    resume: bool = option(False, "continue the run in --out to the same result as if it had never stopped")
    epochs: int | None = option(None, "passes over the data; short for --set epochs=", least=1)
    size: int | None = option(None, "image side in pixels; short for --set image_size=", least=1)
    batch: int | None = option(None, "images of an update, over all processes; short for --set batch_size=", least=1)
    lr: float | None = option(None, "learning rate; short for --set lr=")
    pretrained: bool = option(False, "begin from timm's weights; short for --set pretrained=true")
    precision: options.Precision | None = option(None, f"{options.PRECISION}; short for --set precision=")
    compile: bool = option(False, "torch.compile the model; short for --set compile=true")
    init: str | None = option(None, "run folder or file of weights to begin from", metavar="RUN|FILE")
    val: str | None = option(None, "images to validate on, where DATA sets none apart", metavar="DATA")
    split: float | None = option(None, "part of every class to hold out for validation instead")
    strict: bool = option(False, STRICT)
    root: str | None = option(None, DATASET_ROOT, metavar="DIR", of=CLASSIFY)
    download: bool = option(False, DOWNLOAD, of=CLASSIFY)
    allow_outside: bool = option(False, ALLOW_OUTSIDE)
    model_args: Mapping[str, Any] = arguments("model, such as in_chans=1")
    pool_args: Mapping[str, Any] = arguments("pooling, such as groups=4 dim=192")
    broadcast_args: Mapping[str, Any] = arguments("broadcasting, such as branch=both")
    head_args: Mapping[str, Any] = arguments("head, such as assigner=atss", of=DENSE)
    neck_args: Mapping[str, Any] = arguments("neck tokens, such as dim=256 tokens=8", of=DENSE)
    twin: str | None = option(None, TWIN, metavar="POOL")
    seed: int | None = option(None, "of everything random; 0 without it", least=0)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to train")
    processes: int | None = option(None, "refuse to start unless torchrun has started so many", least=1)
    log_every: int | None = option(None, "updates between lines of metrics.jsonl; 10 without it", least=1)
    checkpoint_minutes: float = option(10.0, "between checkpoints within an epoch; one follows every epoch", least=0)
    report: bool = option(True, "evaluate the best model at the end and write report.html")
    plain: bool = option(False, "plain lines instead of a live display")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self._short().items():
            if name in self.set:
                twice = f"{name} given twice, as {value} and by --set {name}={self.set[name]}"
                raise UsageError(f"{twice}; expected one of them")

    def _short(self) -> dict[str, Any]:
        given = {field: getattr(self, name) for field, name in SHORT.items()}
        return {field: value for field, value in given.items() if value not in (None, False)}

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the recipe that are asked for, as texts or values."""
        return {**self.set, **self._short()}


@dataclass(frozen=True)
class RecipesRequest(Options):
    """List recipes: what each is for, what it costs to compute, what its paper reports."""

    verb = "recipes"

    pattern: str | None = option(None, "name or wildcard such as 'stvit-*'", positional=True, metavar="PATTERN")
    json: bool = option(False, "print JSON, with all settings")
