"""The page's colours and letters: those of the report, from what the system has. Nothing is fetched."""

import gradio as gr

from ..report.colours import DARK, LIGHT, TEXT, mix, readable
from ..visual.plots import PALETTE

FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
# Shares of white or black in the shades that Gradio wants, light to dark; 500 is the colour itself.
SHADES = {"50": -0.94, "100": -0.86, "200": -0.7, "300": -0.5, "400": -0.25, "500": 0.0, "600": 0.12, "700": 0.28}
SHADES |= {"800": 0.42, "900": 0.56, "950": 0.7}


def theme() -> gr.themes.Base:
    """For light and dark, with the contrast that the report's colours have."""
    blue = _shades(PALETTE[0], "blue")
    chosen = gr.themes.Base(
        primary_hue=blue,
        secondary_hue=blue,
        neutral_hue=gr.themes.colors.slate,
        font=list(FONT),
        font_mono=list(MONO),
        radius_size=gr.themes.sizes.radius_md,
    )
    return chosen.set(
        body_background_fill=LIGHT.page,
        body_background_fill_dark=DARK.page,
        body_text_color=LIGHT.ink,
        body_text_color_dark=DARK.ink,
        body_text_color_subdued=LIGHT.muted,
        body_text_color_subdued_dark=DARK.muted,
        background_fill_primary=LIGHT.surface,
        background_fill_primary_dark=DARK.surface,
        background_fill_secondary=LIGHT.sunken,
        background_fill_secondary_dark=DARK.sunken,
        block_background_fill=LIGHT.surface,
        block_background_fill_dark=DARK.surface,
        border_color_primary=LIGHT.edge,
        border_color_primary_dark=DARK.edge,
        block_info_text_color=LIGHT.muted,
        block_info_text_color_dark=DARK.muted,
        block_label_background_fill=LIGHT.surface,
        block_label_background_fill_dark=DARK.surface,
        block_label_text_color=LIGHT.muted,
        block_label_text_color_dark=DARK.muted,
        block_title_text_color=LIGHT.ink,
        block_title_text_color_dark=DARK.ink,
        button_primary_background_fill=PALETTE[0],
        button_primary_background_fill_dark=PALETTE[0],
        button_primary_background_fill_hover=mix(PALETTE[0], "#000000", 0.15),
        button_primary_background_fill_hover_dark=mix(PALETTE[0], "#ffffff", 0.12),
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark="#ffffff",
        link_text_color=readable(PALETTE[0], LIGHT, TEXT),
        link_text_color_dark=readable(PALETTE[0], DARK, TEXT),
        input_background_fill=LIGHT.surface,
        input_background_fill_dark=DARK.sunken,
        input_border_width="1px",
        input_border_color=mix(LIGHT.edge, LIGHT.ink, 0.2),
        input_border_color_dark=mix(DARK.edge, DARK.ink, 0.2),
        block_shadow="none",
        block_shadow_dark="none",
    )


def _shades(colour: str, name: str) -> gr.themes.Color:
    found = {f"c{key}": mix(colour, "#ffffff" if share < 0 else "#000000", abs(share)) for key, share in SHADES.items()}
    return gr.themes.Color(name=name, **found)
