"""How diverse the features of every layer are: among the channels of a place, and among the places of a channel.

The measure of MAP's Sec. 3, on what each residual block gives. Both variances grow with the scale of the features, so
that only models of one backbone should be compared by them; divided by the mean of the squared features they do not.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...inspection.blocks import Block, find_blocks, watch_blocks
from ...inspection.passing import Seen, pass_images, peek
from ...visual.plots import save
from ..layer_chart import check_results, draw_legend, draw_lines, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 100  # values so far apart, as factors, are drawn on a logarithmic scale


@dataclass(frozen=True)
class LayerVariance:
    """One layer; means over images.

    Args:
        name: Path of the block.
        channel: Variance over the channels of a place, averaged over places.
        spatial: Variance over the places of a channel, averaged over channels.
        relative_channel, relative_spatial: The same, divided by the mean of the image's squared features there; 0 where
            these are all 0.
        channels: How many there are, and
        grid: (h, w) places of the first image.
    """

    name: str
    channel: float
    spatial: float
    relative_channel: float
    relative_spatial: float
    channels: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class FeatureVariance:
    """All layers, in order of execution.

    Args:
        images: How many there were.
        correction: What was subtracted from the number of values to divide by.
    """

    layers: tuple[LayerVariance, ...]
    images: int
    correction: int

    def record(self) -> dict[str, Any]:
        """As plain numbers, for JSON."""
        layers = [asdict(layer) | {"grid": list(layer.grid)} for layer in self.layers]
        return {"images": self.images, "correction": self.correction, "layers": layers}


def feature_variance(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    correction: int = 1,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> FeatureVariance:
    """Channel and spatial variance of what every block of a model gives; class and register tokens are left out.

    Args:
        model: Any vision model; which blocks it has, `find_blocks` says.
        images: (B, C, H, W), or an iterable of such batches, or of tuples that begin with one, as a data loader is.
        correction: 1 for the unbiased variance, 0 for that of the values as they are.
        batch_size: How many images pass the model at a time, at most.
        seen: Told how many images have passed.

    Raises:
        ValueError: The model has no blocks, there are no images, or a layer has too few values for the correction.
    """
    if not isinstance(correction, int) or correction < 0:
        raise ValueError(f"correction={correction!r}; expected a whole number, 1 for the unbiased variance or 0")
    image, images = peek(images)
    blocks = find_blocks(model, image)
    sums = torch.zeros(len(blocks), 4, dtype=torch.float64)
    channels = [0] * len(blocks)

    def see(number: int, features: Tensor) -> None:
        channels[number] = features.shape[1]
        _check(blocks[number], features, correction)
        sums[number] += _variances(features, correction).sum(0).cpu()

    with watch_blocks(model, blocks, see):
        passed = pass_images(model, images, batch_size=batch_size, seen=seen)
    means = (sums / passed).tolist()
    layers = zip(blocks, means, channels, strict=True)
    found = tuple(LayerVariance(block.name, *values, count, block.layout.grid) for block, values, count in layers)
    return FeatureVariance(found, passed, correction)


def plot_feature_variance(
    variances: Mapping[str, FeatureVariance], path: str | Path | None = None, *, relative: bool = False
) -> "Figure":
    """Draw channel and spatial variance over layers side by side, one line for each model.

    Args:
        variances: What `feature_variance` gave, by the name that the legend shows.
        path: A png, svg or pdf file to write, which appears complete or not at all.
        relative: Divided by the mean square, as suits models of different backbones.
    """
    check_results(path, variances, FeatureVariance, "feature_variance")
    figure = new_figure(10.5, 4.2)
    panels = figure.subplots(1, 2)
    start, unit = ("relative_", " / mean square") if relative else ("", "")
    for panel, kind in zip(panels, ("channel", "spatial"), strict=True):
        lines = {name: [getattr(x, start + kind) for x in one.layers] for name, one in variances.items()}
        draw_lines(panel, lines, f"{kind} variance{unit}")
        positive = [x for line in lines.values() for x in line if x > 0]
        if positive and max(positive) > WIDE * min(positive):
            panel.set_yscale("log")
        else:
            panel.set_ylim(bottom=0)
        panel.set_title(f"{kind} diversity")
    draw_legend(panels[1])
    if path is not None:
        save(figure, path)
    return figure


def _variances(features: Tensor, correction: int) -> Tensor:
    """(B, C, h, w) -> (B, 4): channel, spatial, and both divided by the mean square."""
    features = features if features.dtype == torch.float64 else features.float()
    square = features.square().mean((1, 2, 3)).double()  # B
    found = []
    for axes in ((1,), (2, 3)):
        count = math.prod(features.shape[axis] for axis in axes)
        # In two passes, which is as exact as torch.var and faster
        rest = features - features.mean(axes, keepdim=True)
        found.append(rest.square_().mean((1, 2, 3)).double() * (count / (count - correction)))
    variances = torch.stack(found, 1)  # B 2
    relative = torch.where(square[:, None] > 0, variances / square[:, None], 0.0)
    return torch.cat([variances, relative], 1)


def _check(block: Block, features: Tensor, correction: int) -> None:
    channels, places = features.shape[1], features[0, 0].numel()
    if min(channels, places) <= correction:
        raise ValueError(
            f"{block.name} has {channels} channels at {places} places, too few for correction={correction}; pass "
            "correction=0 or larger images"
        )
