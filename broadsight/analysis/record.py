"""An analysis as files: a figure as PNG and SVG, and a JSON record of all numbers and of how they came about."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..files import whole_folder, write_json
from ..provenance import header
from ..visual.plots import save
from .measures.base import taken
from .measures.frame import plain
from .run import Analysis
from .subjects import RANDOM, Subject


def record_of(analysis: Analysis) -> dict[str, Any]:
    """All that was found out, with what was resolved to find it out, as plain types; None for what is not finite."""
    request, measure, results = analysis.request, analysis.measure, analysis.results
    record: dict[str, Any] = dict(kind="analysis", measure=measure.name, about=measure.about, source=measure.source)
    record |= dict(title=heading(analysis), models=[])
    for one in _shown(analysis):
        side, parameters = one.transforms.size, sum(parameter.numel() for parameter in one.model.parameters())
        model: dict[str, Any] = dict(label=one.label, source=one.source, weights=one.weights, parameters=parameters)
        model |= dict(input_size=[one.transforms.channels, side, side])
        if one.label in analysis.seconds:
            model |= dict(seconds=analysis.seconds[one.label], result=measure.record(results[one.label]))
        record["models"].append(model)
    if measure.takes == "files":  # then results are of all models
        record["results"] = {name: measure.record(one) for name, one in results.items()}
    record |= dict(settings=analysis.settings, data=analysis.found.description, skipped=analysis.skipped)
    record |= dict(notes=analysis.notes, asked=request.as_json(), how=analysis.how, seed=request.seed or 0)
    return plain(record | header(request.command))


def _shown(analysis: Analysis) -> list[Subject]:
    of_all = analysis.measure.takes == "files"
    return [one for one in analysis.subjects if of_all or one.label in analysis.results]


def heading(analysis: Analysis) -> str:
    """What the figure shows: the measure, the images, and whether models are untrained."""
    data = analysis.found.description.get("data") or analysis.found.place
    images = analysis.found.description.get("images")
    of = f": {images - len(analysis.skipped):,} images of" if images else ":"
    shown = _shown(analysis)
    untrained = [one.source for one in shown if one.weights == RANDOM]
    which = "not trained" if len(untrained) == len(shown) else ", ".join(dict.fromkeys(untrained))
    random = f"; RANDOM WEIGHTS: {which}" if untrained else ""
    return f"{analysis.measure.name}{of} {Path(str(data)).name or data}{random}"


def write_analysis(analysis: Analysis, folder: Path | None, plot: str | None = None) -> Analysis:
    """The analysis with its record, which is written with its figures into a new or empty folder if one is given.

    The folder appears when all is there. `plot` is a further file: png, svg or pdf.
    """
    record, draw = record_of(analysis), analysis.measure.plot
    if folder is not None or plot is not None:
        names = next((one.classifier.labels for one in analysis.subjects if one.classifier), None)
        figure = draw(analysis.results, **taken(draw, {**analysis.settings, "names": names}))
        figure.suptitle("\n".join(filter(None, (heading(analysis), figure.get_suptitle()))), fontsize="medium")
        if folder is not None:
            with whole_folder(folder) as unfinished:
                for name in ("figure.png", "figure.svg"):
                    save(figure, unfinished / name)
                write_json(record, unfinished / "analysis.json")
        if plot is not None:
            save(figure, plot)
    return replace(analysis, record=record, folder=folder)
