"""Depth-wise convolutions of maps, and coarse cells: pooling to them, and the way back to the pixels."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .kernels.depthwise import every_place, learns_strides_in_bfloat16, learns_wide_kernel, wide_convolution
from .kernels.dispatch import accelerated
from .kernels.propagate import is_on_cpu, propagate


def average_pool(x: Tensor, patch: int) -> Tensor:
    """Means of the valid pixels of each patch. (B, H, W, C) -> (B, H/patch, W/patch, C), sizes rounded up."""
    # A map that is smaller than a patch: some runtimes refuse a kernel that is larger than what it sees.
    sides = [min(patch, x.shape[1]), min(patch, x.shape[2])]
    return F.avg_pool2d(x.permute(0, 3, 1, 2), sides, ceil_mode=True, count_include_pad=False).permute(0, 2, 3, 1)


def max_pool(x: Tensor, patch: int) -> Tensor:
    """The largest valid pixel of each patch. (B, H, W, C) -> (B, H/patch, W/patch, C), sizes rounded up."""
    sides = [min(patch, x.shape[1]), min(patch, x.shape[2])]
    return F.max_pool2d(x.permute(0, 3, 1, 2), sides, ceil_mode=True).permute(0, 2, 3, 1)


@register_notrace_module
class DepthwiseConv(nn.Conv2d):
    """One k x k filter per channel, k odd, same size out. (B, H, W, C) -> (B, H, W, C).

    With `residual` it is x + conv(x): the identity is added to the kernel's centre, which is exact and saves a pass.
    """

    def __init__(self, dim: int, kernel_size: int = 3, *, bias: bool = True, residual: bool = False):
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, bias=bias)
        self.residual = residual

    def kernel(self) -> Tensor:
        """The filter that is applied: (C, 1, k, k), with the identity where the layer is residual."""
        if not self.residual:
            return self.weight
        half = self.kernel_size[0] // 2
        one = torch.ones((1, 1, 1, 1), dtype=self.weight.dtype, device=self.weight.device)
        return self.weight + F.pad(one, [half, half, half, half])

    @accelerated(wide_convolution, learns_wide_kernel)
    def forward(self, input: Tensor) -> Tensor:
        x = F.conv2d(input.permute(0, 3, 1, 2), self.kernel(), self.bias, padding=self.padding, groups=self.groups)
        return x.permute(0, 2, 3, 1)

    def reparameterize(self) -> None:
        self.weight, self.residual = nn.Parameter(self.kernel().detach(), requires_grad=False), False


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
        if x.shape[2] == 1:
            # One column of pixels meets one column of the kernel. oneDNN, asked for all of them in bfloat16 with a
            # stride of 2, leaves whatever was in memory in the gradients of the others.
            weight, padding = weight[..., padding[1] : padding[1] + 1], (padding[0], 0)
        return depthwise(x.permute(0, 3, 1, 2), weight, self.stride, padding).permute(0, 2, 3, 1)


@accelerated(every_place, learns_strides_in_bfloat16)
def depthwise(x: Tensor, weight: Tensor, stride: int, padding: tuple[int, int]) -> Tensor:
    """(B, C, H, W), (C, 1, k, l) -> (B, C, H', W')."""
    return F.conv2d(x, weight, stride=stride, padding=padding, groups=weight.shape[0])


class Propagate(nn.Module):
    """A transposed depth-wise convolution whose stride is its kernel, cropped to H, W. (B, h, w, C) -> (B, H, W, C)."""

    def __init__(self, dim: int, patch: int):
        super().__init__()
        self.patch, self.tiled = patch, False
        self.weight = nn.Parameter(torch.ones(dim, 1, patch, patch))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    @accelerated(propagate, is_on_cpu)
    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        (B, h, w, C), tile = x.shape, self.tile().to(x.dtype)
        return self.crop((x.reshape(B, h, 1, w, 1, C) * tile).reshape(B, h * self.patch, w * self.patch, C), H, W)

    def crop(self, x: Tensor, H: int, W: int) -> Tensor:
        return x[:, :H, :W]

    def tile(self) -> Tensor:
        """The weights in the order of pixels. (patch, 1, patch, C)."""
        pixels = self.weight if self.tiled else self.weight[:, 0].permute(1, 2, 0)
        return pixels.reshape(self.patch, 1, self.patch, -1)

    def reparameterize(self) -> None:
        if not self.tiled:
            self.weight, self.tiled = nn.Parameter(self.tile().detach().contiguous(), requires_grad=False), True


class PooledBranch(nn.Module):
    """Max-pool, widen, coordinate convolution, and back to full size. (B, H, W, C) -> (B, H, W, C')."""

    def __init__(self, dim: int, width: int, patch: int):
        super().__init__()
        self.patch, self.expand = patch, nn.Linear(dim, width, bias=False)
        # The coordinate depth-wise convolution: along the rows, then along the columns.
        self.conv_h = ChannelConv(width, (1, 3))
        self.conv_v: nn.Module = ChannelConv(width, (3, 1))
        self.prop = Propagate(width, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.prop(self.conv_v(self.conv_h(self.expand(max_pool(x, self.patch)))), *x.shape[1:3])

    def reparameterize(self) -> None:
        """One 3x3 convolution for both, for inference. Without biases, zeros beyond the border stay zeros."""
        if isinstance(self.conv_v, ChannelConv):
            both = ChannelConv(self.expand.out_features, (3, 3))
            both.weight = nn.Parameter((self.conv_v.weight * self.conv_h.weight).detach(), requires_grad=False)
            self.conv_h, self.conv_v = both, nn.Identity()
