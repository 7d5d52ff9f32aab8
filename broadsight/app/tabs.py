"""The tabs "Look inside" and "Compare" of the page, what all tabs share, and errors as one line."""

import functools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import timm
from PIL import Image

from ..errors import first_line
from ..explanation.overlay import overlay
from . import inside as looking
from .answers import hint
from .candidates import Candidates
from .comparison import AXES, MOST, Row, compare, first_axes, plot, points, table
from .gate import without_paths
from .inside import Looked
from .uploads import read_upload, sample

LOOK = "look"  # name of a tab
GRADCAM, PLACE = looking.KINDS["gradcam"], looking.KINDS["query"]
DRAWN: dict[str, Any] = dict(format="png", interactive=False, buttons=["download", "fullscreen"])
NOTHING_SEEN = hint("Drop an image or pick a sample to look inside.")
NOTHING_MEASURED = hint("Choose models and press Measure: sizes, times and accuracies appear here.")
LINE = 300  # letters of an error
# Everything that computes waits in one queue.
COMPUTE: dict[str, Any] = dict(concurrency_id="compute", concurrency_limit=1)
# Values come as the browser sent them, and are checked by us: Gradio's own reading of images knows no limits.
RAW: dict[str, Any] = dict(preprocess=False)


@dataclass(frozen=True)
class Page:
    """The page while it is built."""

    candidates: Candidates
    folder: Path  # of uploads
    megabytes: float  # that an upload may have
    image: gr.Image  # the input that all tabs look at
    tab: gr.State  # name of the tab that is open

    def read(self, payload: Any) -> Image.Image:
        """The image that the image input holds."""
        return read_upload(payload, self.folder, self.megabytes)


