"""What is where in a scene, in shares of the image: nothing here depends on the size at which it will be drawn."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from ...errors import check_choice
from .drawing import Canvas
from .objects import CLASSES, KEYPOINT_PAIRS, KEYPOINTS, area, template

SPLITS = ("train", "val", "test")
Place = tuple[float, float]  # in shares of width and height


class Thing(NamedTuple):
    """An object of a scene."""

    label: int  # its class
    centre: Place
    keypoints: np.ndarray  # (K, 2), from the centre, in shares of the shorter side
    on: list[int]  # (K,), the part that each keypoint lies on, -1 for one that the object does not have
    patches: dict[int, int]  # as which patch each part is drawn


class Plan(NamedTuple):
    canvas: Canvas
    grounds: int  # the first patches, which are the background
    things: list[Thing]  # main first
    rng: np.random.Generator  # for the colours, as the composition has left it: good for one drawing


class Dice:
    """Uniform numbers, drawn many at a time: a call of the generator costs more than a line of drawing."""

    def __init__(self, rng: np.random.Generator):
        self.rolls: Iterator[float] = chain.from_iterable(rng.random(256).tolist() for _ in count())

    def __call__(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * next(self.rolls)

    def pick(self, number: int) -> int:
        return int(number * next(self.rolls))


def generator(seed: int, split: str, role: int, number: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SPLITS.index(split), role, number)))


def checked_classes(classes: Sequence[str]) -> tuple[str, ...]:
    if not classes or not set(classes) <= set(CLASSES) or len(set(classes)) < len(classes):
        raise ValueError(f"classes={tuple(classes)}; expected different ones of {', '.join(CLASSES)}")
    return tuple(classes)


def main_class(index: int, seed: int, split: str, count: int) -> int:
    """The class of a scene's main object, without composing it: each `count` scenes in a row are a shuffle of all."""
    if index < 0 or seed < 0:
        raise ValueError(f"index={index}, seed={seed}; expected non-negative numbers")
    check_choice("split", split, SPLITS)
    return shuffled(seed, split, index // count, count)[index % count]


@lru_cache(4096)
def shuffled(seed: int, split: str, block: int, count: int) -> tuple[int, ...]:
    return tuple(generator(seed, split, 0, block).permutation(count).tolist())


def compose(index: int, seed: int, split: str, classes: tuple[str, ...]) -> Plan:
    """Everything about a scene that does not depend on its size. From the back: regions, clutter, others, main."""
    label = main_class(index, seed, split, len(classes))
    rng = generator(seed, split, 1, index)
    dice, canvas = Dice(rng), Canvas()
    scale = dice(0.35, 0.8)
    centre = dice(0.5 * scale, 1 - 0.5 * scale), dice(0.5 * scale, 1 - 0.5 * scale)
    others = [number for number in range(len(classes)) if number != label]
    for _ in range(dice.pick(3)):  # one side of a line through the image: a horizon, a wall
        aim, far = dice(0, 2 * math.pi), dice(-0.35, 0.35)
        cos, sin = math.cos(aim), math.sin(aim)
        corners = [(far, -3.0), (3.0, -3.0), (3.0, 3.0), (far, 3.0)]
        turned = np.array([(x * cos - y * sin, x * sin + y * cos) for x, y in corners])
        canvas.add(canvas.patch(), turned, (0.5, 0.5))
    grounds = len(canvas.owners)
    for _ in range(3 + dice.pick(6)):
        clutter(canvas, dice, scale, [classes[number] for number in others])
    # Placed one after the other where there is room, so that each shows; painted before the main one, hence behind it.
    taken = [(centre, scale)]
    things: list[Thing] = []
    for _ in range(dice.pick(4) if others else 0):
        other = others[dice.pick(len(others))]
        ratio = math.sqrt(area(classes[label]) / area(classes[other]))
        small = scale * ratio * dice(0.35, 0.6)
        for _ in range(6):
            place = dice(0.05, 0.95), dice(0.05, 0.95)
            if all(math.dist(place, there) > 0.45 * (small + wide) for there, wide in taken):
                taken.append((place, small))
                things.append(put(canvas, dice, other, classes[other], place, small, len(things) + 2))
                break
    main = put(canvas, dice, label, classes[label], centre, scale, 1)
    if dice() < 0.4:
        # No larger than this share of the object's area, wherever it lands on it.
        radius = scale * math.sqrt(area(classes[label]) * dice(0.06, 0.22) / math.pi)
        aim, far = dice(0, 2 * math.pi), dice(0.1, 0.4) * scale
        place = centre[0] + far * math.cos(aim), centre[1] + far * math.sin(aim)
        canvas.add(canvas.patch(), blob(dice, radius, 0.2), place)
    return Plan(canvas, grounds, [main, *things], rng)


def put(canvas: Canvas, dice: Dice, label: int, name: str, centre: Place, scale: float, number: int) -> Thing:
    """Draw one object `scale` wide, turned, mirrored, bent and with each of its parts a little off."""
    shape = template(name)
    turn, flip = math.radians(dice(-35, 35)), -1 if dice() < 0.5 else 1
    wide, high = 0.5 * scale * dice(0.85, 1.1), 0.5 * scale * dice(0.85, 1.1)
    cos, sin = math.cos(turn), math.sin(turn)
    pose = np.array([[flip * wide * cos, flip * wide * sin], [-high * sin, high * cos]])
    bends = []
    for _ in shape.pivots:
        bend, grow = math.radians(dice(-10, 10)), dice(0.85, 1.15)
        cos, sin = grow * math.cos(bend), grow * math.sin(bend)
        bends.append(((cos, sin), (-sin, cos)))
    x, y = (np.array(bends) @ pose)[shape.part].swapaxes(0, 1)  # each P 2: where a step along that axis leads
    points = shape.points[:, :1] * x + shape.points[:, 1:] * y + (shape.pivots @ pose)[shape.part]
    patches: dict[int, int] = {}
    for part, start, stop in shape.outlines:
        if part not in patches:
            patches[part] = canvas.patch(number, part + 1)
        canvas.add(patches[part], points[start:stop], centre)
    swapped = dict([*KEYPOINT_PAIRS, *(pair[::-1] for pair in KEYPOINT_PAIRS)]) if flip < 0 else {}
    order = [swapped.get(i, i) for i in range(len(KEYPOINTS))]  # left and right are the viewer's
    return Thing(label, centre, points[-len(KEYPOINTS) :][order], [shape.on[place] for place in order], patches)


def clutter(canvas: Canvas, dice: Dice, scale: float, names: Sequence[str]) -> None:
    """A blob, a stick or, mostly, a part that some other object has lost, as large as if it were the main one's."""
    centre, kind, patch = (dice(), dice()), dice(), canvas.patch()
    if kind < 0.15:
        canvas.add(patch, blob(dice, dice(0.04, 0.14), 0.3), centre)
        return
    turn = dice(0, 2 * math.pi)
    cos, sin = math.cos(turn), math.sin(turn)
    if kind < 0.35 or not names:
        long, thick = dice(0.15, 0.5), dice(0.01, 0.03)
        across, along = np.array((cos, sin)) * long, np.array((-sin, cos)) * thick
        canvas.add(patch, np.array((across + along, along - across, -across - along, across - along)), centre)
        return
    shape = template(names[dice.pick(len(names))])
    # Half of them salient parts: those are what a model that looks at one thing alone would fall for.
    lost = 0 if dice() < 0.5 else dice.pick(len(shape.pivots))
    pose = np.array(((cos, sin), (-sin, cos))) * (0.5 * scale * dice(0.6, 1.1))
    points = shape.points @ pose
    for part, start, stop in shape.outlines:
        if part == lost:
            canvas.add(patch, points[start:stop], centre)


def blob(dice: Dice, radius: float, rough: float) -> np.ndarray:
    """(9, 2), a roundish outline whose area is at most that of the circle."""
    around = [(2 * math.pi * step / 9, radius * dice(1 - 2 * rough, 1)) for step in range(9)]
    return np.array([(reach * math.cos(angle), reach * math.sin(angle)) for angle, reach in around])
