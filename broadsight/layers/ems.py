"""Efficient multi-scale interaction (EMS): static and dynamic mixing of channel slices at several scales."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from ..errors import check_choice
from .coarse_attention import CMHSA, GMHSA, AttentionPath
from .kernels.folded_interaction import FoldedInteraction
from .patches import ChannelConv, PooledBranch


@dataclass(frozen=True)
class Variant:
    """A row of the papers' ablations. Channels are counted in quarters of the block's."""

    static: int = 4  # channels of the static branch
    dynamic: tuple[int, int] = (0, 0)  # channels that feed C-MHSA and G-MHSA; none: no dynamic branch
    widths: tuple[int, int] = (0, 0)  # of these two attentions
    merged: int = 0  # channels that both are merged to; 0: they are concatenated only
    branch: dict[str, Any] | None = field(default_factory=dict)  # arguments of the static branch; None: there is none,
    whitens: bool = False  # but a whitening
    projects: bool = True  # by a last linear layer


VARIANTS = {
    "full": Variant(2, (1, 1), (2, 1), 2),
    "baseline": Variant(branch=None),
    "whiten": Variant(branch=None, whitens=True),
    "patch2": Variant(branch=dict(ratios=(2, 2, 0), merged=False, gated=False)),
    "patch4": Variant(branch=dict(merged=False, gated=False)),
    "gated": Variant(),
    "c_mhsa": Variant(2, (2, 0), (4, 0), 2),
    "no_split": Variant(4, (4, 4), (4, 2), 4),
    "no_fusion": Variant(2, (1, 1), (1, 1), branch=dict(expand=1, merged=False), projects=False),
}


@register_notrace_module
class MultiScaleInteraction(nn.Module):
    """The token mixer of EMSNet. (B, H, W, C) -> (B, H, W, C), any H and W.

    Half of the channels pass the static branch (pooled convolutions and a gate), half the dynamic one (attention within
    and among coarse windows). No layer has a bias.

    Args:
        dim: Channels in and out, a multiple of 8.
        variant: "full", or a row of the papers' ablations, see VARIANTS: "baseline" to "c_mhsa" add one part at a time;
            "no_split" and "no_fusion" change the full block.
        ratios: Quarters of the static channels that are pooled by 2, kept, and pooled by 4.
        whiten: What the whitening subtracts: the mean over "channel"s at each pixel, or the "spatial" mean.
    """

    def __init__(
        self, dim: int, variant: str = "full", ratios: tuple[int, int, int] = (1, 2, 1), whiten: str = "channel"
    ):
        super().__init__()
        if dim % 8:
            raise ValueError(f"dim={dim} does not split into the slices of an EMS block; choose a multiple of 8")
        check_choice("variant", variant, VARIANTS)
        check_choice("whiten", whiten, ("channel", "spatial"))
        if len(ratios) != 3 or sum(ratios) != 4 or min(ratios) < 0:
            raise ValueError(f"ratios={tuple(ratios)} are not three quarters-of-the-channels that add up to 4")
        self.variant, parts, quarter = variant, VARIANTS[variant], dim // 4
        self.slices = [parts.static * quarter, sum(parts.dynamic) * quarter]
        self.in_proj = nn.Linear(dim, sum(self.slices), bias=False)
        self.static: nn.Module = nn.Identity()
        width = self.slices[0]  # of what reaches the output projection
        if parts.branch is not None:
            options: dict[str, Any] = {"ratios": ratios, "whiten": whiten, **parts.branch}
            self.static = StaticBranch(width, **options)
            width = self.static.width
        elif parts.whitens:
            self.static = nn.Sequential(OrderedDict(whiten=Whiten(dim, whiten)))
        self.dynamic: nn.Module = nn.Identity()
        if any(parts.dynamic):
            self.dynamic = DynamicBranch(*(n * quarter for n in (*parts.dynamic, *parts.widths, parts.merged)))
            width += parts.merged * quarter
        self.out_proj = nn.Linear(width, dim, bias=False) if parts.projects else nn.Identity()

    def folded(self) -> nn.Module:
        """The full mixer with its chains of linear layers multiplied out, for inference; other variants as they are."""
        static: Any = self.static
        return FoldedInteraction(self) if self.variant == "full" and not static.whiten.spatial else self

    def forward(self, x: Tensor) -> Tensor:
        static, dynamic = self.in_proj(x).split(self.slices, -1)
        mixed = self.static(static)
        return self.out_proj(torch.cat([mixed, self.dynamic(dynamic)], -1) if self.slices[1] else mixed)


class Whiten(nn.Module):
    """A linear layer and the removal of the mean. (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self, dim: int, mean: str = "channel"):
        super().__init__()
        self.spatial = mean == "spatial"
        self.weight = nn.Parameter(torch.empty(dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.spatial:
            return F.linear(x - x.mean((1, 2), keepdim=True), self.weight)
        # The mean over output channels is removed from the weights instead of the map, which saves a pass.
        return F.linear(x, self.weight - self.weight.mean(0, keepdim=True))


class StaticBranch(nn.Module):
    """Whitening, depth-wise convolution, pooled coordinate convolutions and a gate. (B, H, W, C) -> (B, H, W, C').

    A ratio of 0 leaves its slice out; pooled slices become `expand` times wider; if `merged`, a linear layer mixes all
    back to dim channels; if `gated`, the result is, through a sigmoid, the gate of a projection of the input.
    """

    def __init__(self, dim: int, ratios: tuple[int, int, int], whiten: str, expand: int = 2, merged=True, gated=True):
        super().__init__()
        self.slices = [dim * r // 4 for r in ratios]
        pooled2, kept, pooled4 = self.slices
        self.whiten, self.dw = Whiten(dim, whiten), ChannelConv(dim, (3, 3))
        self.pool2 = PooledBranch(pooled2, expand * pooled2, 2) if pooled2 else nn.Identity()
        self.pool4 = PooledBranch(pooled4, expand * pooled4, 4) if pooled4 else nn.Identity()
        width = expand * pooled2 + kept + expand * pooled4
        self.merge = nn.Linear(width, dim, bias=False) if merged else nn.Identity()
        self.width = dim if merged else width  # of the result
        self.gated, self.gate = gated, nn.Linear(dim, dim, bias=False) if gated else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.whiten(x))
        return self.gate(x) * mixed.sigmoid() if self.gated else mixed

    def mix(self, whitened: Tensor) -> Tensor:
        fine, kept, coarse = self.dw(whitened).split(self.slices, -1)
        return self.merge(torch.cat([self.pool2(fine), kept, self.pool4(coarse)], -1))


class DynamicBranch(nn.Module):
    """Attention within coarse windows (C-MHSA) and among all coarse cells (G-MHSA). (B, H, W, C) -> (B, H, W, out).

    The first local_dim and the last global_dim channels feed the two paths, each pooled before it is widened: the same
    function, as both are linear, and less work. A global_dim of 0 leaves that path out; an out of 0 concatenates only.
    """

    def __init__(self, local_dim: int, global_dim: int, local_width: int, global_width: int, out: int):
        super().__init__()
        self.slices = [local_dim, global_dim]
        self.local = AttentionPath(local_dim, local_width, 4, CMHSA(local_width))
        if global_dim:
            self.global_ = AttentionPath(global_dim, global_width, 6, GMHSA(global_width))
        self.merge = nn.Linear(local_width + global_width, out, bias=False) if out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if not self.slices[1]:
            return self.merge(self.local(x))
        near, far = x.split(self.slices, -1)
        return self.merge(torch.cat([self.local(near), self.global_(far)], -1))
