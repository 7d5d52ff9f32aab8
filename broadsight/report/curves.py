"""How a training run went: loss, accuracy and learning rate over the epochs."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..visual.metrics import figure, meaning
from ..visual.words import known, number, percent, plural
from .charts import Axis, Chart, Point, Series, axis, finite
from .tables import Column, folded, numeric, table

GOALS = ("val_top1", "val_mask_ap", "val_keypoint_ap", "val_box_ap", "val_miou")
_HIDDEN = {"kind", "epoch", "updates", "best", "best_epoch", "skipped", "val_classes"}


def curves(lines: Sequence[Mapping[str, Any]]) -> str:
    """Charts and a table of a run's metrics, or nothing if they hold no number."""
    epochs = [line for line in lines if line.get("kind") == "epoch" and known(line.get("epoch"))]
    steps = [line for line in lines if line.get("kind") == "updates" and known(line.get("updates"))]
    unit, scale = ("epoch", _updates_of_an_epoch(epochs)) if epochs else ("updates", 1.0)

    def during(key: str) -> list[Point]:
        return finite([(line["updates"] / scale, line.get(key)) for line in steps]) if scale else []

    def after(key: str) -> list[Point]:
        return finite([(line["epoch"], line.get(key)) for line in epochs])

    charts = (
        (
            "Loss",
            "loss",
            None,
            Series("during the epoch", during("loss")),
            Series("training", after("train_loss"), 0),
            Series("validation", after("val_loss"), 5),
        ),
        (
            "Accuracy",
            "accuracy, %",
            (0.0, 100.0),
            Series("training, top-1", after("train_top1"), 0),
            Series("validation, top-1", after("val_top1"), 5),
            Series("validation, top-5", after("val_top5"), 5, dash=2),
        ),
        (
            "Quality",
            "%",
            (0.0, 100.0),
            Series("box AP", after("val_box_ap"), 1),
            Series("box AP50", after("val_box_ap50"), 1, dash=2),
            Series("mask AP", after("val_mask_ap"), 5),
            Series("mask AP50", after("val_mask_ap50"), 5, dash=2),
            Series("keypoint AP", after("val_keypoint_ap"), 3),
            Series("mIoU", after("val_miou"), 5),
            Series("mAcc", after("val_macc"), 0, dash=2),
        ),
        ("Learning rate", "learning rate", None, Series("learning rate", during("lr"), 2, marked=False)),
    )
    drawn = [_chart(title, label, unit, within, series) for title, label, within, *series in charts]
    if not any(drawn):
        return ""
    # Of what the figures of a run have, what it was after
    goal = next((key for key in GOALS if any(known(line.get(key)) for line in epochs)), None)
    lead = ""
    if epochs and "best" in epochs[-1] and not known(epochs[-1]["best"]):
        lead = "<p>No epoch has a figure to be compared by: the weights are those of the last one.</p>\n"
    elif goal:
        top = max((line for line in epochs if known(line.get(goal))), key=lambda line: line[goal])
        value = f"{percent(top[goal])} {meaning(_bare(goal)).label}"
        lead = f"<p>Best after epoch {number(top['epoch'])}: {value} on the validation images.</p>\n"
    return f'{lead}<div class="charts">\n{"".join(drawn)}</div>\n{_table(epochs)}'


def _updates_of_an_epoch(epochs: Sequence[Mapping[str, Any]]) -> float | None:
    for line in epochs:
        if known(line.get("updates")) and line["updates"] > 0 and line["epoch"] > 0:
            return line["updates"] / line["epoch"]
    return None


def _chart(title: str, label: str, unit: str, within: Point | None, series: Sequence[Series]) -> str:
    series = [line for line in series if line.points]
    if not series:
        return ""
    xs, ys = zip(*(point for line in series for point in line.points), strict=True)
    low = 0.0 if title == "Learning rate" else min(ys)
    across = axis(unit, 0.0, max(1.0, *xs))
    across = Axis(unit, tuple(tick for tick in across.ticks if float(tick).is_integer())) if across.high < 5 else across
    return Chart(title, across, axis(label, low, max(ys), within=within), lines=series).html()


def _table(epochs: Sequence[Mapping[str, Any]]) -> str:
    if not epochs:
        return ""
    keys = list(dict.fromkeys(key for line in epochs for key in line if key not in _HIDDEN and known(line[key])))
    columns = [Column("epoch"), *(Column(_name(key), True) for key in keys)]
    rows = [[number(line["epoch"]), *(numeric(_shown(key, line.get(key))) for key in keys)] for line in epochs]
    return folded(f"Numbers of {plural(len(epochs), 'epoch')}", table(columns, rows, caption="Numbers of every epoch"))


def _bare(key: str) -> str:
    return key.removeprefix("train_").removeprefix("val_")


def _shown(key: str, value: Any) -> str:
    """With its unit, but for losses: what a model is trained by may be the sum of several."""
    return number(value) if key.endswith("loss") else figure(_bare(key), value)


def _name(key: str) -> str:
    where = "training " if key.startswith("train_") else "validation " if key.startswith("val_") else ""
    return where + meaning(_bare(key)).label
