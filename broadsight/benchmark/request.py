"""What a user asks of `bench`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..options import CLASSIFIERS, HEADS, MOST, NECKS, PRECISION, Options, Precision, arguments, option

EXPORTS = "exported runtimes (--runtime onnx and others)"
SEVERAL_SIZES = "several sizes (--size 224,448)"
OWN_SIZE = "models that bring no size of their own (NAME@256)"
WHOLE_MODELS = "whole models"
POOLED, BROADCAST = "other pools (--pool map and others)", "context broadcasting (--broadcast cb and others)"
DENSE, NECK = "dense models (--head retinanet and others)", "necks (--neck tokens)"


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
        "timm models, names or wildcards; NAME:key=value,key=value@256 has arguments and another size; the first is "
        "the yardstick",
        positional=True,
        metavar="MODEL",
    )
    pool: tuple[str, ...] = option(
        (),
        "run every model under each of these, comma-separated: gap, cap, ga, map, map-light, vgg, dft",
        of=(CLASSIFIERS,),
    )
    broadcast: tuple[str, ...] = option(
        (), "run every model with each of these, joined by commas: none, cb, scaled, gate, hybrid", of=(WHOLE_MODELS,)
    )
    head: str | None = option(None, f"time dense models on these backbones, images to predictions: {HEADS}")
    neck: tuple[str, ...] = option((), f"run every dense model with each of these, by commas: {NECKS}", of=(DENSE,))
    model_args: Mapping[str, Any] = arguments("models, each of those that it has")
    pool_args: Mapping[str, Any] = arguments("pools, such as groups=4, each of those that it has", of=(POOLED,))
    broadcast_args: Mapping[str, Any] = arguments("broadcasting, such as branch=both", of=(BROADCAST,))
    head_args: Mapping[str, Any] = arguments("head, such as box_score_thresh=0", of=(DENSE,))
    neck_args: Mapping[str, Any] = arguments("neck tokens, such as dim=256 tokens=8", of=(NECK,))
    head_only: bool = option(
        False, "only the pooling on feature maps of the right shapes, without the backbone", of=(CLASSIFIERS,)
    )
    light: bool = option(False, "let 'map' pools classify with their averaged tokens alone", of=(CLASSIFIERS,))
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
        "image side in pixels, or HEIGHTxWIDTH, such as 800x1280 for papers' 1280 x 800; several joined by commas show "
        "how costs grow",
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
    precision: tuple[Precision, ...] = option(("fp32",), f"by commas, each runtime in those it has: {PRECISION}")
    device: str = option("cpu", "cpu or cuda")
    channels_last: bool = option(False, "channels-last memory format")
    seed: int = option(0, "of weights and images", least=0)
    json: str | None = option(
        None, "print JSON, not a table, or write it to FILE; comes last", metavar="FILE", bare="-"
    )
    plot: str | None = option(None, "draw the result into a png, svg or pdf file", metavar="FILE")
    scatter: str | None = option(
        None, "draw published top-1 against latency into such a file", metavar="FILE", of=(CLASSIFIERS,)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scatter and len(self.size) > 1:
            raise UsageError("--scatter with several sizes; accuracy is published for one: drop one of the two")

    def facts(self, exported: bool) -> dict[str, str | None]:
        """What options are for: None where it holds, or why it does not; `exported`: whether a runtime runs files."""
        return {
            EXPORTS: None if exported else f"this is --runtime {','.join(self.runtime)}",
            SEVERAL_SIZES: None if len(self.sizes) > 1 else f"this has one, {self.size[0]}",
            OWN_SIZE: "all do" if all("@" in model for model in self.models) else None,
            WHOLE_MODELS: "--head-only runs the pool alone" if self.head_only else None,
            CLASSIFIERS: None if self.head is None else f"--head {self.head} is dense",
            DENSE: "this has classifiers" if self.head is None else None,
            POOLED: None if self.pool else "this has none",
            BROADCAST: None if set(self.broadcast) - {"none"} else "this has none",
            NECK: None if "tokens" in self.neck else "this has none",
        }

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths in pixels."""
        sides = [one.split("x") for one in self.size]
        return [(int(side[0]), int(side[-1])) for side in sides]
