"""What a user asks of `bench`."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError
from ..options import MOST, Options, option

EXPORTS = "exported runtimes (--runtime onnx and others)"
SEVERAL_SIZES = "several sizes (--size 224,448)"
OWN_SIZE = "models that bring no size of their own (NAME@256)"
WHOLE_MODELS = "whole models"


def _sizes(given: Any) -> list[str]:
    words = given.split(",") if isinstance(given, str) else given
    found = [str(word).strip() for word in (words if isinstance(words, (list, tuple)) else [words])]
    if not all(re.fullmatch(r"\d+(?:x\d+)?", one) for one in found):
        expected = "expected pixels such as 224 or, height first, 224x320; several by commas"
        raise UsageError(f"--size {','.join(found)}; {expected}")
    return found


@dataclass(frozen=True)
class Request(Options):
    """Time models side by side: latency, throughput, memory, share of the machine's peak; start-up and file size."""

    verb = "bench"

    models: tuple[str, ...] = option(
        ...,
        "timm models, names or wildcards, NAME@256 for another size; the first is the yardstick",
        positional=True,
        metavar="MODEL",
    )
    pool: tuple[str, ...] = option(
        (), "run every model under each of these, comma-separated: gap, cap, ga, map, map-light, vgg, dft"
    )
    broadcast: tuple[str, ...] = option(
        (), "run every model with each of these, joined by commas: none, cb, scaled, gate, hybrid", of=(WHOLE_MODELS,)
    )
    head_only: bool = option(False, "only the pooling on feature maps of the right shapes, without the backbone")
    light: bool = option(False, "let 'map' pools classify with their averaged tokens alone")
    against: str | None = option(
        None,
        "with --head-only: yardstick is the class PerGroupPool of this Python file, on the same weights",
        metavar="FILE",
    )
    runtime: tuple[str, ...] = option(
        ("eager",), "by commas: eager, compile, onnx, int8 (of onnx), openvino, openvino-int8, pt2, executorch"
    )
    start_up: bool = option(
        True, "with an exported runtime: also time the start of every candidate in a process of its own", of=(EXPORTS,)
    )
    artefacts: str | None = option(
        None, "keep what is exported in this folder, and use it again", metavar="FOLDER", of=(EXPORTS,)
    )
    batch: int = option(8, "images per call", least=1)
    threads: int = option(1, "threads of operators, in every runtime", least=1, most=MOST)
    size: tuple[str, ...] = option(
        ("224",),
        "image side in pixels, or HEIGHTxWIDTH; several joined by commas show how costs grow",
        of=(OWN_SIZE,),
        read=_sizes,
    )
    growth_from: int = option(
        512,
        "with several sizes: growth exponents are of those with at least the pixels of this side squared",
        of=(SEVERAL_SIZES,),
        least=1,
    )
    rounds: int = option(9, "timed calls of each candidate", least=1)
    warmup: int = option(2, "calls of each candidate before those", least=0)
    train: bool = option(False, "time forward and backward in train mode")
    fuse: bool = option(False, "fold what inference allows first, as `broadsight.fuse` does")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "of weights and images")
    device: str = option("cpu", "cpu or cuda")
    channels_last: bool = option(False, "channels-last memory format")
    seed: int = option(0, "of weights and images", least=0)
    json: str | None = option(
        None, "print JSON, not a table, or write it to FILE; comes last", metavar="FILE", bare="-"
    )
    plot: str | None = option(None, "draw the result into a png, svg or pdf file", metavar="FILE")
    scatter: str | None = option(None, "draw published top-1 against latency into such a file", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scatter and len(self.size) > 1:
            raise UsageError("--scatter with several sizes; accuracy is published for one: drop one of the two")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths in pixels."""
        sides = [one.split("x") for one in self.size]
        return [(int(side[0]), int(side[-1])) for side in sides]
