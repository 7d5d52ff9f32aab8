"""The tab "Predict": answers of the chosen models to the image, side by side, with their times."""

from typing import Any

import gradio as gr

from .answers import THRESHOLD, answer
from .cards import cards, hint
from .page_parts import COMPUTE, RAW, Page, in_one_line

FIRST = 3  # models that are chosen from the beginning
EMPTY = "Drop an image or pick a sample: the answers appear here."


def add_predict_tab(page: Page, blocks: gr.Blocks) -> None:
    """Add the tab's parts to the page that is being built."""
    names = page.candidates.names
    models = gr.CheckboxGroup(names, value=names[:FIRST], label="Models to ask", elem_id="predict-models")
    scores: dict[str, Any] = dict(visible=len(page.candidates.classifiers) < len(names), elem_id="threshold")
    threshold = gr.Slider(0, 1, THRESHOLD, step=0.05, label="Lowest score of an object", **scores)
    button = gr.Button("Predict", variant="primary", size="md", elem_id="predict-button")
    result = gr.HTML(hint(EMPTY), elem_id="answers", padding=False)

    @in_one_line
    def predict(image: Any, models: Any, threshold: Any) -> str:
        if image is None:
            return hint(EMPTY)
        asked = [page.candidates.of(name) for name in dict.fromkeys(_list(models))]
        if not asked:
            return hint("Choose at least one model above.")
        lowest = float(threshold) if isinstance(threshold, (int, float)) and 0 <= threshold <= 1 else THRESHOLD
        shown = page.read(image)
        with page.candidates.computing:
            found = answer(asked, shown, lowest)
        return cards(found, names)

    triggers = [blocks.load, page.image.change, models.input, threshold.release, button.click]
    options: dict[str, Any] = dict(
        api_name="predict", trigger_mode="always_last", show_progress="minimal", show_progress_on=result
    )
    gr.on(triggers, predict, [page.image, models, threshold], result, **options, **RAW, **COMPUTE)


def _list(value: Any) -> list[Any]:
    """Check the names that were sent: the page sends a list of texts."""
    if not isinstance(value, list) or len(value) > 100 or not all(isinstance(name, str) for name in value):
        raise ValueError("expected a list of models' names; choose from those shown")
    return value
