"""Coarse cells back to the pixels on the CPU: products of whole rows of pixels, each the other's gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..any_size import pad_to


def is_on_cpu(layer: Any, x: Tensor, H: int, W: int) -> bool:
    return x.device.type == "cpu"


def propagate(_: Any, layer: Any, x: Tensor, H: int, W: int) -> Tensor:
    """A Propagate of (B, h, w, C) to (B, H, W, C)."""
    return _Propagate.apply(x, layer.tile().to(x.dtype), H, W)


class _Propagate(torch.autograd.Function):
    """(B, h, w, C), the weights of a cell's pixels (p, 1, p, C) -> (B, H, W, C)."""

    @staticmethod
    def forward(ctx, x, tile, H, W):
        ctx.save_for_backward(x, tile)
        (B, h, w, C), p = x.shape, len(tile)
        rows = tile.expand(p, w, p, C).reshape(p, -1)
        return (_repeated(x, p) * rows).view(B, h * p, w * p, C)[:, :H, :W]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, tile = ctx.saved_tensors
        (B, h, w, C), p, grad_tile = x.shape, len(tile), None
        grad = pad_to(grad, h * p, w * p).contiguous()
        grad_x = F.conv2d(grad.permute(0, 3, 1, 2), tile.permute(3, 1, 0, 2), stride=p, groups=C)
        if ctx.needs_input_grad[1]:
            products = grad.view(B, h, p, -1) * _repeated(x, p)
            grad_tile = products.sum((0, 1)).view(p, w, p, C).sum(1, keepdim=True)
        return grad_x.permute(0, 2, 3, 1), grad_tile, None, None


def _repeated(x: Tensor, p: int) -> Tensor:
    """Rows in which each cell is repeated for all of its pixels. (B, h, w, C) -> (B, h, 1, w*p*C)."""
    return x[:, :, :, None].expand(-1, -1, -1, p, -1).flatten(2)[:, :, None]
