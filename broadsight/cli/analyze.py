"""The command that measures what models do inside: analyze."""

import json as json_
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..errors import nearest
from ..files import next_folder
from .evaluate import new_folder
from .parser import (
    DONE,
    INTERRUPTED,
    MOST,
    TIMM_NAMES,
    AllowOutside,
    Arg,
    Checkpoint,
    Device,
    ModelArgs,
    Pretrained,
    Size,
    Threads,
    UsageError,
    check_options,
    refuse_all,
    register_models,
    typed,
    value_of,
)
from .terminal import check_writable, progress_bar, show

if TYPE_CHECKING:
    from rich.table import Table

    from ..analysis.request import Asked
    from ..analysis.run import Analysis
    from .terminal import Progress

FOLDER = "analyses"
SHOWN = "models that are shown images"


def analyze(
    measure: Annotated[
        str | None, Arg("what to measure; list, or nothing, shows what there is", True, "MEASURE")
    ] = None,
    models: Annotated[
        list[str] | None,
        Arg(
            "folders of runs and timm names, all measured on the same images; NAME@FILE brings its weights",
            True,
            "MODEL|RUN",
        ),
    ] = None,
    data: Annotated[
        str | None,
        Arg(
            "images, as eval takes them, or any folder of them where no labels are needed; none: what the run "
            "validated on, or else scenes",
            metavar="DATA",
        ),
    ] = None,
    samples: Annotated[
        int | None, Arg("so many images, drawn by chance; without it what the measure takes", of=(SHOWN,), least=1)
    ] = None,
    part: Annotated[
        Literal["auto", "train", "val", "test", "all"],
        Arg("of DATA; auto: what is set apart to validate, or all", of=(SHOWN,)),
    ] = "auto",
    set: Annotated[
        list[str] | None,
        Arg("options of the measure, which list names, such as pairs=8", metavar="KEY=VALUE", pairs=True),
    ] = None,
    out: Annotated[str | None, Arg("folder for the result; without it a new one in analyses/", metavar="DIR")] = None,
    plot: Annotated[str | None, Arg("a further file for the figure: png, svg or pdf", metavar="FILE")] = None,
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = True,
    model_args: ModelArgs = None,
    size: Size = None,
    batch: Annotated[
        int | None, Arg("images per call; without it what suits the measure", of=(SHOWN,), least=1)
    ] = None,
    workers: Annotated[int | None, Arg("processes that prepare images", of=(SHOWN,), least=0, most=MOST)] = None,
    threads: Threads = None,
    device: Device = "auto",
    seed: Annotated[
        int | None,
        Arg(
            "of samples, random weights and what a measure draws; and of scenes, where it is the run's",
            of=(SHOWN, TIMM_NAMES),
            least=0,
        ),
    ] = None,
    strict: Annotated[bool, Arg("stop at an image that cannot be read instead of skipping it", of=(SHOWN,))] = False,
    root: Annotated[str | None, Arg("where a timm dataset lies or is put", metavar="DIR", of=(SHOWN,))] = None,
    download: Annotated[bool, Arg("let a timm dataset be fetched", of=(SHOWN,))] = False,
    allow_outside: AllowOutside = False,
    json: Annotated[
        str | None, Arg("print the record as JSON, not tables, or write it to FILE; comes last", False, "FILE", "-")
    ] = None,
) -> int:
    """Measure what models do inside: the papers' figures, as PNG, SVG and numbers."""
    given = dict(locals())
    check_writable(json if json != "-" else None)
    if measure in (None, "list"):
        refuse_all(analyze, given, ("measure", "json"), "analyze list shows all measures alone")
        return _list(json)
    register_models()
    from ..analysis.measures import find_measure
    from ..analysis.record import write_analysis
    from ..analysis.request import Asked
    from ..data.inside import permit_outside
    from ..files import write_text
    from ..prediction.classification import printable
    from ..training.recipes import assignments
    from ..visual.plots import need_matplotlib, plot_format

    permit_outside(allow_outside)
    _check_order(measure, models or [])
    entry = find_measure(measure)
    check_options(analyze, given, _facts(entry.name, models or [], data))
    need_matplotlib()
    if plot is not None:
        check_writable(plot)
        plot_format(plot)
    folder = new_folder(out, FOLDER)
    asked = Asked(
        measure,
        tuple(models or ()),
        data,
        part=part,
        root=root,
        download=download,
        samples=samples,
        options={key: _value(text) for key, text in assignments(set or [], "--set").items()},
        checkpoint=checkpoint,
        pretrained=pretrained,
        model_args={key: value_of(text) for key, text in assignments(model_args or [], "--model-args").items()},
        size=size,
        batch=batch,
        workers=workers,
        threads=threads,
        device=device,
        strict=strict,
        seed=seed,
    )
    with progress_bar() as progress:
        analysis = _run(asked, progress)
    for note in analysis.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    if folder is None:
        title, more = analysis.subjects[0].label.partition(",")[0] if analysis.subjects else "", len(asked.models) - 1
        folder = next_folder(FOLDER, *filter(None, (entry.name, title, f"and-{more}-more" if more else "")))
    record = write_analysis(analysis, folder, typed(), plot)
    if json and json != "-":
        write_text(json_.dumps(record, indent=1) + "\n", Path(json))
    if json == "-":
        print(json_.dumps(record, indent=1))
    else:
        for table in _tables(analysis):
            show(table, whole=True)
        print(f"written: {folder} (figure.png, figure.svg, analysis.json)")
    return INTERRUPTED if analysis.how["interrupted"] else DONE


