"""How many neurons do not fire, as in MAP's Sec. 3: activations that are exactly 0 after a ReLU, layer by layer.

A smooth activation such as GELU gives no exact 0; for these it is the share that is 0 or less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...inspection.activations import ActivationWatch, Layer
from ...inspection.passing import Images, Seen, pass_images, peek
from ...inspection.watch import eager, uncompiled
from .base import Measure, Rows, register_measure
from .frame import Figure, Result, count_from_one, draw_legend, draws, new_figure, style_of


@dataclass(frozen=True)
class LayerDeath(Result):
    """One activation; means over images."""

    name: str  # path of the module that calls it; "name#2" for the second one that it calls
    function: str  # "relu", "gelu" and so on
    exact: bool  # exact zeros are counted, as after a ReLU, rather than values of 0 or less
    share: float  # of all activations, those that count
    dead: int  # channels whose activations counted at every place of every image
    channels: int  # number of all channels

    @property
    def counted(self) -> str:
        return "exactly 0" if self.exact else "0 or less"

    def record(self) -> dict[str, Any]:
        record = dict(name=self.name, function=self.function, counted=self.counted, share=self.share)
        record |= dict(dead_channels=self.dead, channels=self.channels)
        return record | dict(dead_channel_share=self.dead / self.channels)


@dataclass(frozen=True)
class DeadNeurons(Result):
    """All activations in order of execution, and the number of images."""

    layers: tuple[LayerDeath, ...]
    images: int


def dead_neurons(model: nn.Module, images: Images, *, batch_size: int = 8, seen: Seen | None = None) -> DeadNeurons:
    """The share of activations that do not fire after every ReLU or other activation of a model.

    Every call of torch's functions relu and relu6 (exactly 0), gelu, silu, mish, hardswish, elu, selu, celu, leaky_relu
    and prelu (0 or less) counts, in gates and heads too; and timm's modules that write these out. What a model writes
    out itself, such as clamp(min=0) for a ReLU, is not recognised.
    """
    inner = uncompiled(model)
    image, images = peek(images)
    watch = ActivationWatch(inner, (image.shape[-2], image.shape[-1]))

    def after(passed: int) -> None:
        watch.end_pass(passed)
        if seen is not None:
            seen(passed)

    with eager(model), watch:
        passed = pass_images(inner, images, batch_size=batch_size, seen=after)
    if not watch.layers:
        hint = "pass a model with one, such as resnet50, or choose variance or spectrum, which any model has"
        raise ValueError(f"{type(inner).__name__} calls no activation that can be dead, such as relu or gelu; {hint}")

    def death(x: Layer) -> LayerDeath:
        return LayerDeath(x.name, x.function, x.exact, x.share / passed, int(x.silent.sum()), len(x.silent))

    return DeadNeurons(tuple(map(death, watch.layers.values())), passed)


@draws(DeadNeurons, "dead_neurons")
def plot_dead_neurons(dead: Mapping[str, DeadNeurons]) -> Figure:
    """Draw the share of activations and that of dead channels over layers, hollow where it is of 0 or less."""
    figure = new_figure(10.5, 4.2)
    left, right = figure.subplots(1, 2)
    for number, (label, one) in enumerate(dead.items()):
        style = style_of(number)
        shares = [100 * layer.share for layer in one.layers], [100 * x.dead / x.channels for x in one.layers]
        hollow = [place for place, layer in enumerate(one.layers) if not layer.exact]
        face = style["color"] if len(hollow) < len(one.layers) else "white"
        for panel, values in zip((left, right), shares, strict=True):
            panel.plot(range(1, len(values) + 1), values, **style, markerfacecolor=face, label=label)
            inner = style | dict(markerfacecolor="white", linestyle="none")
            panel.plot([place + 1 for place in hollow], [values[place] for place in hollow], **inner)
    kinds = {layer.counted for one in dead.values() for layer in one.layers}
    counted = " (filled) or ".join(sorted(kinds, reverse=True)) + (" (hollow)" if len(kinds) > 1 else "")
    left.set_title(f"activations that are {counted}", fontsize=10)
    right.set_title("channels that are so everywhere", fontsize=10)
    for panel, name in ((left, "activations"), (right, "channels")):
        panel.set(ylabel=f"{name}, %", ylim=(-2, 102))
        count_from_one(panel, "activation")
    draw_legend(right)
    return figure


def rows(result: DeadNeurons) -> Rows:
    columns = ("activation", "function", "counted", "activations %", "dead channels", "of")
    return columns, [(x.name, x.function, x.counted, 100 * x.share, x.dead, x.channels) for x in result.layers]


ABOUT = "how many activations and channels never fire", "MAP, Figs. 2c and 7c"
THING = "activations such as ReLU or GELU"
register_measure(Measure("dead", *ABOUT, dead_neurons, plot_dead_neurons, rows, thing=THING, order=2))
