"""The tab "Compare": size, MACs, latency and accuracy of models, as a plot and as a table."""

from typing import Any

import gradio as gr
import timm

from .answers import hint
from .comparison import AXES, MOST, Row, compare, first_axes, plot, points, table
from .page_parts import COMPUTE, RAW, Page, in_one_line
from .samples import sample

EMPTY = "Choose models and press Measure: sizes, times and accuracies appear here."


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
    figures = gr.HTML(hint(EMPTY), elem_id="compare-table", padding=False)

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