def _facts(measure: str, models: list[str], data: str | None) -> dict[str, str | None]:
    """What options are for; see `Arg.of`."""
    written = [name for name in models if measure == "front" and Path(name).is_file()]
    named = [name for name in models if name not in written and not Path(name).is_dir()]
    asked = measure != "front" or data is not None or bool(named)
    return {
        SHOWN: None if asked else "front reads what training and eval have found; give --data to ask again",
        TIMM_NAMES: None if named else f"{' '.join(models[:3])} brings weights and arguments of its own",
    }


def _run(asked: "Asked", progress: "Progress") -> "Analysis":
    if asked.measure == "front":
        from ..analysis.measured_fronts import analyze_front

        return analyze_front(asked, progress)
    from ..analysis.run import analyze

    return analyze(asked, progress)


def _list(json: str | None) -> int:
    """A table of all measures."""
    from ..analysis.measures import MEASURES
    from ..files import write_text

    entries = [
        dict(name=one.name, about=one.about, needs=one.thing, examples=one.examples, source=one.source)
        | dict(images=one.samples, least=one.least, labels=one.labels, options=dict(one.options))
        for one in MEASURES.values()
    ]
    if json is not None:
        text = json_.dumps(entries, indent=1)
        print(text) if json == "-" else write_text(text + "\n", Path(json))
        return DONE
    from rich.table import Table

    table = Table()
    table.add_column("measure", no_wrap=True)
    for name in ("says", "needs", "from", "options"):
        table.add_column(name)
    for one in MEASURES.values():
        table.add_row(one.name, one.about, one.thing, one.source, ", ".join(one.options) or "-")
    show(table)
    print("broadsight analyze MEASURE MODEL|RUN... --data DATA    # docs/analysis.md says how to read them")
    return DONE


def _check_order(measure: str, models: list[str]) -> None:
    """Whoever names a model first is told that the measure comes first."""
    from ..analysis.measures import MEASURES

    if measure in MEASURES or nearest(measure, MEASURES, alike=0.7):
        return
    named = [name for name in models if name in MEASURES]
    import timm

    if named or Path(measure).is_dir() or timm.is_model(measure.partition("@")[0].partition(".")[0]):
        first = named[0] if named else "MEASURE"
        raise UsageError(
            f"{measure} is a model, the measure comes first: broadsight analyze {first} {measure}; "
            f"measures are {', '.join(MEASURES)}"
        )


def _value(text: str) -> Any:
    """What an option means: a number, a word, or several joined by commas."""
    if "," in text and not text.lstrip().startswith(("[", "{")):
        return tuple(value_of(part.strip()) for part in text.split(",") if part.strip())
    value = value_of(text)
    return tuple(value) if isinstance(value, list) else value


def _tables(analysis: "Analysis") -> list["Table"]:
    """For each model what was measured."""
    from rich.table import Table

    tables = []
    for label, result in analysis.results.items():
        columns, rows = analysis.measure.rows(result)
        table = Table(title=f"{analysis.measure.name}: {label}", title_justify="left")
        for place, name in enumerate(columns):
            table.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(_cell, row))
        tables.append(table)
    return tables


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
