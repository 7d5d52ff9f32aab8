"""Names beside the points of a plot, which cover neither each other nor the points."""

from collections.abc import Sequence
from typing import Any

SIZE = 7  # of letters, in points
WIDTH, HEIGHT = 0.6, 1.25  # of a letter on average, and of a line, over the size
MARK = 4.5  # from the middle of a mark to its rim, in points
STEPS = (1.0, 2.6, 4.2)  # distances of a name from its point, in lines
SIDES = ((-1, 1), (1, -1), (1, 1), (-1, -1))  # left and above comes first: a front rises from there

Box = tuple[float, float, float, float]  # left, bottom, right, top


def name_points(figure: Any, panel: Any, names: Sequence[tuple[str, float, float, bool]]) -> None:
    """Write names where there is room; those that matter come first and are always written.

    Args:
        figure, panel: The figure, complete without the names, and its axes.
        names: Name, x and y of the point in data coordinates, and whether it matters.
    """
    figure.draw_without_rendering()  # places the points
    per_point = figure.dpi / 72
    places = [panel.transData.transform((x, y)) / per_point for _, x, y, _ in names]
    taken: list[Box] = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in places]
    left, bottom, right, top = (value / per_point for value in figure.bbox.extents)
    for (name, x, y, matters), place in sorted(zip(names, places, strict=True), key=lambda pair: not pair[0][3]):
        tried = [_beside(place, name, side, step) for step in STEPS for side in SIDES]
        free = [
            one
            for one in tried
            if one[0] >= left and one[2] <= right and one[1] >= bottom and one[3] <= top
            if not any(_meet(one, other) for other in taken)
        ]
        if not free and not matters:
            continue
        box = free[0] if free else tried[0]
        taken.append(box)
        far = free and tried.index(box) >= len(SIDES)
        panel.annotate(
            name,
            (x, y),
            (box[0] - place[0], box[1] - place[1]),
            textcoords="offset points",
            fontsize=SIZE,
            alpha=1.0 if matters else 0.6,
            arrowprops=dict(arrowstyle="-", color="grey", linewidth=0.4, shrinkB=3) if far else None,
            zorder=4,
        )


def _beside(place: Sequence[float], name: str, side: tuple[int, int], step: float) -> Box:
    width, height = WIDTH * SIZE * len(name), HEIGHT * SIZE
    away, up = 3.0 + 6.0 * (step - 1), MARK + height * (step - 1)
    left = place[0] + away if side[0] > 0 else place[0] - away - width
    bottom = place[1] + up if side[1] > 0 else place[1] - up - height
    return left, bottom, left + width, bottom + height


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
