"""Depth-wise convolutions whose backward pass oneDNN has for other shapes only; on the CPU, in training."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sampling import autocast
from .dispatch import untouched

FAST_WIDTH = 3  # of the kernels whose gradient is quick


def learns_wide_kernel(conv: Any, x: Tensor) -> bool:
    learns = torch.is_grad_enabled() and conv.weight.requires_grad
    return learns and conv.kernel_size[1] > FAST_WIDTH and x.device.type == "cpu"


def wide_convolution(_: Any, conv: Any, x: Tensor) -> Tensor:
    """A DepthwiseConv of (B, H, W, C), with the gradient of its kernel a few columns at a time."""
    given = (None if t is None else autocast(t) for t in (x.permute(0, 3, 1, 2), conv.kernel(), conv.bias))
    return _WideConvolution.apply(*given).permute(0, 2, 3, 1)


class _WideConvolution(torch.autograd.Function):
    """(B, C, H, W), an odd kernel (C, 1, k, k), bias (C) or None -> (B, C, H, W)."""

    @staticmethod
    def forward(ctx, x, kernel, bias):
        ctx.save_for_backward(x, kernel)
        return F.conv2d(x, kernel, bias, padding=kernel.shape[-1] // 2, groups=len(kernel))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, kernel = ctx.saved_tensors
        half, (of_x, of_kernel, of_bias) = kernel.shape[-1] // 2, ctx.needs_input_grad
        grad_x = _gradients(grad, x, kernel, [half, half], [True, False, False])[0] if of_x else None
        padded, parts = F.pad(x, [half, half, 0, 0]), []
        for i in range(0, kernel.shape[-1] if of_kernel else 0, FAST_WIDTH):
            columns = kernel[..., i : i + FAST_WIDTH]
            seen = padded[..., i : i + x.shape[-1] + columns.shape[-1] - 1]
            parts.append(_gradients(grad, seen, columns, [half, 0], [False, True, False])[1])
        return grad_x, torch.cat(parts, -1) if parts else None, grad.sum((0, 2, 3)) if of_bias else None


def _gradients(grad: Tensor, x: Tensor, kernel: Tensor, padding: list[int], mask: list[bool]) -> tuple[Tensor, ...]:
    plain: list[Any] = [None, [1, 1], padding, [1, 1], False, [0, 0], len(kernel), mask]
    return torch.ops.aten.convolution_backward(grad, x, kernel, *plain)


def learns_strides_in_bfloat16(x: Tensor, weight: Tensor, stride: int, padding: Any) -> bool:
    return stride > 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu" and torch.is_grad_enabled()


def every_place(plain: Any, x: Tensor, weight: Tensor, stride: int, padding: Any) -> Tensor:
    """Convolve at every place and take those of the stride: a fourfold of little work, and a quick backward pass."""
    return plain(x, weight, 1, padding)[:, :, ::stride, ::stride]


def learns_offsets_in_bfloat16(embed: Any, x: Tensor) -> bool:
    dw = embed.offset_dw
    return untouched(dw, nn.Conv2d) and learns_strides_in_bfloat16(autocast(x[:0]), dw.weight, 2, dw.padding)


def offsets_of_every_place(_: Any, embed: Any, x: Tensor) -> Tensor:
    """The offsets of a BilinearPatchEmbed as `every_place` has them. (B, C, H, W) -> (B, H/2, W/2, 2)."""
    dw = embed.offset_dw
    y = F.conv2d(x, dw.weight, dw.bias, padding=dw.padding, groups=dw.groups)[:, :, ::2, ::2]
    return embed.offset_proj(y.permute(0, 2, 3, 1))