def in_one_line(function: Any) -> Callable[..., Any]:
    """Decorate a function of the page so that its errors are shown as one line, never as a traceback."""

    @functools.wraps(function)
    def safe(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except gr.Error:  # of another such function
            raise
        except Exception as error:
            line = " ".join(first_line(error).split())
            line = line if len(line) <= LINE else line[: LINE - 3] + "..."
            if isinstance(error, ValueError):
                # Gradio shows it as HTML; our own sentences name no folder, those of libraries may
                title, text = "Not possible", escape(without_paths(line), quote=False)
            else:
                print(f"broadsight app: {function.__name__} failed: {line}", file=sys.stderr)
                title, text = "This failed", f"{type(error).__name__}; the terminal of broadsight app says why"
            raise gr.Error(text, print_exception=False, title=title) from None

    return safe


def add_look_tab(page: Page, tab: gr.Tab) -> None:
    """Add the tab's parts to the page that is being built."""
    candidates, names = page.candidates, page.candidates.classifiers
    if not names:
        gr.Markdown("Maps are of models that classify; none of those here does. Start the page with such a run.")
        return
    first = candidates.of(names[0])
    kinds = list(looking.kinds(first))
    seen, place = gr.State(None, time_to_live=1800), gr.State(looking.MIDDLE)
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=260):
            model = gr.Dropdown(names, value=names[0], label="Model", elem_id="look-model", filterable=False)
            kind = gr.Radio(kinds, value=_first_kind(kinds), label="What to look at", elem_id="look-kind")
            explains: dict[str, Any] = dict(visible=_first_kind(kinds) == GRADCAM, elem_id="look-class")
            target = gr.Dropdown(looking.classes_of(first), value=looking.LIKELY, label="Class to explain", **explains)
            depth = gr.Slider(1, 2, 1, step=1, label="Depth, from the input to the answer", elem_id="look-depth")
            title = gr.Dropdown([], label="Which map", elem_id="look-title", filterable=False)
            overview = gr.Button("Draw the overview sheet", elem_id="look-sheet-button")
            download = gr.DownloadButton("Download the sheet (PNG)", visible=False, elem_id="look-sheet-download")
        with gr.Column(scale=3, min_width=300):
            alt = "The image with the chosen map laid over it"
            label = "Map over the image; click a place to see what it attends to"
            shown = gr.Image(label=label, elem_id="look-map", alt_text=alt, **DRAWN)
            caption = gr.HTML(NOTHING_SEEN, elem_id="look-caption", padding=False)
    words: dict[str, Any] = dict(label="Overview: all maps, depth from left to right", elem_id="look-sheet")
    alt = "Overview sheet: the image, the answers and all maps"
    sheet = gr.Image(visible=False, alt_text=alt, **words, **DRAWN)

    def picked(found: Looked, place: Any, wanted: Any) -> tuple[Any, ...]:
        """Choices of titles, image and caption for a position of the slider, which counts from 1."""
        number = place - 1 if isinstance(place, (int, float)) else 0
        one = found.one(number, wanted)
        titles = [look.title for look in found.at(number)]
        choice = gr.Dropdown(titles, value=one.title, visible=len(titles) > 1)
        return choice, overlay(found.view, one), looking.described(one, found.depths)

    def nothing() -> tuple[Any, ...]:
        return None, gr.Slider(), gr.Dropdown(), None, NOTHING_SEEN

    @in_one_line
    def look(
        photo: Any, model: Any, kind: Any, target: Any, wanted: Any, before: Looked | None, place: tuple[float, float]
    ) -> tuple[Any, ...]:
        if photo is None:
            return nothing()
        one, image, which = candidates.of(model), page.read(photo), looking.kind_called(kind)
        asked_for = (photo["path"], model, kind, target, place)
        if before is not None and before.asked_for == asked_for:  # Gradio calls it input to pass a list by Tab
            return tuple(gr.skip() for _ in range(5))
        with candidates.computing:
            found = looking.look(one, image, which, looking.class_called(one, target), place)
        found = replace(found, asked_for=asked_for)
        slider = gr.Slider(maximum=max(2, found.depths), value=found.depths, visible=found.depths > 1)
        return found, slider, *picked(found, found.depths, wanted)

    @in_one_line
    def look_if_open(open_: Any, *rest: Any) -> tuple[Any, ...]:
        return look(*rest) if open_ == LOOK else nothing()

    @in_one_line
    def tap(event: gr.SelectData, photo: Any, model: Any, target: Any, wanted: Any) -> tuple[Any, ...]:
        """What the clicked place attends to."""
        spot = looking.place_clicked(event.index)
        found = look(photo, model, PLACE, target, wanted, None, spot)
        return spot, gr.Radio(value=PLACE), gr.Dropdown(visible=False), *found

    @in_one_line
    def leaf(found: Looked | None, place: Any, wanted: Any) -> tuple[Any, ...]:
        return nothing()[2:] if found is None else picked(found, place, wanted)

    @in_one_line
    def other_model(model: Any, kind: Any, target: Any) -> tuple[Any, ...]:
        """Choices that this model has; what was chosen stays if it can."""
        one = candidates.of(model)
        there, classes = list(looking.kinds(one)), looking.classes_of(one)
        chosen = kind if kind in there else _first_kind(there)
        explained = target if target in classes else looking.LIKELY
        return gr.Radio(there, value=chosen), gr.Dropdown(classes, value=explained, visible=chosen == GRADCAM)

    @in_one_line
    def draw_sheet(photo: Any, model: Any, target: Any) -> tuple[Any, ...]:
        one, image = candidates.of(model), page.read(photo)
        with candidates.computing:
            drawn = looking.sheet(one, image, looking.class_called(one, target))
        with tempfile.NamedTemporaryFile(dir=page.folder, prefix="overview-", suffix=".png", delete=False) as file:
            drawn.save(file, "PNG")
        return gr.Image(drawn, visible=True), gr.DownloadButton(value=file.name, visible=True)

    asked = [page.image, model, kind, target, title, seen, place]
    answered = [seen, depth, title, shown, caption]
    quiet: dict[str, Any] = dict(trigger_mode="always_last", show_progress="minimal", show_progress_on=shown, **RAW)
    private: dict[str, Any] = dict(api_visibility="private")
    gr.on([kind.input, target.input], look, asked, answered, api_name="look", **quiet, **COMPUTE)
    at_once: dict[str, Any] = dict(queue=False, show_progress="hidden") | private
    kind.input(lambda kind: gr.Dropdown(visible=kind == GRADCAM), kind, target, **at_once)
    tab.select(look, asked, answered, **quiet, **COMPUTE, **private)
    clicked = [page.image, model, target, title], [place, kind, target, *answered]
    shown.select(tap, *clicked, **quiet, **COMPUTE, **private)
    page.image.change(look_if_open, [page.tab, *asked], answered, **quiet, **COMPUTE, **private)
    # change, not input: that event also comes when the list is passed by Tab, and would undo the next choice
    changed = model.change(other_model, [model, kind, target], [kind, target], **quiet, **private)
    changed.success(look, asked, answered, **quiet, **COMPUTE, **private)
    hidden = quiet | private | dict(show_progress="hidden")
    gr.on([depth.input, title.input], leaf, [seen, depth, title], [title, shown, caption], **hidden)
    overview.click(draw_sheet, [page.image, model, target], [sheet, download], api_name="overview", **quiet, **COMPUTE)


