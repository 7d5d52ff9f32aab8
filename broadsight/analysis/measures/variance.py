"""How diverse the features of every block are, as in MAP's Sec. 3: among channels, and among places.

Both variances grow with the scale of the features: compare models of one backbone only, or divide by the mean square.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...inspection.blocks import Block
from ...inspection.passing import Images, Seen
from .base import Measure, Rows, register_measure
from .frame import Figure, Result, draw_legend, draw_lines, draws, new_figure, pass_blocks

WIDE = 100  # the ratio of the largest value to the smallest beyond which the axis is logarithmic


@dataclass(frozen=True)
class LayerVariance(Result):
    """One layer; means over images. Relative is what is divided by the mean of the squared features, 0 if all are 0."""

    name: str  # path of the block
    channel: float  # variance over the channels of a place, averaged over places
    spatial: float  # variance over the places of a channel, averaged over channels
    relative_channel: float
    relative_spatial: float
    channels: int
    grid: tuple[int, int]  # (h, w) of the map of the first image


@dataclass(frozen=True)
class FeatureVariance(Result):
    """All layers in order of execution, the number of images, and what was subtracted from the number of values."""

    layers: tuple[LayerVariance, ...]
    images: int
    correction: int


def feature_variance(
    model: nn.Module, images: Images, *, correction: int = 1, batch_size: int = 8, seen: Seen | None = None
) -> FeatureVariance:
    """Channel and spatial variance of what every block gives, without class tokens; unbiased if `correction` is 1."""
    if not isinstance(correction, int) or correction < 0:
        raise ValueError(f"correction={correction!r}; expected a whole number, 1 for the unbiased variance or 0")
    sums: dict[str, Tensor] = {}
    channels: dict[str, int] = {}

    def see(block: Block, features: Tensor) -> None:
        channels[block.name], places = features.shape[1], features[0, 0].numel()
        if min(features.shape[1], places) <= correction:
            hint = f"too few for correction={correction}; pass correction=0 or larger images"
            raise ValueError(f"{block.name} has {features.shape[1]} channels at {places} places, {hint}")
        features = features if features.dtype == torch.float64 else features.float()
        square, found = features.square().mean((1, 2, 3)).cpu().double(), []
        for axes in ((1,), (2, 3)):
            count = math.prod(features.shape[axis] for axis in axes)
            # In two passes, which is as exact as torch.var and faster
            rest = features - features.mean(axes, keepdim=True)
            found.append(rest.square_().mean((1, 2, 3)).cpu().double() * (count / (count - correction)))
        variances = torch.stack(found, 1)  # B 2
        relative = torch.where(square[:, None] > 0, variances / square[:, None], 0.0)
        sums[block.name] = sums.get(block.name, 0) + torch.cat([variances, relative], 1).sum(0)

    blocks, passed = pass_blocks(model, images, see, batch_size=batch_size, seen=seen)
    layers = (LayerVariance(x.name, *(sums[x.name] / passed).tolist(), channels[x.name], x.layout.grid) for x in blocks)
    return FeatureVariance(tuple(layers), passed, correction)


@draws(FeatureVariance, "feature_variance")
def plot_feature_variance(variances: Mapping[str, FeatureVariance], *, relative: bool = False) -> Figure:
    """Draw channel and spatial variance over layers side by side, `relative` to the mean square if asked for."""
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
    return figure


def rows(result: FeatureVariance) -> Rows:
    columns = ("layer", "channels", "grid", "channel", "spatial", "channel, relative", "spatial, relative")
    return columns, [
        (x.name, x.channels, f"{x.grid[0]}x{x.grid[1]}", x.channel, x.spatial, x.relative_channel, x.relative_spatial)
        for x in result.layers
    ]


ABOUT = "how diverse features are: among the channels of a place, and among the places of a channel"
OPTIONS = {
    "correction": "1 for the unbiased variance, 0 for that of the values as they are",
    "relative": "draw it divided by the mean square, for models of different backbones",
}
FUNCTIONS = feature_variance, plot_feature_variance, rows
register_measure(Measure("variance", ABOUT, "MAP, Figs. 2a-b and 7a-b", *FUNCTIONS, options=OPTIONS, order=1))
