"""From what a user asks of `bench` to a report: of one size, or of several and how costs grow with it."""

import json
from dataclasses import asdict, fields
from typing import Any

from rich.table import Table

from ..deployment.formats import runtimes
from ..visual.plots import plot_format
from . import accuracy_plot, report, run, scaling
from .request import Request
from .settings import Settings


def settings_of(request: Request) -> Settings:
    """What is measured; a ValueError if it cannot be."""
    asked: dict[str, Any] = {one.name: getattr(request, one.name, one.default) for one in fields(Settings)}
    asked |= dict(size=request.sizes[0], runtimes=request.runtime, pools=request.pool, broadcasts=request.broadcast)
    asked |= dict(necks=request.neck, precisions=request.precision)
    return Settings(**asked)


def bench(request: Request, progress: run.Progress) -> run.Report | scaling.Growth:
    """Time models side by side; everything is checked before the first is built."""
    sizes = request.sizes
    request.refuse_ignored(request.facts(any(name in runtimes() for name in request.runtime)))
    for path in filter(None, (request.plot, request.scatter)):
        plot_format(path)
    settings, models = settings_of(request), list(request.models)
    if request.scatter:
        accuracy_plot.check(run.expand(models), settings.size)
    kept: dict[str, Any] = {} if request.artefacts is None else {"artefacts": request.artefacts}
    if len(sizes) == 1:
        return run.measure(models, settings, progress, **kept)
    return scaling.measure(models, settings, sizes, request.growth_from, progress, **kept)


def record_of(found: run.Report | scaling.Growth, request: Request) -> dict[str, Any]:
    """What JSON files hold: null for what is no number."""
    record = json.dumps({"command": request.command, **asdict(found)})
    return json.loads(record, parse_constant=lambda _: None)


def draw(found: run.Report | scaling.Growth, request: Request) -> None:
    """Write the plots that are asked for."""
    if request.plot:
        (scaling if isinstance(found, scaling.Growth) else report).plot(found, request.plot)  # ty: ignore[invalid-argument-type]
    if request.scatter and isinstance(found, run.Report):
        accuracy_plot.plot([found], request.scatter)


def render(found: run.Report | scaling.Growth) -> Table:
    """A table for the terminal."""
    return scaling.render(found) if isinstance(found, scaling.Growth) else report.render(found)
