"""The objects that scenes are made of: the outlines of their parts, and where their keypoints are."""

import math
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
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


def both_sides(*outlines: Outline) -> list[Outline]:
    return [*outlines, *([(-x, y) for x, y in outline] for outline in outlines)]


def symmetric(*half: tuple[float, float]) -> Outline:
    """One side of an outline, from the top or the bottom on, and its mirror image."""
    return [*half, *((-x, y) for x, y in reversed(half) if x)]


PINCER = [(0.52, -0.52), (0.55, -0.86), (0.72, -0.99), (0.71, -0.72), (0.82, -0.74), (0.96, -0.9), (0.95, -0.6)]
TENTACLE = [(0.08, 0.1), (0.34, 0.42), (0.36, 0.7), (0.6, 0.92), (0.52, 0.97), (0.2, 0.76), (0.18, 0.5), (0.0, 0.24)]
FEELER = [(0.36, 0.02), (0.62, 0.2), (0.74, 0.5), (0.97, 0.56), (0.93, 0.68), (0.6, 0.6), (0.48, 0.34), (0.24, 0.22)]

# Each object looks to the right or at us and fills about -1..1 on both axes, y pointing down. Its parts stand in the
# order in which they are painted; SALIENT names the one that tells most. A keypoint lies on a part: x, y, part.
SHAPES: dict[str, dict[str, list[Outline]]] = {
    "crab": {
        "legs": both_sides(
            limb(0.4, 0.2, 0.95, 0.12, 0.16, 0.07),
            limb(0.4, 0.3, 0.9, 0.5, 0.16, 0.07),
            limb(0.3, 0.4, 0.66, 0.82, 0.16, 0.07),
        ),
        "claws": both_sides(limb(0.35, 0.0, 0.74, -0.56, 0.2, 0.18), [*PINCER, (0.82, -0.42), (0.64, -0.42)]),
        "shell": [ellipse(0, 0.2, 0.6, 0.36)],
        "eyes": both_sides(limb(0.15, 0.0, 0.18, -0.3, 0.07, 0.07), ellipse(0.18, -0.32, 0.11, 0.11, points=8)),
    },
    "fish": {
        "tail": [[(-0.3, 0.0), (-0.66, -0.4), (-1.0, -0.72), (-0.82, 0.0), (-1.0, 0.72), (-0.66, 0.4)]],
        "fins": [
            [(-0.2, -0.25), (-0.06, -0.76), (0.16, -0.7), (0.42, -0.28)],
            [(0.0, 0.28), (-0.12, 0.7), (0.1, 0.66), (0.34, 0.3)],
        ],
        "body": [ellipse(0.24, 0, 0.68, 0.42)],
        "eye": [ellipse(0.6, -0.1, 0.1, 0.1, points=8)],
    },
    "snail": {
        "horns": [
            limb(0.66, 0.1, 0.6, -0.42, 0.08, 0.07),
            ellipse(0.6, -0.45, 0.09, 0.09, points=8),
            limb(0.76, 0.1, 0.9, -0.34, 0.08, 0.07),
            ellipse(0.9, -0.37, 0.09, 0.09, points=8),
        ],
        "foot": [
            [(-1.0, 0.72), (-0.7, 0.42), (0.3, 0.4), (0.52, 0.02), (0.78, -0.06), (0.96, 0.12), (0.9, 0.4), (0.7, 0.72)]
        ],
        "shell": [ellipse(-0.16, -0.1, 0.58, 0.58, points=18)],
        "spiral": [ellipse(-0.12, -0.06, 0.26, 0.26, points=12)],
    },
    "butterfly": {
        "feelers": both_sides(limb(0.0, -0.4, 0.26, -0.9, 0.07, 0.06), ellipse(0.27, -0.9, 0.09, 0.09, points=8)),
        "wings": both_sides(
            [(0.03, -0.1), (0.3, -0.62), (0.7, -0.78), (0.95, -0.62), (0.86, -0.16), (0.5, 0.06), (0.06, 0.1)]
        ),
        "tails": both_sides([(0.03, 0.02), (0.5, 0.06), (0.7, 0.34), (0.54, 0.62), (0.4, 0.9), (0.26, 0.56)]),
        "body": [ellipse(0, 0.05, 0.12, 0.55)],
    },
    "rocket": {
        "flame": [[(-0.2, 0.5), (-0.24, 0.78), (-0.1, 0.72), (0.0, 1.0), (0.1, 0.72), (0.24, 0.78), (0.2, 0.5)]],
        "fins": both_sides([(0.2, 0.1), (0.62, 0.48), (0.66, 0.8), (0.42, 0.62), (0.18, 0.56)]),
        "hull": [symmetric((0, -1), (0.2, -0.7), (0.3, -0.3), (0.3, 0.3), (0.2, 0.58))],
        "window": [ellipse(0, -0.24, 0.15, 0.15, points=10)],
    },
    "boat": {
        "mast": [limb(0.0, -1.0, 0.0, 0.5, 0.08, 0.1)],
        "sails": [[(0.08, -0.86), (0.5, -0.3), (0.7, 0.26), (0.08, 0.3)], [(-0.08, -0.7), (-0.62, 0.26), (-0.08, 0.3)]],
        "hull": [[(-0.95, 0.4), (0.95, 0.4), (0.66, 0.86), (-0.6, 0.86)]],
        "flag": [[(0.0, -1.0), (-0.34, -0.9), (0.0, -0.78)]],
    },
    "car": {
        "cabin": [[(-0.56, -0.05), (-0.36, -0.5), (0.22, -0.5), (0.5, -0.05)]],
        "chassis": [[(-0.98, 0.36), (-0.96, -0.02), (-0.6, -0.12), (0.5, -0.12), (0.92, 0.02), (0.98, 0.36)]],
        "wheels": [ellipse(-0.52, 0.36, 0.28, 0.28), ellipse(0.52, 0.36, 0.28, 0.28)],
        "lamp": [ellipse(0.86, 0.1, 0.1, 0.1, points=8)],
    },
    "octopus": {
        "arms": both_sides(TENTACLE, FEELER),
        "head": [symmetric((-0.44, 0.26), (-0.5, -0.2), (-0.42, -0.62), (-0.2, -0.86))],
        "eyes": both_sides(ellipse(0.2, -0.06, 0.12, 0.14, points=8)),
        "mouth": [ellipse(0, 0.18, 0.14, 0.06, points=8)],
    },
    "helicopter": {
        "skids": [
            limb(-0.4, 0.76, 0.72, 0.76, 0.1, 0.1),
            limb(0.0, 0.4, -0.1, 0.76, 0.08, 0.08),
            limb(0.36, 0.4, 0.46, 0.76, 0.08, 0.08),
        ],
        "boom": [[(-0.1, 0.0), (-0.8, -0.08), (-1.0, -0.34), (-0.84, 0.12), (-0.9, 0.32), (-0.7, 0.14), (-0.1, 0.3)]],
        "rotor": [limb(-0.75, -0.62, 0.98, -0.52, 0.16, 0.16), limb(0.12, -0.6, 0.16, -0.2, 0.12, 0.16)],
        "cabin": [ellipse(0.22, 0.1, 0.56, 0.4)],
        "window": [[(0.3, -0.2), (0.56, -0.12), (0.7, 0.12), (0.3, 0.12)]],
    },
    "rabbit": {
        "ears": both_sides(ellipse(0.27, -0.6, 0.15, 0.4, 14)),
        "feet": both_sides(ellipse(0.4, 0.84, 0.28, 0.13)),
        "body": [ellipse(0, 0.52, 0.46, 0.4)],
        "head": [ellipse(0, -0.08, 0.42, 0.36)],
        "eyes": both_sides(ellipse(0.17, -0.12, 0.08, 0.1, points=8)),
    },
}
TELLING = ("claws", "tail", "shell", "wings", "hull", "sails", "wheels", "arms", "rotor", "ears")
SALIENT = dict(zip(SHAPES, TELLING, strict=True))
# Where keypoints are: x, y and the part that they lie on; - where an object has none.
PLACES = """
            centre              face            top                bottom           left               right
crab        0,0.2,shell         0,0,shell       -                  0,0.5,shell      -0.66,-0.62,claws  0.66,-0.62,claws
fish        0.2,0,body          0.6,-0.1,eye    0.05,-0.62,fins    0.05,0.58,fins   -0.8,0,tail        0.86,0.02,body
snail       -0.12,-0.06,spiral  0.78,0.12,foot  -0.16,-0.58,shell  -0.1,0.6,foot    -0.8,0.6,foot      0.86,0.2,foot
butterfly   0,0.05,body         0,-0.4,body     -                  0,0.5,body       -0.8,-0.5,wings    0.8,-0.5,wings
rocket      0,0.1,hull          0,-0.24,window  0,-0.88,hull       0,0.86,flame     -0.54,0.54,fins    0.54,0.54,fins
boat        0.3,0,sails         -               0,-0.92,mast       0,0.76,hull      -0.8,0.48,hull     0.8,0.48,hull
car         0,0.1,chassis       0.86,0.1,lamp   0,-0.42,cabin      -                -0.52,0.36,wheels  0.52,0.36,wheels
octopus     0,-0.2,head         0,0.18,mouth    0,-0.78,head       -                -0.52,0.88,arms    0.52,0.88,arms
helicopter  0.2,0.2,cabin       0.46,0,window   0.14,-0.56,rotor   0.16,0.76,skids  -0.84,0.04,boom    0.7,0.1,cabin
rabbit      0,0.55,body         0,0.04,head     -                  -                -0.32,-0.8,ears    0.32,-0.8,ears
"""
POINTS: dict[str, dict[str, tuple[float, float, str]]] = {}
for _name, *_places in map(str.split, PLACES.strip().splitlines()[1:]):
    _known = {key: place.split(",") for key, place in zip(KEYPOINTS, _places, strict=True) if place != "-"}
    POINTS[_name] = {key: (float(x), float(y), part) for key, (x, y, part) in _known.items()}
CLASSES = tuple(SHAPES)
PARTS = {name: (SALIENT[name], *(part for part in shapes if part != SALIENT[name])) for name, shapes in SHAPES.items()}


@dataclass(frozen=True, eq=False)
class Template:
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
        x, y, on = POINTS[name].get(keypoint, (0.0, 0.0, SALIENT[name]))
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
