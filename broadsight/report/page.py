"""The page itself: head, headline figures, table of contents, and every section that there is something to say in."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..visual.captioned import CaptionedImage
from ..visual.words import escape, sentence
from . import colours
from .calibration import calibration
from .classes import class_figures, confusions, per_class
from .comparison import beside, twins
from .curves import curves as training_curves
from .details import facts, figures, skipped
from .images import LARGE, gallery
from .suites import suites

KINDS = {"run": "Training run", "evaluation": "Evaluation"}
# In the order in which they are read. The key is the section's id, and says in `absent` why the section is not there.
SECTIONS = {
    "curves": "Training",
    "figures": "Figures",
    "twins": "Twin runs",
    "beside": "Beside other models",
    "findings": "Found in images",
    "class_figures": "Every class",
    "per_class": "Classes",
    "confusion": "Confusions",
    "calibration": "Calibration",
    "suites": "Robustness",
    "mistakes": "Most confident mistakes",
    "samples": "Training images",
    "skipped": "Skipped images",
    "facts": "Details",
}


def render(
    record: Mapping[str, Any],
    *,
    curves: Sequence[Mapping[str, Any]] = (),
    mistakes: Sequence[CaptionedImage] = (),
    samples: Sequence[CaptionedImage] = (),
    findings: Sequence[CaptionedImage] = (),
) -> str:
    """A report as one HTML file that loads nothing from anywhere. The same data give the same text.

    Args:
        record: What is known of the run or the evaluation, as the package's own text lists it; all but `title` may
            be missing.
        curves: The lines of `metrics.jsonl`.
        mistakes: Images that were taken for another class.
        samples: Images as the model saw them in training.
        findings: Images with what was found in them, beside the truth.
    """
    if not record.get("title"):
        raise ValueError("a report needs a title; expected record['title'], e.g. 'resnet18 on photos'")
    absent = record.get("absent") or {}
    bodies = {
        "curves": training_curves(curves),
        "figures": figures(record, SECTIONS),
        "twins": twins(record),
        "beside": beside(record),
        "findings": gallery(findings, LARGE),
        "class_figures": class_figures(record),
        "per_class": per_class(record),
        "confusion": confusions(record),
        "calibration": calibration(record),
        "suites": suites(record),
        "mistakes": gallery(mistakes),
        "samples": _samples(samples),
        "skipped": skipped(record),
        "facts": facts(record),
    }
    assert bodies.keys() == SECTIONS.keys()
    for key, why in absent.items():
        if key in bodies:
            bodies[key] = f'<p class="absent">Not measured: {sentence(why)}</p>\n' + bodies[key]
    shown = {key: body for key, body in bodies.items() if body}
    sections = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">{SECTIONS[key]}</h2>\n{body}</section>\n\n'
        for key, body in shown.items()
    )
    links = "".join(f'<li><a href="#{key}">{SECTIONS[key]}</a></li>' for key in shown)
    contents = f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n' if len(shown) > 1 else ""
    return f"""{_head(str(record["title"]))}<body>
<div class="page">
{_header(record)}{contents}<main>
{_notes(record)}{sections}</main>
<footer><p>{_made_by(record)} This file is complete: it loads nothing from elsewhere.</p></footer>
</div>
<script>{_asset("sort.js")}</script>
</body>
</html>
"""


def _head(title: str) -> str:
    digest = base64.b64encode(hashlib.sha256(_asset("sort.js").encode()).digest()).decode("ascii")
    # Not even a mistake of ours could load anything, or run a script out of a class name.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{colours.style()}
{_asset("style.css")}</style>
</head>
"""


def _header(record: Mapping[str, Any]) -> str:
    kind = KINDS.get(str(record.get("kind")), "Report")
    subtitle = f'<p class="subtitle">{escape(record["subtitle"])}</p>\n' if record.get("subtitle") else ""
    cards = "".join(
        f"<div><dt>{escape(entry.get('label', ''))}</dt><dd>{escape(entry.get('value', ''))}</dd>"
        + (f'<dd class="note">{escape(entry["note"])}</dd>' if entry.get("note") else "")
        + "</div>\n"
        for entry in record.get("headline") or ()
    )
    headline = f'<dl class="headline">\n{cards}</dl>\n' if cards else ""
    return (
        f'<header>\n<p class="kind">broadsight <span>{kind}</span></p>\n<h1>{escape(record["title"])}</h1>\n'
        f"{subtitle}{headline}</header>\n"
    )


def _notes(record: Mapping[str, Any]) -> str:
    notes = "".join(f"<p>{sentence(note)}</p>" for note in record.get("notes") or ())
    return f'<aside class="notes" aria-label="Notes">{notes}</aside>\n' if notes else ""


def _samples(samples: Sequence[CaptionedImage]) -> str:
    shown = gallery(samples)
    return f"<p>As the model saw them: cropped, flipped and changed in colour at random.</p>\n{shown}" if shown else ""


def _made_by(record: Mapping[str, Any]) -> str:
    version = (record.get("versions") or {}).get("broadsight")
    return f"Made by broadsight {escape(version)}." if version else "Made by broadsight."


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
