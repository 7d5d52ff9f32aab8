"""An analysis as files: a figure as PNG and SVG, and a JSON record of all numbers and of how they came about."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import whole_folder, write_json
from ..provenance import header
from ..visual.plots import save
from .run import Analysis
from .subjects import RANDOM, Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD, FIGURES = "analysis.json", ("figure.png", "figure.svg")


def record_of(analysis: Analysis) -> dict[str, Any]:
    """All that was found out, with what was resolved to find it out, as plain types; None for what is not finite."""
    request, measure, results = analysis.request, analysis.measure, analysis.results
    of_all = measure.takes == "files"  # then results are of all models, by what they are of
    more = {"results": {name: measure.record(one) for name, one in results.items()}} if of_all else {}
    models = [_model(analysis, one) for one in analysis.subjects if of_all or one.label in results]
    record = {
        "kind": "analysis",
        "measure": measure.name,
        "about": measure.about,
        "source": measure.source,
        "title": heading(analysis),
        "models": models,
        **more,
        "settings": analysis.settings,
        "data": analysis.found.description,
        "skipped": analysis.skipped,
        "notes": list(analysis.notes),
        "asked": request.as_json(),
        "how": analysis.how,
        "seed": request.seed or 0,
        **header(request.command),
    }
    return plain(record)


def _model(analysis: Analysis, subject: Subject) -> dict[str, Any]:
    side, label = subject.transforms.size, subject.label
    record = {
        "label": label,
        "source": subject.source,
        "weights": subject.weights,
        "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        "input_size": [subject.transforms.channels, side, side],
    }
    if label in analysis.seconds:
        record |= dict(seconds=analysis.seconds[label], result=analysis.measure.record(analysis.results[label]))
    return record


def heading(analysis: Analysis) -> str:
    """What the figure shows: the measure, the images, and whether models are untrained."""
    data = analysis.found.description.get("data") or analysis.found.place
    images = analysis.found.description.get("images")
    of = f": {images - len(analysis.skipped):,} images of" if images else ":"
    shown = [one for one in analysis.subjects if one.label in analysis.results or analysis.measure.takes == "files"]
    untrained = [one.source for one in shown if one.weights == RANDOM]
    which = "not trained" if len(untrained) == len(shown) else ", ".join(dict.fromkeys(untrained))
    random = f"; RANDOM WEIGHTS: {which}" if untrained else ""
    return f"{analysis.measure.name}{of} {Path(str(data)).name or data}{random}"


def draw(analysis: Analysis) -> "Figure":
    """The measure's own figure, with a heading."""
    measure = analysis.measure
    names = next((one.classifier.labels for one in analysis.subjects if one.classifier), None)
    figure = measure.plot(analysis.results, **measure.of_plot({**analysis.settings, "names": names}))
    above = [text for text in (heading(analysis), figure.get_suptitle()) if text]
    figure.suptitle("\n".join(above), fontsize="medium")
    return figure


def write_analysis(analysis: Analysis, folder: Path | None, plot: str | None = None) -> Analysis:
    """Write record and figures into a folder that appears when all of them are there.

    Args:
        folder: New, or empty; None makes the record alone.
        plot: A further file for the figure: png, svg or pdf.

    Returns:
        The analysis, which knows its record and its folder by then.
    """
    record = record_of(analysis)
    if folder is not None or plot is not None:
        figure = draw(analysis)
        if folder is not None:
            with whole_folder(folder) as unfinished:
                for name in FIGURES:
                    save(figure, unfinished / name)
                write_json(record, unfinished / RECORD)
        if plot is not None:
            save(figure, plot)
    return replace(analysis, record=record, folder=folder)


def plain(value: Any) -> Any:
    """Lists for tuples, None for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return str(value)
