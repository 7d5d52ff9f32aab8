"""What a user asks of `export`."""

from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..options import CLASSIFIERS, MOST, RUN, TIMM_NAMES, ModelOptions, Precise, option

BATCHES = "formats that take several images at once"
TOLERANCE = 1e-3  # of outputs, relative to the largest of them
INT8, WEB = ("--int8",), ("--format web",)
IMAGES = dict(metavar="IMAGES")
PATTERNS = "files, folders and quoted patterns, joined by commas; without it the run's own, or drawn scenes"


@dataclass(frozen=True)
class Request(ModelOptions, Precise):
    """Write a model for another runtime, open it there, compare it with torch on images, and take times."""

    verb = "export"

    run: Any = option(..., **RUN)
    format: str = option("onnx", "onnx, openvino, pt2, executorch (for phones) or web (a page for browsers)")
    out: str | None = option(
        None, "file, or folder of a page; without it NAME with the format's ending, here", metavar="FILE|DIR"
    )
    int8: bool = option(False, "quantise to 8-bit integers, by calibration on images", of=(CLASSIFIERS,))
    data: str | None = option(
        None, "with --int8: labelled images to measure accuracy on; without it what the run validated on", of=INT8
    )
    calibrate: str | None = option(
        None, "with --int8: folder of images to calibrate on; without it the training part of DATA", **IMAGES, of=INT8
    )
    calibration_images: int = option(128, "with --int8: so many of them", of=INT8, least=1)
    max_drop: float = option(
        1.0, "with --int8: points of accuracy that may be lost; layers that lose more stay in float", of=INT8, least=0
    )
    keep_float: tuple[str, ...] = option(
        (), "with --int8: layers to leave in float, joined by commas, such as 'stages.0.*'", of=INT8
    )
    any_size: bool = option(False, "take images of any size, where the model can; slower than a fixed size")
    any_batch: bool = option(True, "take any number of images at once; else one", of=(BATCHES,))
    images: tuple[str, ...] = option((), f"images to compare on: {PATTERNS}", **IMAGES)
    compare: int = option(8, "so many images", least=1)
    tolerance: float = option(TOLERANCE, "largest difference to torch that is let through, over the largest output")
    rounds: int = option(11, "of timing against torch; 0 for none", least=0)
    threads: int = option(1, "of torch and of the runtime while comparing and timing", least=1, most=MOST)
    ort_web: str | None = option(
        None, "with --format web: folder of onnxruntime-web; without it from npm, once", metavar="DIR", of=WEB
    )
    pretrained: bool = option(
        True, "timm's own weights for a timm name that has some; others get random ones, with a note", of=(TIMM_NAMES,)
    )
    light: bool = option(False, "let a 'map' pool classify with its averaged tokens alone", of=(CLASSIFIERS,))
    json: str | None = option(
        None, "print what NAME.export.json says, or write it to FILE too; comes last", metavar="FILE", bare="-"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tolerance > 0:
            raise UsageError(f"--tolerance {self.tolerance}; expected a positive number, such as {TOLERANCE}")
