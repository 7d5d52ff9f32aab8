"""Whether a model is as often right as it is sure."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..visual.words import known, number, numbers, percent, plural
from .charts import Axis, Bar, Chart, Series, axis
from .tables import Column, folded, numeric, table

_HUNDRED = tuple(float(tick) for tick in range(0, 101, 20))
_EVEN = 1.0  # points of difference that are called none


def calibration(record: Mapping[str, Any]) -> str:
    """The reliability diagram, how confidences are spread, and a sentence on what they say; or nothing."""
    known_of_it = record.get("calibration") or {}
    bins = [entry for entry in known_of_it.get("bins") or () if numbers(entry, "low", "high")]
    filled = [entry for entry in bins if entry.get("count") and numbers(entry, "count", "accuracy")]
    if not filled:
        return ""
    charts = _reliability(filled) + _spread(filled)
    return f'<p>{_sentence(known_of_it, filled)}</p>\n<div class="charts">\n{charts}</div>\n{_table(bins)}'


def _sentence(known_of_it: Mapping[str, Any], filled: Sequence[Mapping[str, Any]]) -> str:
    words = []
    sure = [entry for entry in filled if known(entry.get("confidence"))]
    images = sum(entry["count"] for entry in sure)
    if images:
        excess = sum(entry["count"] * (entry["confidence"] - entry["accuracy"]) for entry in sure) / images
        if abs(excess) < _EVEN:
            words.append("On the whole the model is as sure as it should be.")
        else:
            more = "more" if excess > 0 else "less"
            words.append(f"On the whole the model is {number(abs(excess), 2)} points {more} sure than it is right.")
    if known(known_of_it.get("ece")):
        words.append(f"Confidence and accuracy differ by {known_of_it['ece']:.1f} points on average (ECE)")
        words[-1] += f", by {known_of_it['mce']:.1f} in the worst bin (MCE)." if known(known_of_it.get("mce")) else "."
    return " ".join(words)


def _reliability(filled: Sequence[Mapping[str, Any]]) -> str:
    bars = [
        Bar(
            100 * entry["low"],
            100 * entry["high"],
            entry["accuracy"],
            f"{_range(entry)}: {percent(entry['accuracy'])} right of {plural(entry['count'], 'image')}",
        )
        for entry in filled
    ]
    aims = [
        Bar(100 * entry["low"], 100 * entry["high"], entry["confidence"])
        for entry in filled
        if known(entry.get("confidence"))
    ]
    return Chart(
        "Reliability",
        Axis("confidence, %", _HUNDRED),
        Axis("accuracy, %", _HUNDRED),
        bars=bars,
        lines=[Series("", [(0.0, 0.0), (100.0, 100.0)])],
        ticks=aims,
        legend=[("box c0", "accuracy"), ("stroke", "mean confidence: where the bar should end")],
    ).html()


def _spread(filled: Sequence[Mapping[str, Any]]) -> str:
    total = sum(entry["count"] for entry in filled)
    bars = [
        Bar(
            100 * entry["low"],
            100 * entry["high"],
            100 * entry["count"] / total,
            f"{_range(entry)}: {plural(entry['count'], 'image')}",
        )
        for entry in filled
    ]
    high = max(bar.value for bar in bars)
    return Chart(
        "How sure it is",
        Axis("confidence, %", _HUNDRED),
        axis("share of the images, %", 0.0, high, within=(0.0, 100.0)),
        bars=bars,
    ).html()


def _table(bins: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        Column("confidence"),
        Column("images", True),
        Column("mean confidence", True),
        Column("accuracy", True),
    )
    rows = [
        (
            _range(entry),
            numeric(number(entry.get("count"))),
            numeric(percent(entry.get("confidence"))),
            numeric(percent(entry.get("accuracy"))),
        )
        for entry in bins
    ]
    return folded(f"Numbers of {plural(len(bins), 'bin')}", table(columns, rows, caption="Calibration by bin"))


def _range(entry: Mapping[str, Any]) -> str:
    return f"{100 * entry['low']:.0f} to {percent(100 * entry['high']).replace('.0', '')}"
