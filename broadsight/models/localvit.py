"""LocalViT: Bringing Locality to Vision Transformers (Li et al., arXiv:2104.05707). Readings: docs/models.md."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import SqueezeExcite
from timm.models import checkpoint, generate_default_cfgs, register_model, vision_transformer
from torch import Tensor, nn

from ..errors import check_choice
from ..layers.checks import check_images
from ..layers.folding import fold_norm
from ._backbone import build, cfg, feature_take_indices


class LocalViT(vision_transformer.VisionTransformer):
    """timm's ViT whose MLPs are convolutions of the map of patches; (B, 3, H, W) of any size -> (B, classes).

    Args:
        common: As timm's VisionTransformer has them, but for its MLPs, layer scale and dropped patches.
    """

    def __init__(self, **common: Any):
        if strange := [name for name in ("init_values", "patch_drop_rate") if common.get(name)]:
            raise ValueError(f"LocalViT has no {strange[0]}; leave it out")
        any_size: dict[str, Any] = dict(dynamic_img_size=True, dynamic_img_pad=True)
        parts: dict[str, Any] = dict(block_fn=Block, mlp_layer=LocalFeedForward, act_layer=nn.Hardswish)
        super().__init__(**parts, **{**any_size, **common})

    def run(self, images: Tensor, blocks: int, take: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Tokens (B, prefix + N, C) after so many blocks, and after those in `take`."""
        check_images(images, self.in_chans)
        x = self.patch_embed(images)  # B H W C
        grid = x.shape[1], x.shape[2]
        x, taken = self.norm_pre(self._pos_embed(x)), []
        for i, block in enumerate(self.blocks[:blocks]):
            x = checkpoint(block, x, grid) if self.grad_checkpointing else block(x, grid)
            taken += [x] if i in take else []
        return x, taken

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        self._refuse_masks(attn_mask, is_causal)
        return self.norm(self.run(x, len(self.blocks))[0])

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Any = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Outputs of blocks, (B, C, h, w) or (B, N, C) for "NLC", as timm's ViT gives them."""
        self._refuse_masks(attn_mask, is_causal)
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        take, last = feature_take_indices(len(self.blocks), indices)
        grid = self.patch_embed.dynamic_feat_size((x.shape[2], x.shape[3]))
        x, taken = self.run(x, last + 1 if stop_early else len(self.blocks), take)
        count = self.num_prefix_tokens
        parts = [(one[:, count:], one[:, :count]) for one in (map(self.norm, taken) if norm else taken)]
        if output_fmt == "NCHW":
            parts = [(one.mT.unflatten(2, grid).contiguous(), prefix) for one, prefix in parts]
        maps = [one for one, _ in parts]
        if output_dict:
            found: dict[str, Any] = dict(image_intermediates=maps)
            found |= dict(image_intermediates_prefix=[prefix for _, prefix in parts]) if return_prefix_tokens else {}
            return found if intermediates_only else found | dict(image_features=self.norm(x))
        listed = parts if return_prefix_tokens else maps
        return listed if intermediates_only else (self.norm(x), listed)

    @staticmethod
    def _refuse_masks(attn_mask: Tensor | None, is_causal: bool) -> None:
        if attn_mask is not None or is_causal:
            raise ValueError("LocalViT mixes patches by convolutions, which no mask hides; leave it out")


class Block(nn.Module):
    """Attention among all tokens, then convolutions of the patches alone. (B, prefix + h*w, C), (h, w) -> the same.

    Built from timm's arguments of a block. As released, stochastic depth is that of the attention alone.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        whole = vision_transformer.Block(*args, **kwargs)
        self.norm1, self.attn, self.drop_path, self.mlp = whole.norm1, whole.attn, whole.drop_path1, whole.mlp

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        prefix, x = x.split([x.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], 1)
        x = x.mT.unflatten(2, grid)
        return torch.cat([prefix, (x + self.mlp(x)).flatten(2).mT], 1)


class LocalFeedForward(nn.Module):
    """Expand, depth-wise convolution, squeeze and excite, contract. (B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, in_features: int, hidden_features: int, act_layer: type[nn.Module], **timms: Any):
        super().__init__()
        dim, hidden = in_features, hidden_features
        self.fc1, self.norm1 = nn.Conv2d(dim, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.dw = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.norm2, self.act = nn.BatchNorm2d(hidden), act_layer()
        self.se = SqueezeExcite(hidden, rd_channels=max(1, hidden // dim), gate_layer="hard_sigmoid")
        self.fc2, self.norm3 = nn.Conv2d(hidden, dim, 1, bias=False), nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.fc1(x)))
        return self.norm3(self.fc2(self.se(self.act(self.norm2(self.dw(x))))))

    def reparameterize(self) -> None:
        for layer, norm in (("fc1", "norm1"), ("dw", "norm2"), ("fc2", "norm3")):
            fold_norm(self, layer, norm)


default_cfgs = generate_default_cfgs(
    {"localvit_tiny": cfg(first_conv="patch_embed.proj", classifier="head", pool_size=None)}
)


@register_model
def localvit_tiny(pretrained: bool = False, **kwargs: Any) -> LocalViT:
    arch = dict(embed_dim=192, depth=12, num_heads=4)
    maps = dict(out_indices=3, feature_cls="getter")
    defaults: dict[str, Any] = dict(feature_cfg=maps, pretrained_filter_fn=vision_transformer.checkpoint_filter_fn)
    return build(LocalViT, "localvit_tiny", pretrained, arch, {**defaults, **kwargs})
