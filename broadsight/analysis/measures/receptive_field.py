"""How far a model looks: the effective receptive field of the centre of a feature map (Luo et al., NeurIPS 2016).

The gradient of the centre's features, summed over channels, with respect to the image: absolute values, summed over
colours and averaged over images.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import did_you_mean
from ...inspection.blocks import Block, find_blocks
from ...inspection.layout import layouts_of
from ...inspection.meta_pass import in_eval_mode
from ...inspection.passing import Images, Seen, batches, moved, peek
from ...inspection.watch import eager, hooked, uncompiled
from ...visual.plots import PALETTE
from .base import Measure, Rows, register_measure
from .frame import Figure, Result, draws, new_figure, plain

SHARES = (0.2, 0.3, 0.5, 0.99)  # of the total: records give the areas that hold them
DARKEST = 1e-4  # the share of the largest value at the dark end of a logarithmic scale
# A gradient of the sum over channels below this share of that of a sum with random signs: the channels cancel out.
CANCELLED = 1e-3


@dataclass(frozen=True)
class Held(Result):
    """Where a share of a receptive field is."""

    share: float  # of the total
    side: float  # in pixels, of the smallest square around the centre that holds it, which may reach beyond the image
    area: float  # what that square covers of the image, 0 to 1
    densest: float  # the smallest part of the image's area that holds it, wherever it is


@dataclass(frozen=True, eq=False)
class ReceptiveField(Result):
    """How much each pixel matters to the centre of a map: the place whose middle is nearest to that of the image."""

    values: Tensor  # (H, W) on the CPU, 0 to 1; the largest is 1
    layer: str  # the module that gives the map
    grid: tuple[int, int]  # (h, w) of that map
    images: int

    @property
    def size(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def centre(self) -> tuple[float, float]:
        """Row and column, in pixels from 0, of the middle of what the central place of the map covers."""
        return _middle(self.size[0], self.grid[0])[1], _middle(self.size[1], self.grid[1])[1]

    def held(self, share: float) -> Held:
        """Where a share of the total, more than 0 and at most 1, is."""
        if not 0 < share <= 1:
            raise ValueError(f"share={share} is no share of a receptive field; choose more than 0 and at most 1")
        values, rows, columns = self._flat()
        wanted = share * values.sum() * (1 - 1e-6)  # less what rounding may take
        most = values.sort(descending=True).values.cumsum(0)
        away = torch.maximum(rows, columns)
        nearest = away.argsort(stable=True)
        reach = away[nearest][values[nearest].cumsum(0).ge(wanted).nonzero()[0, 0]]
        area, densest = (away <= reach).double().mean().item(), (most.lt(wanted).sum().item() + 1) / len(values)
        return Held(share, 2 * reach.item() + 1, area, densest)

    def radial(self) -> list[float]:
        """The mean value at each distance from the centre, rounded to whole pixels, from 0."""
        values, rows, columns = self._flat()
        distances = (rows.square() + columns.square()).sqrt().round().long()
        counts = distances.bincount()
        sums = distances.bincount(values)
        there = counts.nonzero().flatten()  # between pixels a centre has none at 0: what is nearest stands for it
        nearest = there[torch.searchsorted(there, torch.arange(len(counts)))]
        return (sums / counts)[nearest].tolist()

    def record(self) -> dict[str, Any]:
        record = dict(layer=self.layer, images=self.images, size=self.size, grid=self.grid, centre=self.centre)
        return plain(record | dict(held=[self.held(share) for share in SHARES], radial=self.radial()))

    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """The values in a row (H*W,), and how far each is from the centre in rows and in columns."""
        sides = zip(self.size, self.centre, strict=True)
        away = [(torch.arange(n, dtype=torch.float64) - at).abs() for n, at in sides]
        rows, columns = torch.meshgrid(*away, indexing="ij")
        return self.values.double().flatten(), rows.flatten(), columns.flatten()


def effective_receptive_field(
    model: nn.Module, images: Images, *, layer: str | None = None, batch_size: int = 8, seen: Seen | None = None
) -> ReceptiveField:
    """The effective receptive field of the centre of a model's feature map, in eval mode; weights may be frozen.

    Args:
        images: Of one size; activations of a batch are kept for the gradient.
        layer: The module whose map is looked at, as `find_blocks` or `model.named_modules()` has its name, or
            "output" for the model itself; the last block if None.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} lets no image pass; choose 1 or more")
    image, images = peek(images)
    maps = LayerMaps(model, image)
    name, module = maps.layer(layer)
    total, done, grid = torch.zeros(maps.size, dtype=torch.float64), 0, (0, 0)
    centres: list[tuple[Tensor, Tensor]] = []  # sums over channels, plain and with fixed random signs

    def look(module: nn.Module, inputs: tuple, output: Any) -> None:
        nonlocal grid
        x = maps.read(name, output)
        grid = x.shape[-2], x.shape[-1]
        row, column = (_middle(n, cells)[0] for n, cells in zip(maps.size, grid, strict=True))
        centre = x[:, :, row, column].float()  # B C
        signs = torch.randint(2, (centre.shape[1],), generator=torch.Generator().manual_seed(0)).to(centre) * 2 - 1
        centres.append((centre.sum(), (centre * signs).sum()))  # now, since the next layer may change the map in place

    looking = hooked([module], after=look)
    # Whatever the caller has switched off
    with eager(maps.model), in_eval_mode(maps.model), torch.inference_mode(False), torch.enable_grad(), looking:
        for batch, _ in batches(images):
            if batch.shape[-2:] != total.shape:
                (height, width), (rows, columns) = maps.size, batch.shape[-2:]
                raise ValueError(f"images are {height}x{width}, and then {rows}x{columns}; pass images of one size")
            for start in range(0, len(batch), batch_size):
                part = moved(batch[start : start + batch_size], maps.model).clone().detach()
                centres.clear()
                maps.model(part.requires_grad_())
                if not centres:
                    raise ValueError(f"{name!r} does not run when the model answers; {maps.known()}")
                centre, signed = centres[-1]
                usual = 0 if done else _gradient(signed, part, keep=True).sum()
                gradient = _gradient(centre, part)
                if gradient.sum() < usual * CANCELLED:
                    constant = f"the channels of {name!r} add up to a constant, as behind a norm"
                    raise ValueError(f"{constant}; name the layer before it")
                total, done = total + gradient, done + len(part)
                if seen is not None:
                    seen(done)
    largest = total.max()
    if not largest.isfinite():
        raise ValueError(f"the gradient of {name!r} is not finite; look at the weights or use float32")
    if not largest:
        raise ValueError(f"the centre of {name!r} does not depend on the images; pass others or name another layer")
    return ReceptiveField((total / largest).float(), name, grid, done)


