"""Draws the spectra of layers: log-amplitudes over frequency, the highest over depth, and the spectra themselves."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..visual.plots import save
from .layer_chart import check_results, draw_legend, draw_lines, new_figure
from .measures.spectrum import Spectra

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

COLUMNS = 3  # models side by side, at most
PANELS = 8  # spectra side by side, at most
# Where the colours of spectra end. A branch that enlarges its map may have no highest frequency at all, and would leave
# no colours for the rest.
LOWEST = -10.0
DEPTH = 0.9  # where on the colour scale the last layer is: beyond, it is too bright for a line on white


def plot_spectrum(
    spectra: Mapping[str, Spectra], path: str | Path | None = None, *, layers: Sequence[int] | None = None
) -> "Figure":
    """Draw what `plot_log_amplitude` does, and below that what `plot_amplitude_spectrum` does."""
    check_results(path, spectra, Spectra, "log_amplitude")
    (width, above), (wide, below) = _size_of_curves(spectra), _size_of_panels(spectra, layers)
    figure = new_figure(max(width, wide), above + below)
    parts: Any = figure.subfigures(2, 1, height_ratios=[above, below])
    _draw_curves(parts[0], spectra, layers)
    _draw_panels(parts[1], spectra, layers)
    if path is not None:
        save(figure, path)
    return figure


def plot_log_amplitude(
    spectra: Mapping[str, Spectra], path: str | Path | None = None, *, layers: Sequence[int] | None = None
) -> "Figure":
    """Draw relative log-amplitudes over frequency, a panel for each model and a line for each layer, dark to bright
    with depth; and beside these the highest frequency over depth, one line for each model.

    Args:
        spectra: What `log_amplitude` gave, by the name that the titles show.
        path: A png, svg or pdf file to write, which appears complete or not at all.
        layers: Numbers of those to draw, from 0; all by default.
    """
    check_results(path, spectra, Spectra, "log_amplitude")
    figure = new_figure(*_size_of_curves(spectra))
    _draw_curves(figure, spectra, layers)
    if path is not None:
        save(figure, path)
    return figure


def plot_amplitude_spectrum(
    spectra: Mapping[str, Spectra], path: str | Path | None = None, *, layers: Sequence[int] | None = None
) -> "Figure":
    """Draw the spectra themselves, frequency 0 in the middle: a row for each model, depth from left to right.

    Colours are log-amplitudes less that of frequency 0, on one scale, which ends at -10.

    Args:
        spectra: What `log_amplitude` gave, by the name that the rows show.
        path: A png, svg or pdf file to write, which appears complete or not at all.
        layers: Numbers of those to draw, from 0; by default up to eight, evenly spaced.
    """
    check_results(path, spectra, Spectra, "log_amplitude")
    figure = new_figure(*_size_of_panels(spectra, layers))
    _draw_panels(figure, spectra, layers)
    if path is not None:
        save(figure, path)
    return figure


def _size_of_curves(spectra: Mapping[str, Spectra]) -> tuple[float, float]:
    return 3.4 * min(len(spectra), COLUMNS) + 5.2, 4.0 * math.ceil(len(spectra) / COLUMNS)


def _draw_curves(figure: "Figure | SubFigure", spectra: Mapping[str, Spectra], layers: Sequence[int] | None) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    columns, shade = min(len(spectra), COLUMNS), colormaps["viridis"]
    parts: Any = figure.subfigures(1, 2, width_ratios=[3.4 * columns + 0.6, 4.6])
    curves, summary = parts
    panels = curves.subplots(math.ceil(len(spectra) / columns), columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(spectra) :]:
        panel.set_visible(False)
    for panel, (label, one) in zip(panels.flat, spectra.items(), strict=False):
        last = max(len(one.layers) - 1, 1)
        for number in _chosen(one, layers):
            layer = one.layers[number]
            panel.plot(layer.frequencies, layer.relative, color=shade(DEPTH * number / last), linewidth=1.2)
        panel.axhline(0, color="grey", linewidth=0.6)
        panel.set_title(label, fontsize=10)
        panel.set_xlabel("frequency, π")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[:, 0]:
        panel.set_ylabel("Δ log amplitude")
    depth = ScalarMappable(Normalize(0, 1 / DEPTH), shade)
    bar = curves.colorbar(depth, ax=panels, label="depth", ticks=[0, 1], boundaries=[i / 64 for i in range(65)])
    bar.ax.set_yticklabels(["first", "last"])
    high = summary.subplots()
    lines = {label: [one.layers[i].high for i in _chosen(one, layers)] for label, one in spectra.items()}
    draw_lines(high, lines, "Δ log amplitude at the highest frequency")
    draw_legend(high)


def _size_of_panels(spectra: Mapping[str, Spectra], layers: Sequence[int] | None) -> tuple[float, float]:
    most = max(len(_chosen(one, layers, PANELS)) for one in spectra.values())
    return 1.5 * most + 2.0, 1.75 * len(spectra) + 0.5


def _draw_panels(figure: "Figure | SubFigure", spectra: Mapping[str, Spectra], layers: Sequence[int] | None) -> None:
    chosen = [_chosen(one, layers, PANELS) for one in spectra.values()]
    panels = figure.subplots(len(spectra), max(map(len, chosen)), squeeze=False)
    images = {
        (row, column): one.layers[number].spectrum - one.layers[number].log_amplitude[0]
        for row, one in enumerate(spectra.values())
        for column, number in enumerate(chosen[row])
    }
    highest = max(float(x.max()) for x in images.values())
    lowest = min(float(x.min()) for x in images.values())
    beyond = lowest < LOWEST
    lowest = max(lowest, LOWEST)
    drawn: Any = None
    for row, column in ((i, j) for i in range(panels.shape[0]) for j in range(panels.shape[1])):
        panel = panels[row, column]
        panel.set_xticks([])
        panel.set_yticks([])
        if (row, column) not in images:
            panel.set_visible(False)
            continue
        scale: dict[str, Any] = dict(cmap="viridis", vmin=lowest, vmax=max(highest, lowest + 1e-6))
        drawn = panel.imshow(images[row, column].numpy(), **scale, aspect="auto")
        panel.set_title(f"layer {chosen[row][column] + 1}", fontsize=9)
    for row, label in enumerate(spectra):
        panels[row, 0].set_ylabel(label, fontsize=9)
    figure.colorbar(drawn, ax=panels, label="Δ log amplitude", extend="min" if beyond else "neither")


def _chosen(one: Spectra, layers: Sequence[int] | None, most: int | None = None) -> list[int]:
    count = len(one.layers)
    if layers is not None:
        for number in layers:
            if not 0 <= number < count:
                raise ValueError(f"there is no layer {number}; layers are numbered from 0 to {count - 1}")
        return list(layers)
    if most is None or count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