def _first_kind(kinds: list[str]) -> str | None:
    """First choice among kinds of maps: the model's own where it has some."""
    own = [kind for kind in kinds if kind not in (GRADCAM, PLACE, looking.KINDS["attention"])]
    return next(iter(own or kinds), None)


def add_compare_tab(page: Page, tab: gr.Tab) -> None:
    """Add the tab's parts to the page that is being built."""
    candidates, names = page.candidates, page.candidates.names
    known = gr.State(None, time_to_live=3600)
    with gr.Row(equal_height=False):
        models = gr.CheckboxGroup(names, value=names[:MOST], label="Models", min_width=300, elem_id="compare-models")
        options: dict[str, Any] = dict(multiselect=True, max_choices=MOST, min_width=300, elem_id="compare-added")
        options |= dict(label="Add models of timm", info="With random weights: for their size and speed.")
        added = gr.Dropdown(sorted(timm.list_models()), value=[], **options)
    with gr.Row(equal_height=True):
        axes = [(words, axis) for axis, words in AXES.items()]
        across = gr.Radio(axes, value="latency", label="Across", min_width=300, elem_id="compare-x")
        upwards = gr.Radio(axes, value="accuracy", label="Upwards", min_width=300, elem_id="compare-y")
    button = gr.Button("Measure", variant="primary", size="md", elem_id="compare-button")
    shown = gr.HTML("", elem_id="compare-plot", padding=False)
    missing = gr.HTML("", elem_id="compare-missing", padding=False)
    figures = gr.HTML(NOTHING_MEASURED, elem_id="compare-table", padding=False)

    def plotted(rows: list[Row], x: Any, y: Any) -> tuple[str, str]:
        x, y = (axis if axis in AXES else "latency" for axis in (x, y))
        drawn, lacking = points(rows, x, y)
        return plot(drawn, AXES[x], AXES[y]), hint("Not in the plot: " + "; ".join(lacking) + ".") if lacking else ""

    @in_one_line
    def measure(models: Any, added: Any, x: Any, y: Any, before: Any) -> tuple[Any, ...]:
        if not isinstance(models, list) or not isinstance(added, list):
            raise ValueError("expected lists of models' names; choose from those shown")
        if len(models) + len(added) > MOST:
            raise ValueError(f"{len(models) + len(added)} models are chosen; expected at most {MOST}")
        with candidates.computing:
            chosen = [candidates.of(name) for name in dict.fromkeys(models)]
            chosen += [candidates.added(name) for name in dict.fromkeys(added)]
            rows = compare(chosen, sample(0))
        if before is None:  # the axes that suit what is there; afterwards they are the visitor's choice
            x, y = first_axes(rows)
        return rows, x, y, *plotted(rows, x, y), table(rows)

    @in_one_line
    def measure_first(*given: Any) -> tuple[Any, ...]:
        return measure(*given) if given[-1] is None else tuple(gr.skip() for _ in range(6))

    @in_one_line
    def turn(rows: list[Row] | None, x: Any, y: Any) -> tuple[Any, Any]:
        return (gr.skip(), "") if rows is None else plotted(rows, x, y)

    given = [models, added, across, upwards, known]
    found = [known, across, upwards, shown, missing, figures]
    quiet: dict[str, Any] = dict(trigger_mode="always_last", show_progress="minimal", show_progress_on=figures, **RAW)
    triggers = [models.input, added.input, button.click]
    gr.on(triggers, measure, given, found, api_name="compare", **quiet, **COMPUTE)
    tab.select(measure_first, given, found, api_visibility="private", **quiet, **COMPUTE)
    hidden = quiet | dict(show_progress="hidden", api_visibility="private")
    gr.on([across.input, upwards.input], turn, [known, across, upwards], [shown, missing], **hidden)
