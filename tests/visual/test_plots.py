"""Formats of plots, and names in them."""

import sys

import pytest

from broadsight.visual.plots import PLOT_FORMATS, plot_format, save
from tests.data.nasty_names import NASTY
from tests.refusals import refused

BEGINNINGS = dict(png=b"\x89PNG", svg=b"<?xml", pdf=b"%PDF")


@pytest.mark.parametrize("suffix", PLOT_FORMATS)
def test_save__in_the_format_that_the_name_asks_for(tmp_path, suffix):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1))
    path = tmp_path / f"figure.{suffix.upper()}"
    save(figure, path)
    assert path.read_bytes().startswith(BEGINNINGS[suffix])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_save__names_are_no_formulas(tmp_path):
    """A run or class may be called so that matplotlib's own reading of formulas would fail on it."""
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 2), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(NASTY, 1):
        axes.plot([place, place], [1, 1e4], label=name)
    axes.set(yscale="log", title="\n".join(name[:20] for name in NASTY), xlabel="$\\frac$")
    axes.set_xticks(range(1, 1 + len(NASTY)), NASTY)
    axes.legend()
    save(figure, tmp_path / "figure.png")
    shown = [label.get_text() for label in axes.get_xticklabels()]
    assert "$\\frac$" in shown and "byte \\xff" in shown and not any("\x1b" in text for text in shown)
    assert axes.get_yticklabels()[1].get_parse_math()  # powers of ten still are


def test_plot_format__refuses_others_and_says_what_to_install(monkeypatch):
    refused("^cannot plot to 'x.jpg'; expected a name ending in png, svg, pdf$", plot_format, "x.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused(r'^plotting needs matplotlib; run: pip install "broadsight\[plot\]"$', plot_format, "x.png")