@draws(ReceptiveField, "effective_receptive_field")
def plot_receptive_field(results: Mapping[str, ReceptiveField], *, log: bool = True) -> Figure:
    """Draw one image for each model, with squares that hold 50 % and (dashed) 99 % of it, and all radial profiles."""
    columns = min(len(results) + 1, 4)
    rows = math.ceil((len(results) + 1) / columns)
    figure = new_figure(3.2 * columns + 0.8, 3.4 * rows)
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Rectangle

    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    norm, profile = LogNorm(DARKEST, 1) if log else Normalize(0, 1), panels[len(results)]
    for i, (label, result) in enumerate(results.items()):
        panel, values = panels[i], result.values.clamp(min=DARKEST) if log else result.values
        panel.imshow(values.numpy(), cmap="viridis", norm=norm, interpolation="nearest")
        half, most = sides = [result.held(share).side for share in (0.5, 0.99)]
        for side, style in zip(sides, ("-", "--"), strict=True):
            corner = result.centre[1] - side / 2, result.centre[0] - side / 2
            for colour, line, width in (("black", "-", 2.4), ("white", style, 1.2)):  # seen on any colour
                square = Rectangle(corner, side, side, fill=False, edgecolor=colour, linestyle=line, linewidth=width)
                panel.add_patch(square)
        panel.set_title(f"{label}\n{result.layer}\n50 % in {half:.0f} px, 99 % in {most:.0f} px", fontsize=9)
        panel.set(xticks=[0, result.size[1] - 1], yticks=[0, result.size[0] - 1])
        style = dict(color=PALETTE[i % len(PALETTE)], linestyle=("-", "--", ":")[i // 6 % 3])
        profile.plot(result.radial(), **style, label=label)
    figure.colorbar(panels[0].images[0], ax=panels[: len(results)], shrink=0.7, label="gradient, share of the largest")
    profile.set(xlabel="distance from the centre, pixels", ylabel="mean gradient, share of the largest")
    if log:
        profile.set_yscale("log")
    profile.legend(frameon=False, fontsize=8)
    for panel in panels[len(results) + 1 :]:
        panel.set_visible(False)
    return figure


def rows(result: ReceptiveField) -> Rows:
    columns = ("share of it", "side of the square, pixels", "of the image %", "densest part %")
    held = map(result.held, SHARES)
    return columns, [(f"{100 * one.share:g} %", one.side, 100 * one.area, 100 * one.densest) for one in held]


def _middle(pixels: int, places: int) -> tuple[int, float]:
    """The central place along one side, and the middle of what it covers, in pixels from 0."""
    stride = 2 ** round(math.log2(pixels / places))
    if places not in (pixels // stride, -(-pixels // stride)):  # as when the image was padded or cut at an edge
        stride = pixels / places
    middles = [(place + 0.5) * stride - 0.5 for place in range(places)]
    place = min(range(places), key=lambda i: (abs(middles[i] - (pixels - 1) / 2), -i))
    return place, min(middles[place], pixels - 1.0)


class LayerMaps:
    """Knows a model's layers and how to read what they give for images like that one as maps (B, C, h, w)."""

    def __init__(self, model: nn.Module, image: Tensor):
        self.model = uncompiled(model)
        self.size = image.shape[-2], image.shape[-1]
        self.blocks: dict[str, Block] = {}
        try:
            self.blocks = {block.name: block for block in find_blocks(self.model, image)}
        except ValueError as error:
            try:  # it may be one layer alone, whose output is the map
                with in_eval_mode(self.model), eager(self.model):
                    self.model(moved(image, self.model))
            except Exception:  # in whatever words; those of the blocks are better
                raise error from None

    def layer(self, name: str | None) -> tuple[str, nn.Module]:
        """The layer of that name; if None the last block, or the model itself where there are none."""
        if name is None:
            name = list(self.blocks)[-1] if self.blocks else "output"
        modules = {name or "output": module for name, module in self.model.named_modules()}
        if name not in modules:
            hint = did_you_mean(name, modules)
            raise ValueError(f"{type(self.model).__name__} has no layer {name!r}; {hint}{self.known()}")
        return name, modules[name]

    def known(self) -> str:
        names = list(self.blocks)
        shown = [*names[:2], "...", names[-1]] if len(names) > 4 else names
        return f"blocks are {', '.join(shown)}" if shown else "it has no blocks that give a map; try resnet50 or mat_2"

    def read(self, name: str, output: Any) -> Tensor:
        """What the layer gave, as a view (B, C, h, w)."""
        if name in self.blocks:
            return self.blocks[name].map_of(output, self.size)
        x = next((x for x in (output if isinstance(output, tuple | list) else [output]) if isinstance(x, Tensor)), None)
        prefixes = {block.layout.prefix for block in self.blocks.values() if block.layout.form == "NLC"}
        options: Any = dict(form=getattr(self.model, "output_fmt", None), prefixes=sorted(prefixes, reverse=True))
        if x is not None and (found := layouts_of(x.shape, self.size, **options)):
            return found[0].as_map(x)
        what = "no tensor" if x is None else f"shape {tuple(x.shape)}"
        raise ValueError(f"{name!r} gives {what}, which is no map of the image; name another layer: {self.known()}")


def _gradient(value: Tensor, images: Tensor, keep: bool = False) -> Tensor:
    """Absolute values, added up over images and colours: (H, W) on the CPU. 0 if it does not depend on the images."""
    if not value.requires_grad:
        return torch.zeros(images.shape[-2:], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(value, images, retain_graph=keep, materialize_grads=True)
    return gradient.float().abs().sum((0, 1)).cpu().double()


ABOUT = "how much each pixel matters to the centre of the last map", "after Luo et al., 2016"
OPTIONS = {"layer": "module whose map is looked at; the last block without it", "log": "draw it on a logarithmic scale"}
FUNCTIONS = effective_receptive_field, plot_receptive_field, rows
register_measure(Measure("receptive-field", *ABOUT, *FUNCTIONS, samples=50, batch=8, options=OPTIONS, order=9))
