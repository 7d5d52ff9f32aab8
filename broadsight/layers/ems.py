"""Efficient multi-scale interaction (EMS): static and dynamic mixing of channel slices at several scales."""

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .any_size import crop_to, symbolic
from .exported import attention, exporting, split_heads

VARIANTS = ("full", "baseline", "whiten", "patch2", "patch4", "gated", "c_mhsa", "no_split", "no_fusion")


@register_notrace_module
class MultiScaleInteraction(nn.Module):
    """The token mixer of EMSNet. (B, H, W, C) -> (B, H, W, C), any H and W.

    Half of the channels pass the static branch (pooled convolutions and a gate), half the dynamic one (attention within
    and among coarse windows). No layer has a bias.

    Args:
        dim: Channels in and out, a multiple of 8.
        variant: "full", or a row of the papers' ablations: "baseline", "whiten", "patch2", "patch4", "gated" and
            "c_mhsa" add one part at a time; "no_split" and "no_fusion" change the full block.
        ratios: Quarters of the static channels that are pooled by 2, kept, and pooled by 4.
        whiten: What the whitening subtracts: the mean over "channel"s at each pixel, or the "spatial" mean.
    """

    def __init__(
        self, dim: int, variant: str = "full", ratios: tuple[int, int, int] = (1, 2, 1), whiten: str = "channel"
    ):
        super().__init__()
        if dim % 8:
            raise ValueError(f"dim={dim} does not split into the slices of an EMS block; choose a multiple of 8")
        if variant not in VARIANTS:
            raise ValueError(f"variant={variant!r} is not known; choose one of {', '.join(VARIANTS)}")
        if len(ratios) != 3 or sum(ratios) != 4 or min(ratios) < 0:
            raise ValueError(f"ratios={tuple(ratios)} are not three quarters-of-the-channels that add up to 4")
        if whiten not in ("channel", "spatial"):
            raise ValueError(f"whiten={whiten!r} is not known; choose 'channel' or 'spatial'")
        self.variant = variant
        self.splits = variant in ("full", "c_mhsa", "no_fusion")
        half = dim // 2
        self.in_proj = nn.Linear(dim, 3 * dim if variant == "no_split" else dim, bias=False)
        self.static: nn.Module = nn.Identity()
        self.dynamic: nn.Module = nn.Identity()
        width = dim  # of what reaches the output projection
        if variant == "whiten":
            self.static = nn.Sequential(OrderedDict(whiten=Whiten(dim, whiten)))
        elif variant == "patch2":
            self.static = StaticBranch(dim, (2, 2, 0), whiten, merged=False, gated=False)
            width = self.static.width
        elif variant == "patch4":
            self.static = StaticBranch(dim, ratios, whiten, merged=False, gated=False)
            width = self.static.width
        elif variant == "gated":
            self.static = StaticBranch(dim, ratios, whiten)
        elif variant == "c_mhsa":
            self.static = StaticBranch(half, ratios, whiten)
            self.dynamic = DynamicBranch(half, 0, local_width=dim, global_width=0, out=half)
        elif variant == "full":
            self.static = StaticBranch(half, ratios, whiten)
            self.dynamic = DynamicBranch(dim // 4, dim // 4, local_width=half, global_width=dim // 4, out=half)
        elif variant == "no_split":
            self.static = StaticBranch(dim, ratios, whiten)
            self.dynamic = DynamicBranch(dim, dim, local_width=dim, global_width=half, out=dim)
            width = 2 * dim
        elif variant == "no_fusion":
            self.static = StaticBranch(half, ratios, whiten, expand=1, merged=False)
            self.dynamic = DynamicBranch(dim // 4, dim // 4, local_width=dim // 4, global_width=dim // 4, out=0)
        self.out_proj = nn.Identity() if variant == "no_fusion" else nn.Linear(width, dim, bias=False)

    @torch.jit.ignore
    def folded(self) -> nn.Module:
        """The full mixer with its chains of linear layers multiplied out, for inference; other variants as they are."""
        static: Any = self.static
        return FoldedInteraction(self) if self.variant == "full" and not static.whiten.spatial else self

    def forward(self, x: Tensor) -> Tensor:
        z = self.in_proj(x)
        if self.splits or self.variant == "no_split":
            static_width = z.shape[-1] // (2 if self.splits else 3)
            still, moving = z[..., :static_width], z[..., static_width:]
            return self.out_proj(torch.cat([self.static(still), self.dynamic(moving)], -1))
        return self.out_proj(self.static(z))


@register_notrace_module
class FoldedInteraction(nn.Module):
    """The inference form of the full mixer: chains of linear layers multiplied out. (B, H, W, C) -> (B, H, W, C).

    Whitening and gate read the input directly. Averages of valid pixels commute with affine maps, so the dynamic half
    of the input projection never runs at full size: the input is pooled, and one product gives all that an attention
    needs.

    Args:
        mixer: A full MultiScaleInteraction, whose parts are taken over.
    """

    def __init__(self, mixer: Any):
        super().__init__()
        static, dynamic = mixer.static, mixer.dynamic
        local, far = dynamic.local, dynamic.global_
        half, quarter = mixer.in_proj.in_features // 2, mixer.in_proj.in_features // 4
        weight = mixer.in_proj.weight.double()
        bias = torch.zeros_like(weight[:, 0]) if mixer.in_proj.bias is None else mixer.in_proj.bias.double()
        affine = torch.cat([weight, bias[:, None]], 1)  # C C+1: the input projection with its bias as a last column
        still, near, wide = affine.split([half, quarter, quarter])
        whiten = static.whiten.weight.double()
        expanded = local.expand.weight.double() @ near
        self.whiten = _linear((whiten - whiten.mean(0, keepdim=True)) @ still, mixer.in_proj)
        self.gate = _linear(static.gate.weight.double() @ still, mixer.in_proj)
        self.local_in = _linear(torch.cat([expanded, local.attn.value.weight.double() @ expanded]), mixer.in_proj)
        self.global_in = _linear(far.attn.qkv.weight.double() @ far.expand.weight.double() @ wide, mixer.in_proj)
        self.static, self.local, self.global_ = static, local, far
        out = mixer.out_proj.weight.double()
        self.out_static = _linear(out[:, :half], mixer.in_proj, bias=False)
        self.out_dynamic = _linear(out[:, half:] @ dynamic.merge.weight.double(), mixer.in_proj, bias=False)
        # What is multiplied out is not needed any more.
        static.whiten, static.gate = nn.Identity(), nn.Identity()
        local.expand, local.attn.value = nn.Identity(), nn.Identity()
        far.expand, far.attn.qkv = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[1], x.shape[2]
        spare = spare_cells(H, W)
        gated = self.gate(x) * self.static.mix(self.whiten(x)).sigmoid()
        cells = self.local_in(average_pool(x, self.local.patch))
        if spare:  # a bias reaches spare cells too, but they have to be zero
            h, w = cells.shape[1], cells.shape[2]
            cells = cells * real_cells(h, w, h - spare, w - spare, x)[:, :, None].to(cells.dtype)
        keys, values = cells.chunk(2, -1)
        near = self.local.prop(self.local.attn.proj(self.local.attn.attend(keys, values, spare)), H, W)
        far = self.global_.attn.attend(self.global_in(average_pool(x, self.global_.patch)), spare)
        far = self.global_.prop(self.global_.attn.proj(far), H, W)
        return self.out_static(gated) + self.out_dynamic(torch.cat([near, far], -1))


def _linear(affine: Tensor, like: nn.Linear, bias: bool = True) -> nn.Linear:
    """A linear layer from its weight, of which the last column is the bias if there is one."""
    weight, shift = (affine[:, :-1], affine[:, -1]) if bias else (affine, None)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, device="meta")
    layer.weight = nn.Parameter(weight.to(like.weight), requires_grad=False)
    if shift is not None:
        layer.bias = nn.Parameter(shift.to(like.weight), requires_grad=False)
    return layer


class Whiten(nn.Module):
    """A linear layer and the removal of the mean. (B, H, W, C) -> (B, H, W, C).

    The mean over output channels is removed from the weights, not from the map: the same numbers, one pass less.
    """

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
        return F.linear(x, self.weight - self.weight.mean(0, keepdim=True))


class StaticBranch(nn.Module):
    """Whitening, depth-wise convolution, pooled coordinate convolutions and a gate. (B, H, W, C) -> (B, H, W, C').

    Args:
        dim: Channels in.
        ratios: Quarters of the channels that are pooled by 2, kept, and pooled by 4; 0 leaves a part out.
        whiten: See MultiScaleInteraction.
        expand: How much wider a pooled slice becomes.
        merged: Mix the slices by a linear layer back to dim channels.
        gated: Use the result, through a sigmoid, as the gate of a projection of the input.
    """

    def __init__(
        self,
        dim: int,
        ratios: tuple[int, int, int],
        whiten: str = "channel",
        *,
        expand: int = 2,
        merged: bool = True,
        gated: bool = True,
    ):
        super().__init__()
        pooled2, kept, pooled4 = (dim * r // 4 for r in ratios)
        self.slices: list[int] = [pooled2, kept, pooled4]
        self.whiten = Whiten(dim, whiten)
        self.dw = ChannelConv(dim, (3, 3))
        self.pool2 = PooledBranch(pooled2, expand * pooled2, 2) if pooled2 else nn.Identity()
        self.pool4 = PooledBranch(pooled4, expand * pooled4, 4) if pooled4 else nn.Identity()
        self.width = expand * pooled2 + kept + expand * pooled4
        self.merge = nn.Linear(self.width, dim, bias=False) if merged else nn.Identity()
        self.gate = nn.Linear(dim, dim, bias=False) if gated else nn.Identity()
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.whiten(x))
        return self.gate(x) * mixed.sigmoid() if self.gated else mixed

    def mix(self, whitened: Tensor) -> Tensor:
        fine, kept, coarse = self.dw(whitened).split(self.slices, -1)
        return self.merge(torch.cat([self.pool2(fine), kept, self.pool4(coarse)], -1))


class PooledBranch(nn.Module):
    """Max-pool, widen, coordinate convolution, and back to full size. (B, H, W, C) -> (B, H, W, C')."""

    def __init__(self, dim: int, width: int, patch: int):
        super().__init__()
        self.patch = patch
        self.expand = nn.Linear(dim, width, bias=False)
        # The coordinate depth-wise convolution: along the rows, then along the columns.
        self.conv_h = ChannelConv(width, (1, 3))
        self.conv_v: nn.Module = ChannelConv(width, (3, 1))
        self.prop = Propagate(width, patch)

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[1], x.shape[2]
        return self.prop(self.conv_v(self.conv_h(self.expand(max_pool(x, self.patch)))), H, W)

    @torch.jit.ignore
    def reparameterize(self) -> None:
        """One 3x3 convolution for both, for inference. Without biases, zeros beyond the border stay zeros."""
        if isinstance(self.conv_v, ChannelConv):
            both = ChannelConv(self.expand.out_features, (3, 3))
            both.weight = nn.Parameter((self.conv_v.weight * self.conv_h.weight).detach(), requires_grad=False)
            self.conv_h, self.conv_v = both, nn.Identity()


class DynamicBranch(nn.Module):
    """Attention within coarse windows (C-MHSA) and among all coarse cells (G-MHSA). (B, H, W, C) -> (B, H, W, out).

    The pooling comes before the widening projection, which is the same function, as both are linear, and less work.

    Args:
        local_dim, global_dim: Channels, first and last, that feed the two paths; 0 leaves the global path out.
        local_width, global_width: Widths of the two attentions.
        out: Channels of the merged result; 0 concatenates only.
    """

    def __init__(self, local_dim: int, global_dim: int, *, local_width: int, global_width: int, out: int):
        super().__init__()
        self.slices: list[int] = [local_dim, global_dim]
        self.local = AttentionPath(local_dim, local_width, 4, CMHSA(local_width))
        self.has_global = global_dim > 0
        if self.has_global:
            self.global_ = AttentionPath(global_dim, global_width, 6, GMHSA(global_width))
        self.merge = nn.Linear(local_width + global_width, out, bias=False) if out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_global:
            return self.merge(self.local(x))
        near, far = x.split(self.slices, -1)
        return self.merge(torch.cat([self.local(near), self.global_(far)], -1))


class AttentionPath(nn.Module):
    """Average-pool, widen, attend, and back to full size. (B, H, W, C) -> (B, H, W, C')."""

    def __init__(self, dim: int, width: int, patch: int, attn: nn.Module):
        super().__init__()
        self.patch = patch
        self.expand = nn.Linear(dim, width, bias=False)
        self.attn = attn
        self.prop = Propagate(width, patch)

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[1], x.shape[2]
        return self.prop(self.attn(self.expand(average_pool(x, self.patch)), spare_cells(H, W)), H, W)

    @torch.jit.ignore
    def extra_macs(self, convention, inputs, output) -> int:
        """The paper widens before it pools: the same result from a projection at full size."""
        B, H, W, C = inputs[0].shape
        coarse = -(-H // self.patch) * -(-W // self.patch)
        return B * (H * W - coarse) * self.expand.weight.numel()


class CMHSA(nn.Module):
    """Convolution-like multi-head attention over 3x3 windows at stride 2. (B, h, w, C) -> (B, h, w, C).

    The 9x9 weights of a window are predicted from its centre; every window re-mixes its nine values, and overlapping
    windows are summed. Values beyond the border are zero and keep their share of the soft-max.

    Args:
        dim: Channels; heads are 32 wide, at least one.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.heads = heads_of_32(dim)
        self.dw = ChannelConv(dim, (3, 3), stride=2)
        self.mix = nn.Linear(dim, 81 * self.heads, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, spare: int = 0) -> Tensor:
        """The last `spare` rows and columns are zero and not part of the map."""
        return self.proj(self.attend(x, self.value(x), spare))

    def attend(self, x: Tensor, value: Tensor, spare: int) -> Tensor:
        """Windows of the values (B, h, w, C), mixed as x (B, h, w, C) predicts. -> (B, h, w, C)."""
        if exporting():
            return self.attend_in_few_nodes(x, value, spare)
        B, h, w, C = value.shape
        rows, columns = (h + 1) // 2, (w + 1) // 2
        weights = self.mix(self.dw(x)).view(B, rows, columns, self.heads, 9, 9).permute(3, 0, 1, 2, 4, 5).softmax(-1)
        padded = F.pad(value, [0, 0, 1, 2 * columns - w, 1, 2 * rows - h])
        windows = padded.unfold(1, 3, 2).unfold(2, 3, 2)  # B rows columns C 3 3
        windows = windows.unflatten(3, (self.heads, -1)).permute(3, 0, 1, 2, 5, 6, 4).contiguous().flatten(4, 5)
        mixed = (weights @ windows).unflatten(4, (3, 3))  # heads B rows columns 3 3 d
        mixed = mixed.permute(1, 2, 4, 3, 5, 0, 6).contiguous().flatten(5)  # B rows 3 columns 3 C
        if spare:  # windows around spare cells would reach back into the map
            inside = real_cells(rows, columns, (h - spare + 1) // 2, (w - spare + 1) // 2, x)
            mixed = mixed * inside[:, None, :, None, None].to(mixed.dtype)
        # Overlapping windows are summed on a map padded by one, along the rows and then along the columns.
        mixed = overlap_add(mixed, 1)  # B 2*rows+2 columns 3 C
        return crop_to(overlap_add(mixed, 2), h, w, start=1)

    @torch.jit.unused
    def attend_in_few_nodes(self, x: Tensor, value: Tensor, spare: int) -> Tensor:
        """The same for exported programs: unfolding, which runtimes do not know, becomes slices of pairs of cells."""
        B, h, w, C = value.shape
        rows, columns = (h + 1) // 2, (w + 1) // 2
        # Images and rows stay one dimension: with both, tensors would have more than the six that XNNPACK knows.
        weights = self.mix(self.dw(x)).view(B * rows, columns, self.heads, 9, 9).softmax(-1)
        padded = F.pad(value, [0, 0, 1, 2 * columns + 1 - w, 1, 2 * rows + 1 - h])
        windows = threes(threes(padded, 1, rows), 3, columns)  # B rows 3 columns 3 C
        windows = windows.view(B * rows, 3, columns, 3, self.heads, C // self.heads).permute(0, 2, 4, 1, 3, 5)
        mixed = weights @ windows.reshape(B * rows, columns, self.heads, 9, C // self.heads)
        if spare:  # windows around spare cells would reach back into the map
            inside = real_cells(rows, columns, (h - spare + 1) // 2, (w - spare + 1) // 2, x)
            mixed = mixed * inside.repeat(B, 1)[:, :, None, None, None].to(mixed.dtype)
        mixed = mixed.view(B * rows, columns, self.heads, 3, 3, C // self.heads).permute(0, 3, 1, 4, 2, 5)
        mixed = add_threes(add_threes(mixed.reshape(B, rows, 3, columns, 3, C), 3), 1)
        return crop_to(mixed, h, w, start=1)


class GMHSA(nn.Module):
    """Plain multi-head self-attention among all cells. (B, h, w, C) -> (B, h, w, C).

    Args:
        dim: Channels; heads are 32 wide, at least one.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.heads = heads_of_32(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, spare: int = 0) -> Tensor:
        """The last `spare` rows and columns are not part of the map: nobody attends to them."""
        return self.proj(self.attend(self.qkv(x), spare))

    def attend(self, qkv: Tensor, spare: int) -> Tensor:
        """Projected cells (B, h, w, 3C) -> (B, h, w, C)."""
        B, h, w, C = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
        if exporting():
            return self.attend_in_few_nodes(qkv, spare)
        parts = qkv.view(B, h * w, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)  # 3 B heads N d
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return y.transpose(1, 2).reshape(B, h, w, C)

    @torch.jit.unused
    def attend_in_few_nodes(self, qkv: Tensor, spare: int) -> Tensor:
        """The same for exported programs; these alone have spare cells."""
        B, h, w, C = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
        hidden = None
        if spare:
            real = real_cells(h, w, h - spare, w - spare, qkv).view(1, 1, 1, h * w)
            hidden = torch.zeros_like(real, dtype=qkv.dtype).masked_fill(~real, float("-inf"))
        y = attention(*split_heads(qkv.view(B, h * w, 3 * C), 3, self.heads), hidden)
        return y.transpose(1, 2).reshape(B, h, w, C)


class ChannelConv(nn.Module):
    """A bias-free depth-wise convolution of any kernel and stride. (B, H, W, C) -> (B, H', W', C)."""

    def __init__(self, dim: int, kernel: tuple[int, int], stride: int = 1):
        super().__init__()
        self.stride, self.padding = stride, (kernel[0] // 2, kernel[1] // 2)
        self.weight = nn.Parameter(torch.empty(dim, 1, kernel[0], kernel[1]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, padding = self.weight, self.padding
        if not symbolic(x.shape[1], x.shape[2]) and x.shape[2] == 1:
            # One column of pixels meets one column of the kernel. oneDNN, asked for all of them in bfloat16 with a
            # stride of 2, leaves whatever was in memory in the gradients of the others.
            weight, padding = weight[..., padding[1] : padding[1] + 1], (padding[0], 0)
        x = F.conv2d(x.permute(0, 3, 1, 2), weight, stride=self.stride, padding=padding, groups=weight.shape[0])
        return x.permute(0, 2, 3, 1)


class Propagate(nn.Module):
    """Every coarse cell to its patch of pixels, weighted by channel and place. (B, h, w, C) -> (B, H, W, C).

    A transposed depth-wise convolution whose stride is its kernel: a plain product, cropped to H and W.
    """

    def __init__(self, dim: int, patch: int):
        super().__init__()
        self.patch, self.tiled = patch, False
        self.weight = nn.Parameter(torch.ones(dim, 1, patch, patch))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        B, h, w, C = x.shape
        p = self.patch
        tile = self.weight if self.tiled else self.tile()
        whole = (x.reshape(B, h, 1, w, 1, C) * tile).reshape(B, h * p, w * p, C)
        if not symbolic(H, W) and h * p == H and w * p == W:
            return whole
        else:
            return crop_to(whole, H, W)

    def tile(self) -> Tensor:
        """The weights in the order of pixels. (patch, 1, patch, C)."""
        return self.weight[:, 0].permute(1, 2, 0).reshape(self.patch, 1, self.patch, -1)

    @torch.jit.ignore
    def reparameterize(self) -> None:
        """Keep the weights in the order in which they are used, for inference."""
        if not self.tiled:
            self.weight, self.tiled = nn.Parameter(self.tile().detach().contiguous(), requires_grad=False), True

    @torch.jit.ignore
    def extra_macs(self, convention, inputs, output) -> int:
        """The products, which a counter of convolutions does not see in this form."""
        counted = output if convention.transposed_at_output else inputs[0]
        return counted.numel() * self.patch**2


def average_pool(x: Tensor, patch: int) -> Tensor:
    """Means of the valid pixels of each patch. (B, H, W, C) -> (B, H/patch, W/patch, C), sizes rounded up."""
    H, W = x.shape[1], x.shape[2]
    if spare_cells(H, W):
        means = F.avg_pool2d(whole_patches(x, patch, 0.0), patch)
        valid = F.avg_pool2d(
            whole_patches(torch.ones_like(x[:1, :, :, :1]), patch, 0.0), patch
        )  # shares of the patches
        return (means / valid.clamp(min=patch**-2)).permute(0, 2, 3, 1)
    # A map that is smaller than a patch: some runtimes refuse a kernel that is larger than what it sees.
    x = F.avg_pool2d(x.permute(0, 3, 1, 2), [min(patch, H), min(patch, W)], ceil_mode=True, count_include_pad=False)
    return x.permute(0, 2, 3, 1)


def max_pool(x: Tensor, patch: int) -> Tensor:
    """The largest valid pixel of each patch. (B, H, W, C) -> (B, H/patch, W/patch, C), sizes rounded up."""
    H, W = x.shape[1], x.shape[2]
    if spare_cells(H, W):
        lowest = -3.4e38  # some runtimes begin with the lowest number, and never come to minus infinity
        largest = F.max_pool2d(whole_patches(x, patch, lowest), patch).permute(0, 2, 3, 1)
        return torch.where(largest <= lowest, 0, largest)
    return F.max_pool2d(x.permute(0, 3, 1, 2), [min(patch, H), min(patch, W)], ceil_mode=True).permute(0, 2, 3, 1)


def spare_cells(H: int, W: int) -> int:
    """Rows and columns of empty cells that a pooled map gets at the bottom and the right.

    Torch takes a size of 1 for a constant. So where sizes are symbols, two more keep every count above it, that of the
    stride-two windows included; elsewhere there are none.
    """
    return 2 if symbolic(H, W) else 0


def whole_patches(x: Tensor, patch: int, fill: float) -> Tensor:
    """(B, H, W, C) -> (B, C, h*patch, w*patch), spare cells included; pixels beyond the map are `fill`."""
    H, W = x.shape[1], x.shape[2]
    h, w = (H + patch - 1) // patch + spare_cells(H, W), (W + patch - 1) // patch + spare_cells(H, W)
    return F.pad(x.permute(0, 3, 1, 2), [0, w * patch - W, 0, h * patch - H], value=fill)


def real_cells(h: int, w: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """(h, w), true for the first so many rows and columns."""
    inside = torch.arange(h, device=like.device)[:, None] < rows
    return inside & (torch.arange(w, device=like.device) < columns)


def overlap_add(parts: Tensor, axis: int) -> Tensor:
    """Sums windows of three at stride two along an axis: (..., n, 3, ...) -> (..., 2n + 2, ...), the last place empty.

    Odd places belong to one window; even ones to the last of one window and the first of the next.
    """
    first, middle, last = parts.unbind(axis + 1)
    after = [0, 0] * (first.ndim - axis - 1) + [0, 1]
    before = [0, 0] * (first.ndim - axis - 1) + [1, 0]
    even = F.pad(first, after) + F.pad(last, before)
    return torch.stack([even, F.pad(middle, after)], axis + 1).flatten(axis, axis + 1)


def threes(x: Tensor, axis: int, count: int) -> Tensor:
    """Windows of three at stride two along an axis: (..., 2n + 2, ...) -> (..., n, 3, ...), with n = count."""
    if not isinstance(count, int):  # a symbol: torch cannot prove that such a size splits into pairs
        before = [slice(None)] * axis
        return torch.stack([x[(*before, slice(i, i + 2 * count, 2))] for i in range(3)], axis + 1)
    pairs = x.unflatten(axis, (count + 1, 2))
    return torch.cat([pairs.narrow(axis, 0, count), pairs.narrow(axis, 1, count).narrow(axis + 1, 0, 1)], axis + 1)


def add_threes(parts: Tensor, axis: int) -> Tensor:
    """As overlap_add, with the pairs of places that it fills taken together."""
    behind = [0, 0] * (parts.ndim - axis - 2)
    pairs = F.pad(parts.narrow(axis + 1, 0, 2), [*behind, 0, 0, 0, 1])
    last = F.pad(parts.narrow(axis + 1, 2, 1), [*behind, 0, 1, 1, 0])
    return (pairs + last).flatten(axis, axis + 1)


def heads_of_32(width: int) -> int:
    """32 channels a head, at least one head."""
    heads = max(1, width // 32)
    if width % heads:
        raise ValueError(f"an attention of width {width} does not split into {heads} heads; choose a multiple of 32")
    return heads
