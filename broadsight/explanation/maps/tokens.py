"""What tokens look at (MAP), what they hold (STViT, MAT), and which of them are foreground (PartialFormer)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...inspection.layout import layouts_of
from ...inspection.watch import hooked
from ...inspection.windows import Windows
from ...layers import AbstractTokenAttention, GroupClassAttention, MultiTokenPool, PartialAttention, SuperTokenAttention
from ...layers.any_size import join_cells
from ...layers.partial_attention import select_foreground
from .map import Collector, LayerCall, Look, modules_of

# Of the four attentions in a layer with abstract tokens, in order: pixels in their window, the abstract token in its
# window, the windows' summaries among each other, pixels among the summaries.
SUMMARY, MIXING, FUSION = 1, 2, 3
OVER_HEADS = "mean over heads; all windows add up to 1"


class PoolLooks(Collector):
    """Of every layer of a multi-token pool: each asking token's attention over the places of the merged map.

    Means over heads of the soft-max, before a second mixing of heads. What a token pays to its group's own tokens is
    in the note. In the last layer only those ask whose answer is wanted. "cap" and "ga" are such pools too.
    """

    kind = "map-tokens"

    def __init__(self, model: nn.Module, image_size: tuple[int, int]):
        super().__init__(model, image_size)
        pools = modules_of(model, MultiTokenPool).values()
        self.pools: dict[nn.Module, Any] = {x: pool for pool in pools for x in self.find(pool).values()}

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, nn.Module]:
        pools = modules_of(model, MultiTokenPool)
        found = {name: modules_of(pool, GroupClassAttention) for name, pool in pools.items()}
        return {f"{name}.{path}".lstrip("."): x for name, blocks in found.items() for path, x in blocks.items()}

    def given(self, module: Any, tokens: Tensor, image: Tensor, asking: slice = slice(None)) -> Any:
        return tokens.shape[2], range(tokens.shape[2])[asking]

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        (tokens, asking), pool = call.given, self.pools[call.module]
        weights = call.weights(3)[-1][0]  # G*heads*q tokens+n
        weights = weights.unflatten(0, (call.module.groups, call.module.heads, len(asking))).mean(1)  # G q tokens+n
        own, maps = weights[..., :tokens].sum(-1), weights[..., tokens:]
        layouts = layouts_of((1, maps.shape[-1], 1), self.image_size, prefixes=[0], nearest=True)
        maps = maps.unflatten(-1, layouts[0].grid)
        mixed = ", before the heads are mixed again" if call.module.mix_after is not None else ""
        found = []

        def add(title: str, values: Tensor, own: Tensor, over: str = "") -> None:
            to_own = f"{100 * own.item():.1f} % went to its group's tokens"
            note = f"attention over the places, mean over heads{over}{mixed}; {to_own}"
            found.append(self.heat(depth, call.layer, title, values, note))

        kinds = [f"token {number + 1}" for number in range(pool.tokens)]
        kinds += [f"distillation token {number + 1}" for number in range(pool.distill_tokens)]
        names = [[*kinds, "averaged token"][number] for number in asking]
        without = pool.mean_token and "averaged token" not in names
        asked = f"the {len(names)} tokens that ask" + ", the averaged one not among them" * without
        for group in range(len(maps)):
            for q, name in enumerate(names):
                add(f"group {group + 1}, {name}", maps[group, q], own[group, q])
            if len(names) > 1:
                add(f"group {group + 1}, mean", maps[group].mean(0), own[group].mean(), f" and {asked}")
        if len(maps) > 1:
            add("all groups, mean", maps.mean((0, 1)), own.mean(), f", groups and {asked}")
        return found


class SuperTokenLooks(Collector):
    """Of every super-token attention with cells of several pixels: the super token that has most of each pixel.

    A pixel is shared among the 3 x 3 super tokens around its cell, numbered row by row; the shares are those after the
    last iteration. Nothing belongs to those that the layer imagines beyond the border.
    """

    kind = "super-tokens"

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, nn.Module]:
        return {name: x for name, x in modules_of(model, SuperTokenAttention).items() if x.cell != (1, 1)}

    def given(self, module: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        return tuple(x.shape[-2:])

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        share, cell, size = call.weights(3, -2)[-1].mT, call.module.cell, call.given  # p*q 9 P
        p, q = (-(-n // side) for n, side in zip(size, cell, strict=True))
        places = torch.arange(p * q, device=share.device).view(p, q)
        around = nn.functional.pad(places, (1, 1, 1, 1), value=-1).unfold(0, 3, 1).unfold(1, 3, 1)  # p q 3 3
        numbers = around.reshape(p * q, 9)  # the super tokens around each, row by row; -1 beyond the border
        share = share.masked_fill((numbers < 0)[:, :, None], -1)
        largest, which = share.max(1)  # p*q P
        labels = _joined(numbers.gather(1, which), cell, size).cpu()
        most = f"the super token, of {p} x {q} super tokens, that holds the largest share of each pixel"
        part = f"how much of each pixel that one of {p} x {q} super tokens holds: 1 is all, 1/9 is no preference"
        association = Look(self.kind, "association", call.layer, depth, "labels", labels, most)
        return [association, self.heat(depth, call.layer, "largest share", _joined(largest, cell, size), part)]


class _Windows(Collector):
    """Calls of the layers with abstract tokens, and their windows as maps."""

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, nn.Module]:
        return {name: x for name, x in modules_of(model, AbstractTokenAttention).items() if getattr(x, "mixing", False)}

    def given(self, module: Any, x: Tensor) -> Any:
        return tuple(x.shape[1:3])

    def map_of(self, call: LayerCall, x: Tensor) -> Tensor:
        """Pixels by window (p*q, P), or one number for each window (p*q, 1) -> (H, W)."""
        h, w = call.module.sides(*call.given)
        return _joined(x.expand(-1, h * w), (h, w), call.given)

    def heat_of(self, depth: int, call: LayerCall, title: str, x: Tensor, note: str) -> Look:
        return self.heat(depth, call.layer, title, self.map_of(call, x), note)


class AbstractTokenLooks(_Windows):
    """Of every layer: the abstract token's attention in its window, all windows side by side, mean over heads; and
    how much attention each window's summary gets where the summaries are mixed."""

    kind = "abstract-tokens"

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        in_window = call.rows[SUMMARY].weights().mean((1, 2))  # p*q P, and one more if the token is a key
        received = call.rows[MIXING].received()[0].mean(0)  # p*q
        itself = ", what the token pays to itself included" if call.module.token_is_key else ""
        pixels = math.prod(call.module.sides(*call.given))
        inside = f"where each window's abstract token looks, mean over heads; a window adds up to 1{itself}"
        summaries = "attention that each window's summary gets from all summaries"
        return [
            self.heat_of(depth, call, "in its window", in_window[:, :pixels], inside),
            self.heat_of(depth, call, "received in the mixing", received[:, None], f"{summaries}, {OVER_HEADS}"),
        ]


