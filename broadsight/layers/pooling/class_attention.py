"""Attention of a few class tokens over an image, for several groups of tokens at once and without keys and values."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from ..kernels.products import group_product
from .group_linear import GroupLayerNorm, GroupLinear, GroupMlp, LeanDropout


@register_notrace_module
class GroupClassAttention(nn.Module):
    """Tokens ask themselves and the image, then pass an MLP; the image stays as it is.

    Tokens (G, B, Q, D), image (B, n, D) -> (G, B, q, D), with q <= Q rows asking.

    There are few queries and many positions, so keys and values are never formed: q . (W z) = (W' q) . z, and a
    weighted sum of W z is W applied to the weighted sum of z. What remains are two products with the image, which is
    standardized once for all groups. Terms that are the same for every key (biases of the keys and the first mixing,
    the shift of the norm) fall out of the soft-max.

    Args:
        dim, groups, heads, attn_dim: Channels D of tokens and image; groups G; heads, and the width of all together.
        mlp_ratio, mlp_groups: Hidden width of the MLP over D, and its channel groups.
        head_mixing: Mix the heads linearly before and after the soft-max, each time beside an identity.
        drop: Dropout of attention weights, projection and the MLP's hidden layer.
    """

    def __init__(
        self,
        dim: int,
        groups: int,
        heads: int,
        attn_dim: int,
        *,
        mlp_ratio: float = 4,
        mlp_groups: int = 1,
        head_mixing: bool = False,
        drop: float = 0.0,
    ):
        super().__init__()
        self.groups, self.heads, self.scale = groups, heads, (attn_dim // heads) ** -0.5
        self.norm1: nn.Module = GroupLayerNorm(groups, dim, eps=1e-6)
        self.q, self.k, self.v = (GroupLinear(groups, dim, attn_dim) for _ in range(3))
        mixings = (GroupLinear(groups, heads, heads) if head_mixing else None for _ in range(2))
        self.mix_before, self.mix_after = mixings
        self.proj = GroupLinear(groups, attn_dim, dim)
        self.norm2 = GroupLayerNorm(groups, dim, eps=1e-6)
        self.mlp = GroupMlp(groups, dim, round(mlp_ratio * dim), mlp_groups, drop)
        self.drop = LeanDropout(drop)

    def forward(self, tokens: Tensor, image: Tensor, asking: slice = slice(None)) -> Tensor:
        """`asking` picks the rows of the tokens that are wanted; all of them are asked."""
        G, B, _, D = tokens.shape
        keys = nn.functional.layer_norm(tokens, (D,), eps=1e-6)
        image = nn.functional.layer_norm(image, (D,), eps=1e-6)
        found = self.attend(keys[:, :, asking], keys, image)  # G B*q D
        x = tokens[:, :, asking].reshape(G, -1, D) + self.drop(self.proj(found))
        return (x + self.mlp(self.norm2(x))).view(G, B, -1, D)

    def attend(self, queries: Tensor, keys: Tensor, image: Tensor) -> Tensor:
        """Everything standardized: (G, B, q, D), (G, B, Q, D), (B, n, D) -> (G, B*q, attn_dim)."""
        G, B, Q, D = keys.shape
        q, H = queries.shape[2], self.heads
        # An inference form has taken the norm's scale and shift into the weights.
        scale, shift = self.norm1.scale_and_shift() if isinstance(self.norm1, GroupLayerNorm) else (None, None)
        queries = queries.reshape(G, B * q, D)
        queries = queries if scale is None or shift is None else torch.addcmul(shift, queries, scale)
        query = self.q(queries, self.scale).view(G, B * q, H, -1).transpose(1, 2).reshape(G * H, B * q, -1)
        key_weight = self.k.weight if scale is None else self.k.weight * scale  # G attn_dim D
        wide = torch.bmm(query, key_weight.view(G * H, -1, D)).view(G, H, B * q * D)
        if self.mix_before is not None:
            wide = torch.baddbmm(wide, self.mix_before.weight, wide)
        wide = wide.view(G, H, B, q, D).permute(2, 0, 1, 3, 4).contiguous().view(B, G * H * q, D)
        own = keys.transpose(0, 1).reshape(B * G, Q, D)  # every group's own tokens
        at_own = torch.bmm(wide.view(B * G, H * q, D), own.mT).view(B, G * H * q, Q)
        at_image = torch.bmm(wide, image.mT)  # B GHq n
        scores = torch.cat([at_own, at_image], -1)
        if torch.is_grad_enabled():
            scores = scores + self.constants(query, B)
        attention = scores.softmax(-1)
        attention = attention if self.mix_after is None else self.mix(attention, self.mix_after)
        attention = self.drop(attention).to(image.dtype)
        seen = torch.bmm(attention[..., Q:], image).view(B * G, H * q, D)
        seen = torch.baddbmm(seen, attention[..., :Q].reshape(B * G, H * q, Q), own)
        seen = seen.view(B, G, H, q, D).permute(1, 2, 0, 3, 4).reshape(G * H, B * q, D)
        value_weight = self.v.weight if scale is None else self.v.weight * scale
        value_bias = self.v.bias.view(G * H, 1, -1)
        if shift is not None:
            value_bias = value_bias + torch.bmm(self.v.weight, shift.mT).view(value_bias.shape)
        if self.mix_after is not None or (self.training and self.drop.p):  # weights that no longer sum to one
            value_bias = value_bias * attention.sum(-1).view(B, G * H, q).transpose(0, 1).reshape(G * H, B * q, 1)
        found = group_product(seen, value_weight.view(G * H, -1, D)) + value_bias  # GH B*q d
        return found.view(G, H, B * q, -1).transpose(1, 2).reshape(G, B * q, -1)

    def constants(self, query: Tensor, B: int) -> Tensor:
        """Terms (B, G*H*q, 1) that the soft-max drops.

        Added so that autograd, and whoever counts on it (distributed training), finds every parameter used: with a
        gradient of zero.
        """
        G, H = self.groups, self.heads
        constant = torch.bmm(query, self.k.bias.view(G * H, -1, 1)).view(G, H, -1)  # G H B*q
        if self.mix_before is not None:
            constant = constant + torch.baddbmm(self.mix_before.bias.view(G, H, 1), self.mix_before.weight, constant)
        return constant.view(G * H, B, -1).transpose(0, 1).reshape(B, -1, 1)

    def mix(self, attention: Tensor, mixing: GroupLinear) -> Tensor:
        """attention + mixing(attention over the heads). (B, G*H*q, N) -> the same."""
        (B, rows, N), G, H = attention.shape, self.groups, self.heads
        heads = attention.view(B * G, H, -1)  # B*G H q*N
        weight = mixing.weight.expand(B, -1, -1, -1).reshape(B * G, H, H)
        mixed = torch.baddbmm(heads, weight, heads).view(B, G, H, -1) + mixing.bias.view(G, H, 1)
        return mixed.view(B, rows, N)

    def reparameterize(self) -> None:
        if isinstance(self.norm1, GroupLayerNorm):
            for layer in (self.q, self.k, self.v):
                layer.take_in(*self.norm1.scale_and_shift())
            self.norm1 = nn.Identity()
