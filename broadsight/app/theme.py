"""Colours and fonts of the page: those of the report, from what the system has. Nothing is fetched."""

import gradio as gr

from ..report.colours import DARK, LIGHT, TEXT, mix, readable
from ..visual.plots import PALETTE

FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
# Shares of white or black in the shades that Gradio wants, light to dark; 500 is the colour itself.
SHADES = {"50": -0.94, "100": -0.86, "200": -0.7, "300": -0.5, "400": -0.25, "500": 0.0, "600": 0.12, "700": 0.28}
SHADES |= {"800": 0.42, "900": 0.56, "950": 0.7}
# Gradio's names of colours, by their names in the report's themes
COLOURS = {
    "page": ["body_background_fill"],
    "ink": ["body_text_color", "block_title_text_color"],
    "muted": ["body_text_color_subdued", "block_info_text_color", "block_label_text_color"],
    "surface": ["background_fill_primary", "block_background_fill", "block_label_background_fill"],
    "sunken": ["background_fill_secondary"],
    "edge": ["border_color_primary"],
}


def theme() -> gr.themes.Base:
    """Make the theme, for light and dark, with the contrast that the report's colours have."""
    shades = {f"c{key}": mix(PALETTE[0], "#ffffff" if s < 0 else "#000000", abs(s)) for key, s in SHADES.items()}
    blue = gr.themes.Color(name="blue", **shades)
    values = dict(input_border_width="1px")
    for look, suffix in ((LIGHT, ""), (DARK, "_dark")):
        chosen = {name: getattr(look, colour) for colour, names in COLOURS.items() for name in names}
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
    base = gr.themes.Base(
        primary_hue=blue,
        secondary_hue=blue,
        neutral_hue=gr.themes.colors.slate,
        font=list(FONT),
        font_mono=list(MONO),
        radius_size=gr.themes.sizes.radius_md,
    )
    return base.set(**values)
