"""PVT: Pyramid Vision Transformer, the first version (ICCV 2021, arXiv:2102.12122). Readings: docs/models.md."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, DropPath, LayerNorm2d, Mlp, register_notrace_module
from timm.models import checkpoint_seq, generate_default_cfgs
from timm.models.twins import GlobalSubSampleAttn
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

from ..errors import check_choice
from ..layers.any_size import pad_to
from ._backbone import Sizes, Stage, StagedBackbone, cfg, make_stages, register_class

SIDE = 224  # of the images whose places have a position each; others interpolate between them


class PVT(StagedBackbone):
    """Four stages of attention with spatial reduction, a class token in the last; features at strides 4, 8, 16, 32.

    Args:
        dims, depths, heads, mlp_ratios: Channels, blocks, attention heads and MLP expansion of each stage.
        reductions: Side of the patches that become one key and value in each stage.
        class_token: Whether a class token joins in the last stage and is classified; otherwise the average is.
            With it, `forward_features` gives (B, 1 + N, C), the class token first; maps are without it.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0 at the first.
        global_pool: "token", "avg", "max", "avgmax" or "" with a class token.
        common: num_classes, in_chans, drop_rate; anything else is refused.
    """

    def __init__(
        self,
        dims: Sizes = (64, 128, 320, 512),
        depths: Sizes = (3, 4, 6, 3),
        heads: Sizes = (1, 2, 5, 8),
        mlp_ratios: Sizes = (8, 8, 4, 4),
        reductions: Sizes = (8, 4, 2, 1),
        class_token: bool = True,
        drop_path_rate: float = 0.0,
        global_pool: str | None = None,
        in_chans: int = 3,
        **common,
    ):
        if class_token and reductions[-1] != 1:
            raise ValueError(f"reductions={tuple(reductions)} reduce the last stage; a class token needs a 1 there")

        def block(i: int, drop_path: float) -> Block:
            return Block(dims[i], heads[i], mlp_ratios[i], reductions[i], drop_path)

        def downsample(i: int) -> PatchEmbed:
            return PatchEmbed(dims[i - 1], dims[i], 2, SIDE // 2 ** (i + 2))

        per_stage: dict[str, Any] = dict(dims=dims, heads=heads, mlp_ratios=mlp_ratios, reductions=reductions)
        stages = make_stages(depths, drop_path_rate, block=block, downsample=downsample, **per_stage)
        norm: nn.Module = LayerNorm2d(dims[-1], eps=1e-6)
        head: Callable[..., ClassifierHead] | None = None
        if class_token:
            stages[-1] = TokenStage(stages[-1], dims[-1])
            norm, head = nn.LayerNorm(dims[-1], eps=1e-6), partial(TokenHead, dims[-1])
        pool = global_pool if global_pool is not None else "token" if class_token else "avg"
        common |= dict(norm=norm, head=head, in_chans=in_chans, global_pool=pool)
        super().__init__(PatchEmbed(in_chans, dims[0], 4, SIDE // 4), stages, dims, **common)
        self.dynamic_img_size = True  # by timm's word: positions are resampled for images of other sizes

    def init_module(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without the class token, where the model has none."""
        own = self.state_dict()
        kept = {key: value for key, value in state_dict.items() if key in own or ".cls_" not in key}
        return super().adapt_checkpoint(kept)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith(("pos_embed", "cls_token"))}

    def as_map(self, features: Tensor, grid: Sizes) -> Tensor:
        return features if features.ndim == 4 else features[:, 1:].mT.unflatten(2, list(grid))


@register_notrace_module
class Block(nn.Module):
    """Attention to patches and an MLP, each residual. (B, H, W, C), or tokens (B, N, C) if nothing is reduced."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float, reduction: int, drop_path: float):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = GlobalSubSampleAttn(dim, heads, sr_ratio=reduction), Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attend(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Zeros at the bottom and the right fill the last patches up."""
        if x.ndim == 3:
            return self.attn(x, (x.shape[1], 1))
        H, W, side = x.shape[1], x.shape[2], self.attn.sr_ratio
        grid = (H + side - 1) // side * side, (W + side - 1) // side * side
        return self.attn(pad_to(x, *grid).flatten(1, 2), grid).unflatten(1, grid)[:, :H, :W]


@register_notrace_module
class PatchEmbed(nn.Module):
    """Non-overlapping patches, a LayerNorm, and learned positions. (B, C, H, W) -> (B, C', H/side, W/side), rounded up.

    `grid` is how many places a side have a position of their own.
    """

    def __init__(self, in_dim: int, dim: int, side: int, grid: int):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(in_dim, dim, side, stride=side), LayerNorm2d(dim, eps=1e-5)
        self.pos_embed = nn.Parameter(torch.empty(1, dim, grid, grid))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        H, W, side = x.shape[2], x.shape[3], self.conv1.stride[0]
        grid = (H + side - 1) // side, (W + side - 1) // side
        x = self.norm(self.conv1(F.pad(x, [0, grid[1] * side - W, 0, grid[0] * side - H])))
        positions, size = self.pos_embed, [x.shape[2], x.shape[3]]
        if list(positions.shape[2:]) != size:
            positions = F.interpolate(positions, size, mode="bilinear")
        return x + positions


class TokenStage(Stage):
    """A stage whose blocks see a class token too. (B, C, H, W) -> (B, 1 + H'*W', C')."""

    def __init__(self, stage: Stage, dim: int):
        super().__init__(stage.downsample, list(stage.blocks))
        self.cls_token, self.cls_pos_embed = (nn.Parameter(torch.empty(1, 1, dim)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.cls_pos_embed, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x).flatten(2).mT
        x = torch.cat([(self.cls_token + self.cls_pos_embed).expand(x.shape[0], -1, -1), x], 1)
        return checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)


class TokenPool(nn.Module):
    """One vector of tokens whose first is the class token. (B, 1 + N, C) -> (B, C), or as they are for ""."""

    def __init__(self, pool_type: str):
        super().__init__()
        check_choice("global_pool", pool_type, ("token", "avg", "max", "avgmax", ""))
        self.pool_type = pool_type

    def is_identity(self) -> bool:
        return not self.pool_type

    def feat_mult(self) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        return global_pool_nlc(x, self.pool_type)


class TokenHead(ClassifierHead):
    """A classifier of the class token or, by its pool_type, of the other tokens. (B, 1 + N, C) -> (B, classes)."""

    def __init__(self, in_features: int, num_classes: int, pool_type: str = "token", drop_rate: float = 0.0):
        super().__init__(in_features, num_classes, drop_rate=drop_rate)
        self.global_pool = TokenPool(pool_type)

    def reset(self, num_classes: int, pool_type: str | None = None, *args: Any, **options: Any) -> None:
        if pool_type is not None:
            self.global_pool = TokenPool(pool_type).train(self.training)
        super().reset(num_classes, None, *args, **options)


_DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}
_ARCHITECTURES = {f"pvt_{size}": dict(depths=depths) for size, depths in _DEPTHS.items()}
default_cfgs = generate_default_cfgs(dict.fromkeys(_ARCHITECTURES, cfg()))
__getattr__ = register_class(__name__, PVT, _ARCHITECTURES)
