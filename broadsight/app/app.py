"""The page: an image on the left, three tabs on the right. Colours and fonts are the report's; nothing is fetched."""

from pathlib import Path
from typing import Any

import gradio as gr
import yaml

from ..report.colours import DARK, LIGHT, TEXT, mix, readable
from ..visual import html
from ..visual.plots import PALETTE
from .answers import THRESHOLD, answer, cards, hint
from .candidates import Candidates
from .tabs import COMPUTE, LOOK, RAW, Page, add_compare_tab, add_look_tab, in_one_line
from .uploads import sample, samples

TITLE = "Broadsight"
EMPTY = "Drop an image or pick a sample: the answers appear here."
# Gradio's own labels are "Thumbnail 1 of 10".
NAME_SAMPLES = """() => { for (const button of document.querySelectorAll('#samples button')) {
  const name = button.querySelector('img')?.alt; if (name) button.setAttribute('aria-label', 'Sample: ' + name); } }"""
GALLERY: dict[str, Any] = dict(columns=5, rows=2, height="auto", object_fit="cover", format="png")
GALLERY |= dict(allow_preview=False, interactive=False, buttons=[], label="Samples", show_label=False)
INPUT: dict[str, Any] = dict(label="Image", sources=["upload", "clipboard"], format="png", height=320, buttons=[])
INPUT |= dict(elem_id="image", alt_text="The image that the models are asked about")
THEME: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("theme.yaml").read_text("utf-8"))


def build(candidates: Candidates, folder: Path, megabytes: float) -> gr.Blocks:
    """Build the page, for uploads of so many megabytes; GRADIO_TEMP_DIR must be `folder` before Gradio is imported."""
    what = f"Drop an image here\nor click to choose one, up to {megabytes:g} MB"
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        header = html.render("app/header", title=TITLE, untrained=candidates.untrained)
        gr.HTML(header, elem_id="bs-header", padding=False)
        tab = gr.State("predict")
        with gr.Row(equal_height=False, elem_id="bs-main"):
            with gr.Column(scale=2, min_width=280, elem_id="bs-image"):
                photo = gr.Image(sample(0), placeholder=what, **INPUT)
                gr.HTML(html.render("app/samples"), elem_id="samples-title", padding=False)
                gallery = gr.Gallery([(image, name) for name, image in samples()], elem_id="samples", **GALLERY)
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


def add_predict_tab(page: Page, blocks: gr.Blocks) -> None:
    """Add answers of the chosen models to the image, side by side, with their times."""
    names = page.candidates.names
    models = gr.CheckboxGroup(names, value=names[:3], label="Models to ask", elem_id="predict-models")
    scores: dict[str, Any] = dict(visible=len(page.candidates.classifiers) < len(names), elem_id="threshold")
    threshold = gr.Slider(0, 1, THRESHOLD, step=0.05, label="Lowest score of an object", **scores)
    button = gr.Button("Predict", variant="primary", size="md", elem_id="predict-button")
    result = gr.HTML(hint(EMPTY), elem_id="answers", padding=False)

    @in_one_line
    def predict(image: Any, models: Any, threshold: Any) -> str:
        if image is None:
            return hint(EMPTY)
        if not isinstance(models, list) or len(models) > 100 or not all(isinstance(name, str) for name in models):
            raise ValueError("expected a list of models' names; choose from those shown")
        asked = [page.candidates.of(name) for name in dict.fromkeys(models)]
        if not asked:
            return hint("Choose at least one model above.")
        lowest = float(threshold) if isinstance(threshold, (int, float)) and 0 <= threshold <= 1 else THRESHOLD
        shown = page.read(image)
        with page.candidates.computing:
            found = answer(asked, shown, lowest)
        return cards(found, names)

    triggers = [blocks.load, page.image.change, models.input, threshold.release, button.click]
    options: dict[str, Any] = dict(api_name="predict", trigger_mode="always_last", show_progress="minimal")
    given = [page.image, models, threshold]
    gr.on(triggers, predict, given, result, show_progress_on=result, **options, **RAW, **COMPUTE)


def look_of_page() -> dict[str, Any]:
    """Theme and style, as `launch` takes them; the theme, light and dark, has the contrast of the report's colours."""
    shades = {f"c{key}": ("#ffffff" if s < 0 else "#000000", abs(s)) for key, s in THEME["shades"].items()}
    blue = gr.themes.Color(name="blue", **{key: mix(PALETTE[0], *shade) for key, shade in shades.items()})
    values = dict(input_border_width="1px")
    for look, suffix in ((LIGHT, ""), (DARK, "_dark")):
        chosen = {name: getattr(look, colour) for colour, names in THEME["colours"].items() for name in names}
        chosen |= dict(
            button_primary_background_fill=PALETTE[0],
            button_primary_background_fill_hover=mix(PALETTE[0], *(("#ffffff", 0.12) if suffix else ("#000000", 0.15))),
            button_primary_text_color="#ffffff",
            link_text_color=readable(PALETTE[0], look, TEXT),
            input_background_fill=look.sunken if suffix else look.surface,
            input_border_color=mix(look.edge, look.ink, 0.2),
            block_shadow="none",
        )
        values |= {name + suffix: value for name, value in chosen.items()}
    hues: dict[str, Any] = dict(primary_hue=blue, secondary_hue=blue, neutral_hue=gr.themes.colors.slate)
    theme = gr.themes.Base(**hues, **THEME["fonts"], radius_size=gr.themes.sizes.radius_md)
    style = Path(__file__).with_name("style.css").read_text("utf-8")
    return dict(theme=theme.set(**values), css=style, head=html.render("app/head"))
