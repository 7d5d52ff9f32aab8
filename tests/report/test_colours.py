"""Every colour can be told from what it lies on, by day and by night."""

import pytest

from broadsight.report.colours import DARK, GRAPHIC, LEVELS, LIGHT, TEXT, contrast, heat, mix, readable, style
from broadsight.visual.plots import PALETTE


def test_contrast_and_style__as_wcag_defines_it_with_names_in_both_themes():
    assert contrast("#000000", "#ffffff") == contrast("#ffffff", "#000000") == 21
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)
    assert mix("#000000", "#ffffff", 0) == "#000000" and mix("#000000", "#ff8000", 0.5) == "#804000"
    blocks = [part.split(":root{")[1].split("}")[0] for part in style().split("@media")]  # of both themes
    light, dark = ({part.partition(":")[0] for part in block.split(";")} - {""} for block in blocks)
    assert light == dark and len(light) > 50


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_heat__are_read(theme):
    for ground in (theme.page, theme.surface, theme.sunken):
        assert contrast(theme.ink, ground) >= 7 and contrast(theme.muted, ground) >= TEXT
    assert contrast(readable(PALETTE[0], theme, TEXT), theme.surface) >= TEXT
    assert all(contrast(readable(colour, theme, GRAPHIC), theme.surface) >= GRAPHIC for colour in PALETTE)
    for levels in (heat(theme, PALETTE[0]), heat(theme, PALETTE[5])):
        assert len(levels) == LEVELS + 1 and levels[0][0] == theme.surface
        assert all(contrast(ground, ink) >= TEXT for ground, ink in levels)
