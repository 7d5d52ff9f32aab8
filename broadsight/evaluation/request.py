"""What a user asks of `eval`."""

from dataclasses import dataclass
from typing import Any

from ..options import (
    ALLOW_OUTSIDE,
    CLASSIFIERS,
    DATASET_ROOT,
    DOWNLOAD,
    RECORD,
    RUN,
    STRICT,
    Machine,
    ModelOptions,
    Part,
    Precise,
    Views,
    option,
)

NAMED_DATA = "DATA that is named"
DATA = "images, as train takes them, an ImageNet set, or a folder of several; none: what the run validated on"
SEED = "of samples and suites; and of scenes and hold-outs, where it is the run's"


@dataclass(frozen=True)
class Request(ModelOptions, Views, Precise, Machine):
    """Evaluate a run: accuracy, calibration and robustness, or AP and mIoU of a dense one; with a report."""

    verb = "evaluate"

    run: Any = option(..., **RUN | dict(help="folder of a run, an exported file, or a timm name"))
    data: str | None = option(None, DATA, positional=True, metavar="DATA")
    suite: tuple[str, ...] = option(
        (),
        "joined by commas: occlusion, fgsm, salient, corruptions, robustness (all four); or what DATA must be: "
        "imagenet, imagenet-real, imagenet-v2, imagenet-a, imagenet-r, imagenet-sketch",
        of=(CLASSIFIERS,),
    )
    beside: tuple[str, ...] = option(
        (), "runs, exported files and timm names beside it, joined by commas; NAME@FILE: its weights", of=(CLASSIFIERS,)
    )
    out: str | None = option(None, "folder for the result; without it a new one in evaluations/", metavar="DIR")
    part: Part = option("auto", "of DATA; auto: what is set apart to validate, or all", of=(NAMED_DATA,))
    split: float | None = option(
        None, "where nothing is: the part that training with this --split held out", of=(NAMED_DATA,)
    )
    samples: int | None = option(None, "so many images, drawn by chance, instead of all", least=1)
    metrics: tuple[str, ...] = option(
        (),
        "figures, joined by commas, that must be there: top1, top5, loss, balanced_accuracy, macro_f1, auroc, ece, "
        "confidence; without it all that can be",
        of=(CLASSIFIERS,),
    )
    bins: int = option(15, "of the calibration error", of=(CLASSIFIERS,), least=1)
    light: bool = option(False, "let a 'map' pool classify with its averaged tokens alone", of=(CLASSIFIERS,))
    saliency: str | None = option(
        None, "of the suite salient: scenes, gradcam, dino, or your own as file.py:function", of=("--suite salient",)
    )
    dino_checkpoint: str | None = option(
        None, "weights of the saliency dino; timm's without", metavar="FILE", of=("--saliency dino",)
    )
    corruptions: tuple[str, ...] = option(
        (), "of the suite corruptions, joined by commas; all fifteen without", of=("--suite corruptions",)
    )
    severities: tuple[int, ...] = option(
        (), "of the suite corruptions, joined by commas; 1,2,3,4,5 without", of=("--suite corruptions",)
    )
    epsilons: tuple[float, ...] = option(
        (), "of the suite fgsm, in 255ths, joined by commas; 1,4,8 without", of=("--suite fgsm",)
    )
    occluded: tuple[float, ...] = option(
        (),
        "of the suite occlusion, parts of the side, joined by commas; 0.25,0.5,0.75 without",
        of=("--suite occlusion",),
    )
    real_labels: str | None = option(
        None, "other labels for imagenet-real than timm's", metavar="FILE", of=(CLASSIFIERS,)
    )
    batch: int | None = option(None, "images per call; 64, or of a dense run 4", least=1)
    seed: int | None = option(None, SEED, of=(NAMED_DATA, "--samples"), least=0)
    strict: bool = option(False, STRICT)
    latency: bool = option(True, "take times", of=(CLASSIFIERS,))
    root: str | None = option(None, DATASET_ROOT, metavar="DIR", of=(CLASSIFIERS,))
    download: bool = option(False, DOWNLOAD, of=(CLASSIFIERS,))
    allow_outside: bool = option(False, ALLOW_OUTSIDE)
    json: str | None = option(None, **RECORD)
