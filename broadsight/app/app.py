"""The page: an image on the left, three tabs on the right."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr

from ..visual import html
from .candidates import Candidates
from .compare_tab import add_compare_tab
from .inside_tab import NAME as LOOK
from .inside_tab import add_look_tab
from .page_parts import RAW, Page, in_one_line
from .predict_tab import add_predict_tab
from .samples import sample, samples
from .theme import theme

TITLE = "Broadsight"
# Gradio's own labels are "Thumbnail 1 of 10".
NAME_SAMPLES = """() => { for (const button of document.querySelectorAll('#samples button')) {
  const name = button.querySelector('img')?.alt; if (name) button.setAttribute('aria-label', 'Sample: ' + name); } }"""
GALLERY: dict[str, Any] = dict(columns=5, rows=2, height="auto", object_fit="cover", format="png")
GALLERY |= dict(allow_preview=False, interactive=False, buttons=[])
INPUT: dict[str, Any] = dict(label="Image", sources=["upload", "clipboard"], format="png", height=320, buttons=[])
INPUT |= dict(elem_id="image", alt_text="The image that the models are asked about")


def build(candidates: Candidates, folder: Path, megabytes: float) -> gr.Blocks:
    """Build the page, to be launched with `look_of_page()`.

    Args:
        folder: Where Gradio puts uploads; GRADIO_TEMP_DIR must name it before Gradio is imported.
        megabytes: The most that an uploaded file may have.
    """
    what = f"Drop an image here\nor click to choose one, up to {megabytes:g} MB"
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        header = html.render("app/header", title=TITLE, untrained=candidates.untrained)
        gr.HTML(header, elem_id="bs-header", padding=False)
        tab = gr.State("predict")
        with gr.Row(equal_height=False, elem_id="bs-main"):
            with gr.Column(scale=2, min_width=280, elem_id="bs-image"):
                photo = gr.Image(sample(0), placeholder=what, **INPUT)
                gr.HTML(html.render("app/samples"), elem_id="samples-title", padding=False)
                shown = [(image, name) for name, image in samples()]
                gallery = gr.Gallery(shown, elem_id="samples", label="Samples", show_label=False, **GALLERY)
            with gr.Column(scale=5, min_width=320, elem_id="bs-tabs"), gr.Tabs():
                page = Page(candidates, folder, megabytes, photo, tab)
                with gr.Tab("Predict", id="predict", elem_id="tab-predict") as predict:
                    add_predict_tab(page, blocks)
                with gr.Tab("Look inside", id=LOOK, elem_id="tab-look") as look:
                    # before the tab's own: what is open decides whether a new image is looked into
                    opened(look, tab, LOOK)
                    add_look_tab(page, look)
                with gr.Tab("Compare", id="compare", elem_id="tab-compare") as compare:
                    add_compare_tab(page, compare)
                opened(predict, tab, "predict")
                opened(compare, tab, "compare")

        @in_one_line
        def pick(event: gr.SelectData) -> Any:
            return sample(event.index)

        gallery.select(pick, None, photo, show_progress="hidden", api_visibility="private", **RAW)
        blocks.load(None, None, None, js=NAME_SAMPLES)
    return blocks


def opened(tab: gr.Tab, state: gr.State, name: str) -> None:
    """Remember which tab a visitor has open."""
    tab.select(lambda: name, None, state, queue=False, show_progress="hidden", api_visibility="private")


def look_of_page() -> dict[str, Any]:
    """Theme and style, as `launch` takes them."""
    style = (files("broadsight.app") / "style.css").read_text(encoding="utf-8")
    return dict(theme=theme(), css=style, head=html.render("app/head"))
