"""The tab "Look inside": maps of one model over the image, with a slider through its depth."""

import tempfile
from dataclasses import replace
from typing import Any

import gradio as gr

from ..explanation.overlay import overlay
from . import inside as looking
from .answers import hint
from .inside import Looked
from .page_parts import COMPUTE, RAW, Page, in_one_line

NAME = "look"
GRADCAM = looking.KINDS["gradcam"]
DRAWN: dict[str, Any] = dict(format="png", interactive=False, buttons=["download", "fullscreen"])
EMPTY = hint("Drop an image or pick a sample to look inside.")


def add_look_tab(page: Page, tab: gr.Tab) -> None:
    """Add the tab's parts to the page that is being built."""
    candidates = page.candidates
    names = candidates.classifiers
    if not names:
        gr.Markdown("Maps are of models that classify; none of those here does. Start the page with such a run.")
        return
    first = candidates.of(names[0])
    kinds = list(looking.kinds(first))
    seen = gr.State(None, time_to_live=1800)
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
            shown = gr.Image(label="Map over the image", elem_id="look-map", alt_text=alt, **DRAWN)
            caption = gr.HTML(EMPTY, elem_id="look-caption", padding=False)
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
        return None, gr.Slider(), gr.Dropdown(), None, EMPTY

    @in_one_line
    def look(photo: Any, model: Any, kind: Any, target: Any, wanted: Any, before: Looked | None) -> tuple[Any, ...]:
        if photo is None:
            return nothing()
        one, image, which = candidates.of(model), page.read(photo), looking.kind_called(kind)
        asked_for = (photo["path"], model, kind, target)
        if before is not None and before.asked_for == asked_for:  # Gradio calls it input to pass a list by Tab
            return tuple(gr.skip() for _ in range(5))
        with candidates.computing:
            found = looking.look(one, image, which, looking.class_called(one, target))
        found = replace(found, asked_for=asked_for)
        slider = gr.Slider(maximum=max(2, found.depths), value=found.depths, visible=found.depths > 1)
        return found, slider, *picked(found, found.depths, wanted)

    @in_one_line
    def look_if_open(open_: Any, *rest: Any) -> tuple[Any, ...]:
        return look(*rest) if open_ == NAME else nothing()

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

    asked = [page.image, model, kind, target, title, seen]
    answered = [seen, depth, title, shown, caption]
    quiet: dict[str, Any] = dict(trigger_mode="always_last", show_progress="minimal", show_progress_on=shown, **RAW)
    private: dict[str, Any] = dict(api_visibility="private")
    gr.on([kind.input, target.input], look, asked, answered, api_name="look", **quiet, **COMPUTE)
    at_once: dict[str, Any] = dict(queue=False, show_progress="hidden") | private
    kind.input(lambda kind: gr.Dropdown(visible=kind == GRADCAM), kind, target, **at_once)
    tab.select(look, asked, answered, **quiet, **COMPUTE, **private)
    page.image.change(look_if_open, [page.tab, *asked], answered, **quiet, **COMPUTE, **private)
    # change, not input: that event also comes when the list is passed by Tab, and would undo the next choice
    model.change(other_model, [model, kind, target], [kind, target], **quiet, **private).success(
        look, asked, answered, **quiet, **COMPUTE, **private
    )
    hidden = quiet | private | dict(show_progress="hidden")
    gr.on([depth.input, title.input], leaf, [seen, depth, title], [title, shown, caption], **hidden)
    overview.click(draw_sheet, [page.image, model, target], [sheet, download], api_name="overview", **quiet, **COMPUTE)


def _first_kind(kinds: list[str]) -> str | None:
    """First choice among kinds of maps: the model's own where it has some."""
    own = [kind for kind in kinds if kind not in (GRADCAM, looking.KINDS["attention"])]
    return next(iter(own or kinds), None)
