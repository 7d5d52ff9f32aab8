"""Super-token sampling and its way back as two linear steps, each the other's backward, a few images at a time."""

from typing import Any

import torch
from torch import Tensor

from ..sampling import autocast, fold, grid_of, neighbours, sample, to_cells
from .slices import image_slices

SLICE_BYTES = 7 << 19  # of pixels that are worked on at a time on the CPU


def is_linear(attention: Any, x: Tensor, residual: Tensor | None = None) -> bool:
    """Whether nothing but two linear steps has to be differentiated."""
    return attention.cell != (1, 1) and (attention.reading == "fitted" or not torch.is_grad_enabled())


def linear_sampling(_: Any, attention: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """residual + attention(x) of a SuperTokenAttention; the sum is fused with the way back to the pixels."""
    x = autocast(x)
    if not x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous()  # the result takes over the strides, so they have to be those of a whole map
    tokens, share = _Sample.apply(x, attention.cell, attention.iterations, attention.scale)
    return _Spread.apply(attention.attend(tokens), share, residual, x.shape, x.stride(), attention.cell)


class _Sample(torch.autograd.Function):
    """Pixels to super tokens: associate and average. (B, C, H, W) -> tokens (B, p, q, C), shares (B*p*q, 9, P).

    With shares constant to the gradient, this step and `_Spread` are each other's backward, which keeps nothing else.
    """

    @staticmethod
    def forward(ctx, x, cell, iterations, scale):
        parts = [sample(to_cells(x[s], cell), grid_of(x[s], cell), iterations, scale) for s in _slices(x)]
        tokens, share, mass = (_join(list(kind)) for kind in zip(*parts, strict=True))
        ctx.save_for_backward(share, mass)
        ctx.cell, ctx.like = cell, (x.shape, x.stride(), x.dtype)
        ctx.mark_non_differentiable(share)
        return tokens, share

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        share, mass = ctx.saved_tensors
        return _spread((grad / mass).to(share.dtype), share, None, *ctx.like, ctx.cell), None, None, None


class _Spread(torch.autograd.Function):
    """Super tokens (B, p, q, C) back to the pixels of a map like x, added to the residual."""

    @staticmethod
    def forward(ctx, tokens, share, residual, shape, stride, cell):
        ctx.save_for_backward(share)
        ctx.cell, ctx.residual = cell, None if residual is None else residual.dtype
        return _spread(tokens, share, residual, shape, stride, ctx.residual or tokens.dtype, cell)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (share,) = ctx.saved_tensors
        start, parts = 0, []
        for part in _slices(grad):
            cells = to_cells(grad[part], ctx.cell).to(share.dtype)
            parts.append(fold(torch.bmm(share[start : start + len(cells)], cells), grid_of(grad[part], ctx.cell)))
            start += len(cells)
        return _join(parts), None, None if ctx.residual is None else grad.to(ctx.residual), None, None, None


def _spread(
    tokens: Tensor, share: Tensor, residual: Tensor | None, shape: Any, stride: Any, dtype: Any, cell: tuple[int, int]
) -> Tensor:
    """residual + the map, of the given shape and strides, in which every pixel holds the mixture of its nine tokens."""
    out = torch.empty_strided(shape, stride, dtype=dtype, device=tokens.device)
    (_, C, H, W), (h, w), (p, q) = shape, cell, tokens.shape[1:3]
    channels_first, whole = out.is_contiguous(), p * h == H and q * w == W
    for part in _slices(out):
        n = part.stop - part.start
        own = share[part.start * p * q : part.stop * p * q]
        around = neighbours(tokens[part])
        # The product comes out in the order of the map's memory, so that the copy into it moves whole runs of pixels.
        if channels_first:
            y = torch.bmm(around.transpose(1, 2), own).view(n, p, q, C, h, w).permute(0, 1, 4, 2, 5, 3)
        else:
            y = torch.bmm(own.transpose(1, 2), around).view(n, p, q, h, w, C).transpose(2, 3)  # n p h q w C
        if whole:
            target = out[part].permute(0, 2, 3, 1).unflatten(2, (q, w)).unflatten(1, (p, h))
            if residual is None:
                target.copy_(y)
            else:
                torch.add(residual[part].permute(0, 2, 3, 1).unflatten(2, (q, w)).unflatten(1, (p, h)), y, out=target)
        else:
            y = y.reshape(n, p * h, q * w, C)[:, :H, :W].permute(0, 3, 1, 2)
            out[part] = y if residual is None else residual[part] + y
    return out


def _slices(x: Tensor) -> list[slice]:
    """On the CPU a few images at a time, so that their pixels stay in the cache; elsewhere all at once."""
    size = x[0].numel() * x.element_size()
    return image_slices(len(x), size, SLICE_BYTES if x.device.type == "cpu" else len(x) * size)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
