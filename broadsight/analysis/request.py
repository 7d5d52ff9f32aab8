"""What a user asks of `analyze`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..options import (
    ALLOW_OUTSIDE,
    DATASET_ROOT,
    DOWNLOAD,
    MOST,
    RECORD,
    STRICT,
    TIMM_NAMES,
    Machine,
    ModelOptions,
    Part,
    option,
    value_of,
)

SHOWN = "models that are shown images"


def measure_option(text: Any) -> Any:
    """What an option of a measure means: a number, a word, or several joined by commas."""
    if isinstance(text, str) and "," in text and not text.lstrip().startswith(("[", "{")):
        return tuple(value_of(part.strip()) for part in text.split(",") if part.strip())
    value = value_of(text)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Request(ModelOptions, Machine):
    """Measure what models do inside: the papers' figures, as PNG, SVG and numbers."""

    verb = "analyze"

    measure: str | None = option(
        None, "what to measure; list, or nothing, shows what there is", positional=True, metavar="MEASURE"
    )
    models: tuple[Any, ...] = option(
        (),
        "folders of runs and timm names, all measured on the same images; NAME@FILE brings its weights",
        positional=True,
        metavar="MODEL|RUN",
    )
    data: str | None = option(
        None,
        "images, as eval takes them, or any folder of them where no labels are needed; none: what the run "
        "validated on, or else scenes",
        metavar="DATA",
    )
    samples: int | None = option(
        None, "so many images, drawn by chance; without it what the measure takes", of=(SHOWN,), least=1
    )
    part: Part = option("auto", "of DATA; auto: what is set apart to validate, or all", of=(SHOWN,))
    set: Mapping[str, Any] = option(
        dict, "options of the measure, which list names, such as pairs=8", metavar="KEY=VALUE", read=measure_option
    )
    out: str | None = option(None, "folder for the result; without it a new one in analyses/", metavar="DIR")
    plot: str | None = option(None, "a further file for the figure: png, svg or pdf", metavar="FILE")
    batch: int | None = option(None, "images per call; without it what suits the measure", of=(SHOWN,), least=1)
    workers: int | None = option(None, "processes that prepare images", of=(SHOWN,), least=0, most=MOST)
    seed: int | None = option(
        None,
        "of samples, random weights and what a measure draws; and of scenes, where it is the run's",
        of=(SHOWN, TIMM_NAMES),
        least=0,
    )
    strict: bool = option(False, STRICT, of=(SHOWN,))
    root: str | None = option(None, DATASET_ROOT, metavar="DIR", of=(SHOWN,))
    download: bool = option(False, DOWNLOAD, of=(SHOWN,))
    allow_outside: bool = option(False, ALLOW_OUTSIDE)
    json: str | None = option(None, **RECORD)
