"""What frequencies the features of every layer are made of: amplitude spectra and relative log-amplitudes over depth.

As in the EMSNet chapter (Figs. 3.5, 3.6 and 3.10), after Park and Kim, ICLR 2022: logarithms of amplitudes, averaged
over channels and images. Curves are their diagonal from the centre, frequency 0, to the corner, frequency pi down and
across. A layer that raises the high end sharpens; one that lowers it blurs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.blocks import Block
from ...inspection.passing import Images, Seen
from .base import Measure, Rows, register_measure
from .frame import Figure, Result, draw_legend, draw_lines, draws, new_figure, pass_blocks, plain

FLOOR = 1e-6
COLUMNS = 3  # models side by side, at most
PANELS = 8  # spectra side by side, at most
LOWEST = -10.0  # the end of the colour scale: a branch that enlarges its map may have next to no high frequencies
DEPTH = 0.9  # where on the colour scale the last layer is: beyond, it is too bright for a line on white


@dataclass(frozen=True)
class LayerSpectrum(Result):
    """One layer; means over images and channels."""

    name: str  # path of the block or module
    frequencies: tuple[float, ...]  # from 0 to 1, in units of pi; 1 is reached if the shorter side of the map is even
    log_amplitude: tuple[float, ...]  # natural logarithm of the amplitude at these, down and across alike
    spectrum: Tensor  # (h, w) of log-amplitudes, frequency 0 at [h // 2, w // 2]

    @property
    def relative(self) -> tuple[float, ...]:  # to that of frequency 0
        return tuple(x - self.log_amplitude[0] for x in self.log_amplitude)

    @property
    def high(self) -> float:  # of the highest frequency
        return self.relative[-1]

    def record(self) -> dict[str, Any]:
        spectrum = [[float(f"{x:.6g}") for x in row] for row in self.spectrum.tolist()]
        record: dict[str, Any] = dict(name=self.name, grid=self.spectrum.shape, high=self.high, spectrum=spectrum)
        record |= dict(frequencies=self.frequencies, log_amplitude=self.log_amplitude, relative=self.relative)
        return plain(record)


@dataclass(frozen=True)
class Spectra(Result):
    """All layers in order of execution, and the number of images."""

    layers: tuple[LayerSpectrum, ...]
    images: int


def log_amplitude(
    model: nn.Module,
    images: Images,
    *,
    layers: str | Sequence[str] | None = None,
    floor: float = FLOOR,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> Spectra:
    """Spectrum, not normalised, of what every block of a model gives for images of one size, without class tokens.

    Args:
        layers: Other modules than the blocks, as `find_layers` takes them: "*.mixer.static" are the static branches of
            an EMSNet, "*.dynamic.local" its C-MHSA with propagation, "*.dynamic.global_" its G-MHSA.
        floor: Added to every amplitude, since 0 has no logarithm.
    """
    if not floor > 0:
        raise ValueError(f"floor={floor!r}; expected a small number above 0, such as {FLOOR}")
    sums: dict[str, Tensor] = {}

    def see(block: Block, features: Tensor) -> None:
        half = torch.fft.rfft2(features if features.dtype == torch.float64 else features.float())
        sizes = half.abs().add_(floor).log_().mean(1).cpu().double().sum(0)  # h w//2+1
        if block.name in sums and tuple(features.shape[2:]) != block.layout.grid:
            here, first = "x".join(map(str, features.shape[2:])), "x".join(map(str, block.layout.grid))
            raise ValueError(f"maps of {block.name} are {here} and {first}; pass images of one size")
        sums[block.name] = sums.get(block.name, 0) + sizes

    blocks, passed = pass_blocks(model, images, see, layers=layers, batch_size=batch_size, seen=seen)
    return Spectra(tuple(_layer(x.name, sums[x.name] / passed, x.layout.grid[1]) for x in blocks), passed)


def _layer(name: str, half: Tensor, width: int) -> LayerSpectrum:
    """From the half (h, w // 2 + 1) of a spectrum that a real map has; the other half mirrors it."""
    height = len(half)
    down, across = torch.arange(height)[:, None], torch.arange(width)
    mirrored = across > width // 2
    whole = half[torch.where(mirrored, -down % height, down), torch.where(mirrored, -across % width, across)]
    count = min(height, width)
    frequencies = [2 * k / count for k in range(count // 2 + 1)]
    line = [_between(whole, f * height / 2, f * width / 2) for f in frequencies]
    return LayerSpectrum(name, tuple(frequencies), tuple(line), torch.fft.fftshift(whole))


def _between(whole: Tensor, row: float, column: float) -> float:
    """The value between the frequencies around, weighted by how near they are; a spectrum is periodic."""
    rows, columns = ([(math.floor(x), 1 - x % 1), (math.floor(x) + 1, x % 1)] for x in (row, column))
    value = 0.0
    for (i, near_row), (j, near_column) in product(rows, columns):
        if near_row * near_column:
            value += near_row * near_column * float(whole[i % len(whole), j % whole.shape[1]])
    return value


@draws(Spectra, "log_amplitude")
def plot_spectrum(spectra: Mapping[str, Spectra]) -> Figure:
    """Draw relative log-amplitudes of each layer, beside them the highest frequency over depth, and below spectra."""
    layers = [len(one.layers) for one in spectra.values()]
    numbers = [[round(i * (n - 1) / max(min(n, PANELS) - 1, 1)) for i in range(min(n, PANELS))] for n in layers]
    columns = min(len(spectra), COLUMNS)
    above, below = 4.0 * math.ceil(len(spectra) / columns), 1.75 * len(spectra) + 0.5
    figure = new_figure(max(3.4 * columns + 5.2, 1.5 * max(map(len, numbers)) + 2.0), above + below)
    parts: Any = figure.subfigures(2, 1, height_ratios=[above, below])
    _draw_curves(parts[0], spectra, columns)
    _draw_maps(parts[1], spectra, numbers)
    return figure


def _draw_curves(figure: Any, spectra: Mapping[str, Spectra], columns: int) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    shade = colormaps["viridis"]
    curves, summary = figure.subfigures(1, 2, width_ratios=[3.4 * columns + 0.6, 4.6])
    panels = curves.subplots(math.ceil(len(spectra) / columns), columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(spectra) :]:
        panel.set_visible(False)
    for panel, (label, one) in zip(panels.flat, spectra.items(), strict=False):
        for number, layer in enumerate(one.layers):
            depth = DEPTH * number / max(len(one.layers) - 1, 1)
            panel.plot(layer.frequencies, layer.relative, color=shade(depth), linewidth=1.2)
        panel.axhline(0, color="grey", linewidth=0.6)
        panel.set_title(label, fontsize=10)
        panel.set_xlabel("frequency, π")
    for panel in panels[:, 0]:
        panel.set_ylabel("Δ log amplitude")
    depths = ScalarMappable(Normalize(0, 1 / DEPTH), shade)
    bar = curves.colorbar(depths, ax=panels, label="depth", ticks=[0, 1], boundaries=[i / 64 for i in range(65)])
    bar.ax.set_yticklabels(["first", "last"])
    high = summary.subplots()
    lines = {label: [layer.high for layer in one.layers] for label, one in spectra.items()}
    draw_lines(high, lines, "Δ log amplitude at the highest frequency")
    draw_legend(high)


def _draw_maps(figure: Any, spectra: Mapping[str, Spectra], chosen: Sequence[Sequence[int]]) -> None:
    panels = figure.subplots(len(spectra), max(map(len, chosen)), squeeze=False)
    shown = [
        [one.layers[number].spectrum - one.layers[number].log_amplitude[0] for number in numbers]
        for one, numbers in zip(spectra.values(), chosen, strict=True)
    ]
    highest = max(float(x.max()) for row in shown for x in row)
    lowest = min(float(x.min()) for row in shown for x in row)
    scale: dict[str, Any] = dict(vmin=max(lowest, LOWEST), vmax=max(highest, max(lowest, LOWEST) + 1e-6))
    drawn: Any = None
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[], visible=False)
    for label, line, images, numbers in zip(spectra, panels, shown, chosen, strict=True):
        line[0].set_ylabel(label, fontsize=9)
        for panel, image, number in zip(line, images, numbers, strict=False):
            panel.set_visible(True)
            drawn = panel.imshow(image.numpy(), cmap="viridis", aspect="auto", **scale)
            panel.set_title(f"layer {number + 1}", fontsize=9)
    figure.colorbar(drawn, ax=panels, label="Δ log amplitude", extend="min" if lowest < LOWEST else "neither")


def rows(result: Spectra) -> Rows:
    """Relative log-amplitudes at a quarter, half and all of the highest frequency."""
    cells = []
    for x in result.layers:
        places = [round(part * (len(x.frequencies) - 1)) for part in (0.25, 0.5, 1.0)]
        at = [x.relative[place] if place else None for place in places]  # a small map has few frequencies
        cells.append((x.name, "x".join(map(str, x.spectrum.shape)), *at))
    return ("layer", "grid", "log amplitude at 1/4", "at 1/2", "at the highest"), cells


ABOUT = "which spatial frequencies features have, layer by layer: smooth or fine", "EMSNet, Figs. 3.5, 3.6 and 3.10"
OPTIONS = {"layers": "modules to look at instead of all blocks: names or patterns", "floor": "added to amplitudes"}
register_measure(Measure("spectrum", *ABOUT, log_amplitude, plot_spectrum, rows, options=OPTIONS, order=3))
