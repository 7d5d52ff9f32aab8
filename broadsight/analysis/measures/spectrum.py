"""What frequencies the features of every layer are made of: amplitude spectra and relative log-amplitudes over depth.

The Fourier analysis of the EMSNet chapter (Figs. 3.5, 3.6 and 3.10), after Park and Kim, ICLR 2022. The map of every
channel is transformed, and the logarithm of the amplitudes averaged over channels and images. What is shown of that is
its diagonal from the centre, frequency 0, to the corner, frequency pi down and across. A layer that raises the high end
sharpens; one that lowers it blurs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.blocks import find_blocks, find_layers, watch_blocks
from ...inspection.passing import Seen, pass_images, peek

FLOOR = 1e-6


@dataclass(frozen=True)
class LayerSpectrum:
    """One layer; means over images and channels.

    Args:
        name: Path of the block or module.
        frequencies: From 0 to 1, in units of pi; 1 is reached if the shorter side of the map is even.
        log_amplitude: Natural logarithm of the amplitude at these, down and across alike.
        spectrum: (h, w) of log-amplitudes, frequency 0 at [h // 2, w // 2].
    """

    name: str
    frequencies: tuple[float, ...]
    log_amplitude: tuple[float, ...]
    spectrum: Tensor

    @property
    def relative(self) -> tuple[float, ...]:
        """Log-amplitudes less that of frequency 0."""
        return tuple(x - self.log_amplitude[0] for x in self.log_amplitude)

    @property
    def high(self) -> float:
        """The relative log-amplitude of the highest frequency."""
        return self.relative[-1]

    def record(self) -> dict[str, Any]:
        """As plain values, for JSON; the spectrum in rows from top to bottom."""
        return {
            "name": self.name,
            "grid": list(self.spectrum.shape),
            "high": self.high,
            "frequencies": list(self.frequencies),
            "log_amplitude": list(self.log_amplitude),
            "relative": list(self.relative),
            "spectrum": [[float(f"{x:.6g}") for x in row] for row in self.spectrum.tolist()],
        }


@dataclass(frozen=True)
class Spectra:
    """All layers, in order of execution.

    Args:
        images: How many there were.
    """

    layers: tuple[LayerSpectrum, ...]
    images: int

    def record(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"images": self.images, "layers": [layer.record() for layer in self.layers]}


def log_amplitude(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    layers: str | Sequence[str] | None = None,
    floor: float = FLOOR,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> Spectra:
    """Spectrum of what every block of a model gives; class and register tokens are left out.

    The transform is not normalised: its value at frequency 0 is the sum of the map.

    Args:
        model: Any vision model; which blocks it has, `find_blocks` says.
        images: (B, C, H, W), or an iterable of such batches, or of tuples that begin with one, as a data loader is. All
            of one size.
        layers: Other modules instead, as `find_layers` has them: "*.mixer.static" are the static branches of an
            EMSNet, "*.dynamic.local" its C-MHSA with propagation, "*.dynamic.global_" its G-MHSA.
        floor: Added to every amplitude: the logarithm of 0 is none.
        batch_size: How many images pass the model at a time, at most.
        seen: Told how many images have passed.

    Raises:
        ValueError: The model has no blocks or no such modules, there are no images, or their sizes differ.
    """
    if not floor > 0:
        raise ValueError(f"floor={floor!r}; expected a small number above 0, such as {FLOOR}")
    image, images = peek(images)
    blocks = find_blocks(model, image) if layers is None else find_layers(model, image, layers)
    sums: dict[int, Tensor] = {}

    def see(number: int, features: Tensor) -> None:
        half = torch.fft.rfft2(features if features.dtype == torch.float64 else features.float())
        sizes = half.abs().add_(floor).log_().mean(1).double().sum(0).cpu()  # h w//2+1
        if number not in sums:
            sums[number] = sizes
        elif sums[number].shape != sizes.shape or tuple(features.shape[2:]) != blocks[number].layout.grid:
            here, first = "x".join(map(str, features.shape[2:])), "x".join(map(str, blocks[number].layout.grid))
            raise ValueError(f"maps of {blocks[number].name} are {here} and {first}; pass images of one size")
        else:
            sums[number] += sizes

    with watch_blocks(model, blocks, see):
        passed = pass_images(model, images, batch_size=batch_size, seen=seen)
    return Spectra(tuple(_layer(x.name, sums[i] / passed, x.layout.grid[1]) for i, x in enumerate(blocks)), passed)


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
    value = 0.0
    for i, near_row in ((math.floor(row), 1 - row % 1), (math.floor(row) + 1, row % 1)):
        for j, near_column in ((math.floor(column), 1 - column % 1), (math.floor(column) + 1, column % 1)):
            if near_row * near_column:
                value += near_row * near_column * float(whole[i % len(whole), j % whole.shape[1]])
    return value
