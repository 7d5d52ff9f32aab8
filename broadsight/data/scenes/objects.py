"""The objects that scenes are made of: the outlines of their parts, and where their keypoints are."""

import math
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from PIL import Image, ImageDraw

KEYPOINTS = ("centre", "face", "top", "bottom", "left", "right")
KEYPOINT_PAIRS = ((4, 5),)  # these change places when an image is mirrored; the others keep theirs

Outline = list[tuple[float, float]]


def ellipse(x: float, y: float, rx: float, ry: float, degrees: float = 0.0, points: int = 14) -> Outline:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    angles = [2 * math.pi * step / points for step in range(points)]
    flat = [(rx * math.cos(angle), ry * math.sin(angle)) for angle in angles]
    return [(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in flat]


def limb(x0: float, y0: float, x1: float, y1: float, start: float, end: float) -> Outline:
    """A straight limb that is `start` wide at its one end and `end` at the other."""
    length = math.hypot(x1 - x0, y1 - y0)
    u, v = (y0 - y1) / length / 2, (x1 - x0) / length / 2
    corners = (x0, y0, start), (x1, y1, end), (x1, y1, -end), (x0, y0, -start)
    return [(x + u * half, y + v * half) for x, y, half in corners]


def outlines_of(shapes: list[dict]) -> list[Outline]:
    """The outlines of a part, as `objects.yaml` describes them; on the other side come after all on this one."""
    makers = {"corners": lambda *corners: list(map(tuple, corners)), "ellipse": ellipse, "limb": limb}
    makers["symmetric"] = lambda *half: [*map(tuple, half), *((-x, y) for x, y in reversed(half) if x)]
    made = [makers[kind](*shape[kind]) for shape in shapes for kind in makers.keys() & shape]
    mirrored = [outline for outline, shape in zip(made, shapes, strict=True) if shape.get("both")]
    return made + [[(-x, y) for x, y in outline] for outline in mirrored]


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast where it is built
_TABLE = yaml.load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), _LOADER)
SHAPES: dict[str, dict[str, list[Outline]]] = {
    name: {part: outlines_of(shapes) for part, shapes in entry["parts"].items()} for name, entry in _TABLE.items()
}
POINTS: dict[str, dict[str, tuple[float, float, str]]] = {name: entry["keypoints"] for name, entry in _TABLE.items()}
CLASSES = tuple(SHAPES)
PARTS = {
    name: (entry["salient"], *(part for part in entry["parts"] if part != entry["salient"]))
    for name, entry in _TABLE.items()
}


class Template(NamedTuple):
    """An object's outlines as arrays: P points of all parts, with the K keypoints at the end."""

    points: np.ndarray  # (P + K, 2), each from the middle of its part
    part: np.ndarray  # (P + K,), the part of each point as an index into PARTS
    pivots: np.ndarray  # (parts, 2), the middle of each part
    outlines: list[tuple[int, int, int]]  # part, first and last point of each outline, in the order of painting
    on: list[int]  # the part that each keypoint lies on, -1 for one that the object does not have


@cache
def template(name: str) -> Template:
    points, part, outlines = [], [], []
    for part_name, shapes in SHAPES[name].items():
        number = PARTS[name].index(part_name)
        for shape in shapes:
            outlines.append((number, len(points), len(points) + len(shape)))
            points += shape
            part += [number] * len(shape)
    pivots = np.array([np.array(points)[np.array(part) == number].mean(0) for number in range(len(PARTS[name]))])
    for keypoint in KEYPOINTS:
        x, y, on = POINTS[name].get(keypoint, (0.0, 0.0, PARTS[name][0]))
        points.append((x, y))
        part.append(PARTS[name].index(on))
    on = [PARTS[name].index(POINTS[name][keypoint][2]) if keypoint in POINTS[name] else -1 for keypoint in KEYPOINTS]
    return Template(np.array(points) - pivots[part], np.array(part), pivots, outlines, on)


@cache
def area(name: str) -> float:
    """The area of an object that is 1 wide."""
    canvas = Image.new("1", (128, 128))
    draw = ImageDraw.Draw(canvas)
    for shape in chain(*SHAPES[name].values()):
        draw.polygon([((x + 1) / 2 * 128, (y + 1) / 2 * 128) for x, y in shape], fill=1)
    return float(np.asarray(canvas).mean())