class FusionLooks(_Windows):
    """Of every layer: which window's summary each pixel attends to most, and how much attention each summary gets."""

    kind = "fusion"

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        H, W = call.given
        cut = Windows((H, W), call.module.sides(H, W))
        (p, q), real = cut.counts, cut.inside().flatten()  # p*q*P, by window as the queries
        most, which, received = [], [], 0
        for _, queries, _, part in call.rows[FUSION].with_weights():
            weights = part[0].mean(0)  # n p*q
            largest = weights.max(1)
            most.append(largest.values)
            which.append(largest.indices)
            received = received + weights[real[queries].to(weights.device)].sum(0)
        labels = self.map_of(call, torch.cat(which).view(p * q, -1)).cpu()
        windows = f"of {p} x {q} windows counted row by row"
        note = f"the window, {windows}, whose summary each pixel attends to most; mean over heads"
        sure = f"how much attention that summary gets from the pixel: 1 is all, {1 / (p * q):.2g} is no preference"
        gets = f"attention that each window's summary gets from all pixels, {OVER_HEADS}"
        return [
            Look(self.kind, "window of most attention", call.layer, depth, "labels", labels, note),
            self.heat_of(depth, call, "largest attention", torch.cat(most).view(p * q, -1), sure),
            self.heat_of(depth, call, "received", (received / (H * W))[:, None], gets),
        ]


def _joined(x: Tensor, cell: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Pixels by cell (p*q, P), the cells row by row -> (H, W), without the padding."""
    grid = (-(-n // side) for n, side in zip(size, cell, strict=True))
    return join_cells(x.reshape(1, *grid, *cell, 1))[0, : size[0], : size[1], 0].contiguous()


class ForegroundLooks(Collector):
    """Of every partial attention: the foreground it chose, the choices up to there, and its query of the background."""

    kind = "foreground"
    layers = (PartialAttention,)

    def __init__(self, model: nn.Module, image_size: tuple[int, int]):
        super().__init__(model, image_size)
        # Tokens come as a row; the block around them gets the map that they are of.
        self.blocks = [m for m in model.modules() if any(isinstance(x, PartialAttention) for x in m.children())]
        self.grid: tuple[int, int] | None = None

    def __enter__(self) -> Collector:
        def enters(module: nn.Module, inputs: tuple, _: dict) -> None:
            x = inputs[0] if inputs else None
            self.grid = (x.shape[1], x.shape[2]) if isinstance(x, Tensor) and x.ndim == 4 else None

        self._opened.enter_context(hooked(self.blocks, before=enters))
        return super().__enter__()

    def given(self, module: Any, x: Tensor, scores: Tensor) -> Any:
        tokens = x.shape[1]
        grid = self.grid if self.grid and self.grid[0] * self.grid[1] == tokens else None
        return scores.detach(), grid or layouts_of((1, tokens, 1), self.image_size, prefixes=[0], nearest=True)[0].grid

    def looks(self) -> list[Look]:
        masks = []
        for call in self.calls:
            scores, grid = call.given
            index = select_foreground(scores, call.module.foreground_count(scores.shape[1])).cpu()
            masks.append(torch.zeros(scores.shape[1], dtype=torch.bool).index_fill(0, index, True).view(grid))
        finest = max((mask.shape for mask in masks), key=lambda shape: shape[0] * shape[1], default=None)
        found, times = [], torch.zeros(finest or (1, 1))
        for depth, (call, mask) in enumerate(zip(self.calls, masks, strict=True)):
            part = f"{int(mask.sum())} of {mask.numel()} places are foreground and attend to each other"
            found.append(Look(self.kind, "foreground", call.layer, depth, "mask", mask, part))
            times = times + F.interpolate(mask[None, None].float(), list(times.shape), mode="nearest")[0, 0]
            often = f"in which share of the {depth + 1} layers so far each place was foreground"
            found.append(self.heat(depth, call.layer, f"history up to layer {depth + 1}", times / (depth + 1), often))
            if background := call.weights(3):
                weights = background[-1][0].mean(0).view(mask.shape)
                seen = "attention of the one query over the background, mean over heads; the foreground gets none"
                found.append(self.heat(depth, call.layer, "background query", weights, seen))
        return found
