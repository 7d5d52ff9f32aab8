"""The multi-scale interaction with its chains of linear layers multiplied out: what `fuse` puts in its place."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from ..patches import average_pool


@register_notrace_module
class FoldedInteraction(nn.Module):
    """The inference form of a full MultiScaleInteraction, whose parts it takes over. (B, H, W, C) -> (B, H, W, C).

    Whitening and gate read the input directly. Averages of valid pixels commute with affine maps, so that the input of
    the dynamic half is pooled first, and one product gives all that an attention needs.
    """

    def __init__(self, mixer: Any):
        super().__init__()
        static, dynamic = mixer.static, mixer.dynamic
        local, far = dynamic.local, dynamic.global_
        half, quarter = mixer.in_proj.in_features // 2, mixer.in_proj.in_features // 4
        weight = mixer.in_proj.weight.cpu().double()
        bias = torch.zeros_like(weight[:, 0]) if mixer.in_proj.bias is None else mixer.in_proj.bias.cpu().double()
        affine = torch.cat([weight, bias[:, None]], 1)  # C C+1: the input projection with its bias as a last column
        static_half, near, wide = affine.split([half, quarter, quarter])
        whiten = static.whiten.weight.cpu().double()
        expanded = local.expand.weight.cpu().double() @ near
        self.whiten = _linear((whiten - whiten.mean(0, keepdim=True)) @ static_half, mixer)
        self.gate = _linear(static.gate.weight.cpu().double() @ static_half, mixer)
        self.local_in = _linear(torch.cat([expanded, local.attn.value.weight.cpu().double() @ expanded]), mixer)
        self.global_in = _linear(far.attn.qkv.weight.cpu().double() @ far.expand.weight.cpu().double() @ wide, mixer)
        self.static, self.local, self.global_ = static, local, far
        out = mixer.out_proj.weight.cpu().double()
        self.out_static = _linear(out[:, :half], mixer, bias=False)
        self.out_dynamic = _linear(out[:, half:] @ dynamic.merge.weight.cpu().double(), mixer, bias=False)
        # What is multiplied out is not needed any more.
        static.whiten, static.gate = nn.Identity(), nn.Identity()
        local.expand, local.attn.value = nn.Identity(), nn.Identity()
        far.expand, far.attn.qkv = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        size, local, far = x.shape[1:3], self.local, self.global_
        gated = self.gate(x) * self.static.mix(self.whiten(x)).sigmoid()
        keys, values = self.local_in(average_pool(x, local.patch)).chunk(2, -1)
        near = local.prop(local.attn.proj(local.attn.attend(keys, values)), *size)
        far = far.prop(far.attn.proj(far.attn.attend(self.global_in(average_pool(x, far.patch)))), *size)
        return self.out_static(gated) + self.out_dynamic(torch.cat([near, far], -1))


def _linear(affine: Tensor, mixer: Any, bias: bool = True) -> nn.Linear:
    """A linear layer of the mixer's precision from its weight, of which the last column is the bias if there is one."""
    width, like = affine.shape[1] - bias, mixer.in_proj.weight
    layer = nn.Linear(width, len(affine), bias=bias, device="meta")
    layer.weight = nn.Parameter(affine[:, :width].to(like), requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(affine[:, -1].to(like), requires_grad=False)
    return layer
