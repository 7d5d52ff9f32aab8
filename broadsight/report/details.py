"""Figures in full, what the model, the data and the run are, how to repeat it, and what was left out."""

from collections.abc import Collection, Mapping
from typing import Any

from ..visual.metrics import MEANS, figure, meaning
from ..visual.words import NOTHING, escape, number, plural, sentence
from .tables import Column, table

SKIPPED = 100  # images that are named
OBJECTS = ("box_", "mask_", "keypoint_")


def figures(record: Mapping[str, Any], sections: Collection[str]) -> str:
    """All figures and what they mean, then those that could not be measured; reasons of whole sections are left out."""
    measured = {key: value for key, value in (record.get("figures") or {}).items() if value is not None}
    absent = {key: why for key, why in (record.get("absent") or {}).items() if key not in (*sections, *measured)}
    rows = [(meaning(k).label, figure(k, v), escape(_about(k, record))) for k, v in measured.items()]
    rows += [
        (meaning(k).label, NOTHING, f'<span class="absent">not measured: {sentence(why)}</span>')
        for k, why in absent.items()
    ]
    if not rows:
        return ""
    lines = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{value}</dd>{f'<dd>{about}</dd>' if about else ''}</div>\n"
        for label, value, about in rows
    )
    return f'<dl class="figures">\n{lines}</dl>\n'


def _about(key: str, record: Mapping[str, Any]) -> str:
    """What a figure means, and over how many classes it is if not over all."""
    covered = record.get("coverage") or {}
    there, classes = covered.get("occurring"), covered.get("classes")
    if there == classes or not (key in MEANS or key.startswith(OBJECTS)):
        return meaning(key).about
    return f"{meaning(key).about}; over {there} of {classes} classes, since the others do not occur"


def skipped(record: Mapping[str, Any]) -> str:
    """How many images could not be read, and the first of them; or nothing."""
    left_out = record.get("skipped") or {}
    if not left_out:
        return ""
    shown = list(left_out.items())[:SKIPPED]
    rows = [(f"<code>{escape(name)}</code>", escape(why)) for name, why in shown]
    more = f" The first {SKIPPED} are named." if len(left_out) > SKIPPED else ""
    counted = plural(len(left_out), "image")
    listing = table((Column("image"), Column("why")), rows, caption="Images that could not be read")
    return (
        f"<p>{counted} could not be read and {'was' if len(left_out) == 1 else 'were'} left out.{more}</p>\n{listing}"
    )


def facts(record: Mapping[str, Any]) -> str:
    """Groups of facts side by side, then the command and the versions; or nothing."""
    groups = [(str(group.get("group", "")), group.get("rows") or ()) for group in record.get("facts") or ()]
    made: list[tuple[str, Any]] = []
    if record.get("seed") is not None:
        made.append(("seed", number(record["seed"])))
    if "commit" in record:
        made.append(("commit", record["commit"] or "unknown: not run from a checkout"))
    made += (record.get("versions") or {}).items()
    groups += [("Made with", made)] if made else []
    cards = "".join(_card(title, rows) for title, rows in groups if rows)
    command = record.get("command")
    return (f'<div class="facts">\n{cards}</div>\n' if cards else "") + (
        f'<h3>Command</h3>\n<pre tabindex="0"><code>{escape(command)}</code></pre>\n' if command else ""
    )


def _card(title: str, rows: Any) -> str:
    lines = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>\n" for name, value in rows)
    return f"<section><h3>{escape(title)}</h3>\n<dl>\n{lines}</dl></section>\n"
