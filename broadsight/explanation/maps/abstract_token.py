"""Abstract tokens (MAT): where each window's token looks, and which window's summary every pixel attends to."""

from typing import Any

import torch
from torch import Tensor, nn

from ...layers import AbstractTokenAttention
from ...layers.any_size import join_cells, split_cells
from .map import Collector, LayerCall, Look, modules_of

# Of the four attentions in a layer, in order: pixels in their window, the abstract token in its window, the windows'
# summaries among each other, pixels among the summaries.
SUMMARY, MIXING, FUSION = 1, 2, 3


class _Windows(Collector):
    """Calls of the layers with abstract tokens, and their windows as maps."""

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, nn.Module]:
        return {name: x for name, x in modules_of(model, AbstractTokenAttention).items() if getattr(x, "mixing", False)}

    def given(self, module: Any, x: Tensor) -> Any:
        return tuple(x.shape[1:3])

    def heat_of(self, depth: int, call: LayerCall, title: str, x: Tensor, note: str) -> Look:
        return self.heat(depth, call.layer, title, _joined(call, x), note)


class AbstractTokenLooks(_Windows):
    """Of every layer: the abstract token's attention in its window, all windows side by side, mean over heads.

    And how much attention each window's summary gets where the summaries are mixed, one value a window.
    """

    kind = "abstract-tokens"

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        in_window = call.rows[SUMMARY].weights().mean((1, 2))  # p*q P, and one more if the token is a key
        received = call.rows[MIXING].received()[0].mean(0)  # p*q
        itself = ", what the token pays to itself included" if call.module.token_is_key else ""
        inside = f"where each window's abstract token looks, mean over heads; a window adds up to 1{itself}"
        mixing = (
            "attention that each window's summary gets from all summaries, mean over heads; all windows add up to 1"
        )
        return [
            self.heat_of(depth, call, "in its window", in_window[:, : call.module.window**2], inside),
            self.heat_of(depth, call, "received in the mixing", received[:, None], mixing),
        ]


class FusionLooks(_Windows):
    """Of every layer: which window's summary each pixel attends to most, and how much attention each summary gets."""

    kind = "fusion"

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        (H, W), w = call.given, call.module.window
        p, q = -(-H // w), -(-W // w)
        real = torch.ones(1, p * w, q * w, 1, dtype=torch.bool)
        real[:, H:], real[:, :, W:] = False, False
        real = split_cells(real, w, w).flatten()  # p*q*P, by window as the queries
        most, which, received = [], [], 0
        for _, queries, _, part in call.rows[FUSION].with_weights():
            weights = part[0].mean(0)  # n p*q
            largest = weights.max(1)
            most.append(largest.values)
            which.append(largest.indices)
            received = received + weights[real[queries].to(weights.device)].sum(0)
        windows = f"{p} x {q} windows"
        labels = _joined(call, torch.cat(which).view(p * q, -1)).cpu()
        note = f"the window, of {windows} counted row by row, whose summary each pixel attends to most; mean over heads"
        gets = "attention that each window's summary gets from all pixels, mean over heads; all windows add up to 1"
        sure = f"how much attention that summary gets from the pixel: 1 is all, {1 / (p * q):.2g} is no preference"
        return [
            Look(self.kind, "window of most attention", call.layer, depth, "labels", labels, note),
            self.heat_of(depth, call, "largest attention", torch.cat(most).view(p * q, -1), sure),
            self.heat_of(depth, call, "received", (received / (H * W))[:, None], gets),
        ]


def _joined(call: LayerCall, x: Tensor) -> Tensor:
    """Pixels by window (p*q, P), or one number for each window (p*q, 1) -> (H, W), without the padding."""
    (H, W), w = call.given, call.module.window
    p, q = -(-H // w), -(-W // w)
    return join_cells(x.expand(-1, w * w).reshape(1, p, q, w, w, 1))[0, :H, :W, 0].contiguous()
