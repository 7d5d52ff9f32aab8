"""MAT's attentions on the CPU as batched products of windows that are packed by head.

torch's fused attention is made for long sequences: on windows of 49 pixels its bfloat16 backward pass takes ten times
as long. Partial windows at the right and the bottom are regions of their own: nothing is padded, nothing masked.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..any_size import join_cells
from ..sampling import autocast
from .slices import image_slices

SLICE_BYTES = 1 << 20  # of attention weights, in float32, that are worked on at a time
SMALL = 1 << 14  # projections, from which on it pays in bfloat16; in float32 eight times as many


def suits_windows(_: Any, qkv: Tensor, mask: Tensor | None, B: int) -> bool:
    return mask is None and suits_map(_, qkv)


def suits_map(_: Any, qkv: Tensor) -> bool:
    return qkv.device.type == "cpu" and qkv.numel() >= SMALL * (1 if qkv.dtype == torch.bfloat16 else 8)


def attend_windows(_: Any, layer: Any, qkv: Tensor, mask: None, B: int) -> Tensor:
    """AbstractTokenAttention.attend: projected windows (B*Nw, P, 3C) -> attended windows (B*Nw, P, C)."""
    y = _attend(layer, [autocast(qkv).view(B, 1, -1, 1, *qkv.shape[1:])])[0]
    return y.view(-1, *y.shape[4:])


def attend_map(_: Any, layer: Any, qkv: Tensor) -> Tensor:
    """AbstractTokenAttention.attend_map: projected pixels (B, H, W, 3C) -> attended pixels (B, H, W, C)."""
    h, w = layer.sides(*qkv.shape[1:3])
    bands = [_regions(band, 2, w) for band in _regions(autocast(qkv), 1, h)]
    found = iter(_attend(layer, [_cells(x, *layer.sides(*x.shape[1:3])) for band in bands for x in band]))
    return torch.cat([torch.cat([join_cells(next(found)) for _ in band], 2) for band in bands], 1)


def _regions(x: Tensor, axis: int, side: int) -> list[Tensor]:
    """What the whole windows along an axis cover, and the partial ones after them if there are any."""
    whole = x.shape[axis] // side * side
    return [x] if whole == x.shape[axis] else list(x.split([whole, x.shape[axis] - whole], axis))


def _cells(x: Tensor, h: int, w: int) -> Tensor:
    """`split_cells` without unfolding, whose backward pass is slow."""
    return x.unflatten(2, (-1, w)).unflatten(1, (-1, h)).transpose(2, 3)


def _attend(layer: Any, regions: list[Tensor]) -> list[Tensor]:
    """Maps of whole windows (B, p, q, h, w, 3C), together one map -> the same with C channels."""
    token = layer.token_rows().to(regions[0].dtype) if layer.mixing else None
    local = [_Local.apply(x, token, layer.heads, layer.token_is_key) for x in regions]
    kv = autocast(layer.mix(torch.cat([summary for _, _, summary in local], 1))) if layer.mixing else None
    return [_Fuse.apply(y, q, kv, x.shape[1:5]) for x, (y, q, _) in zip(regions, local, strict=True)]


def _by_head(x: Tensor, parts: int, heads: int) -> Tensor:
    """(B, p, q, h, w, parts*C) -> (parts, B, heads, p, q, h, w, d), a view."""
    return x.unflatten(5, (parts, heads, -1)).permute(5, 0, 6, 1, 2, 3, 4, 7)


def _slices(keys: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Some images of (B, ..., rows, d) at a time, each as (n, rows, d); keys: how many each row attends to."""
    B, d = len(tensors[0]), tensors[0].shape[-1]
    for part in image_slices(B, tensors[0].numel() // (B * d) * keys * 4, SLICE_BYTES):
        yield [x[part].flatten(0, -3) for x in tensors]


def _pixels(rows: Tensor, like: Tensor) -> Tensor:
    """The pixels of packed windows (..., p*q, h*w or one row more, d), in the shape of `like`, a view."""
    *_, p, q, h, w, _ = like.shape
    return rows[..., : h * w, :].unflatten(-2, (h, w)).unflatten(-4, (p, q))


def _softmax(logits: Tensor, axis: int) -> Tensor:
    # Half precision is slower at it.
    return logits.softmax(axis, torch.promote_types(logits.dtype, torch.float32)).to(logits.dtype)


def _softmax_backward(grad: Tensor, weights: Tensor, axis: int) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, weights, axis, grad.dtype)


class _Local(torch.autograd.Function):
    """Attention of pixels and abstract tokens in the windows of a region, which consists of whole ones.

    (B, p, q, h, w, 3C), tokens (3, heads, 1, d) or None -> results and scaled queries, each (B, heads, p*q, h*w [+ 1],
    d), of which the last row is the token's, and summaries (B, p*q, C). Backward computes the weights again.
    """

    @staticmethod
    def forward(ctx, region, token, heads, token_is_key):
        source = _by_head(region, 3, heads)
        _, B, _, p, q, h, w, d = source.shape
        P = h * w
        more = token is not None
        queries = region.new_empty(B, heads, p * q, P + more, d)
        kv = region.new_empty(2, B, heads, p * q, P + (more and token_is_key), d)
        torch.mul(source[0], d**-0.5, out=_pixels(queries, source))
        _pixels(kv, source).copy_(source[1:])
        if more:
            queries[..., P, :] = token[0] * d**-0.5
            kv[..., P:, :] = token[1:, None, :, None]
        out = torch.empty_like(queries)
        for q_, k, v, y in _slices(kv.shape[-2], queries, *kv, out):
            torch.bmm(_softmax(torch.bmm(q_, k.mT), -1), v, out=y)
        ctx.save_for_backward(queries, kv)
        ctx.grid, ctx.token_is_key = (p, q, h, w), token_is_key
        ctx.set_materialize_grads(False)
        return out, queries, out[..., P, :].transpose(1, 2).flatten(2) if more else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_queries, grad_summary):
        queries, kv = ctx.saved_tensors
        (B, heads, _, rows, d), P = queries.shape, ctx.grid[2] * ctx.grid[3]
        if grad_summary is not None:  # the row is free: `_Fuse` gave this gradient to nobody else
            grad_out[..., P, :] = grad_summary.unflatten(2, (heads, d)).transpose(1, 2)
        grad_q, grad_kv = torch.empty_like(queries), torch.empty_like(kv)
        for q, k, v, g, gq, gk, gv in _slices(kv.shape[-2], queries, *kv, grad_out, grad_q, *grad_kv):
            weights = _softmax(torch.bmm(q, k.mT), -1)
            torch.bmm(weights.mT, g, out=gv)
            of_logits = _softmax_backward(torch.bmm(g, v.mT), weights, -1)
            torch.bmm(of_logits, k, out=gq)
            torch.bmm(of_logits.mT, q, out=gk)
        if grad_queries is not None:
            grad_q += grad_queries
        grad = queries.new_empty(B, *ctx.grid, 3 * heads * d)
        target = _by_head(grad, 3, heads)
        torch.mul(_pixels(grad_q, target), d**-0.5, out=target[0])
        target[1:].copy_(_pixels(grad_kv, target))
        grad_token = None
        if rows > P:
            grad_token = grad.new_zeros(3, heads, 1, d)
            grad_token[0] = grad_q[..., P, :].sum((0, 2)).unsqueeze(1) * d**-0.5
            if ctx.token_is_key:
                grad_token[1:] = grad_kv[..., P, :].sum((1, 3)).unsqueeze(2)
        return grad, grad_token, None, None


class _Fuse(torch.autograd.Function):
    """Packed results of a region -> (B, p, q, h, w, C), to which every pixel adds its attention to the summaries.

    queries: As `_Local` gives them; kv (B, Nw, 2C): keys and values of all windows' summaries, or None.
    """

    @staticmethod
    def forward(ctx, out, queries, kv, grid):
        B, heads, _, _, d = out.shape
        if kv is not None:
            kv = kv.unflatten(2, (2, heads, d)).permute(2, 0, 3, 1, 4).contiguous()  # 2 B heads Nw d
        local = out
        if kv is not None and kv.shape[3] == 1:  # nothing to choose from
            out = local + kv[1, :, :, None]
        elif kv is not None:
            out = torch.empty_like(local)
            for q, k, v, x, y in _slices(kv.shape[3], *_by_image(queries), *kv, *_by_image(local, out)):
                torch.baddbmm(x, _softmax(torch.bmm(k, q.mT), 1).mT, v, out=y)
        ctx.save_for_backward(*([] if kv is None else [queries, kv]))
        ctx.heads, ctx.rows = heads, out.shape[3]
        y = out.new_empty(B, *grid, heads * d)
        target = _by_head(y, 1, heads)[0]
        target.copy_(_pixels(out, target))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        source = _by_head(grad, 1, ctx.heads)[0]
        B, heads, p, q, h, w, d = source.shape
        grad_out = grad.new_empty(B, heads, p * q, ctx.rows, d)
        grad_out[..., h * w :, :] = 0  # the abstract tokens do not attend to the summaries
        _pixels(grad_out, source).copy_(source)
        saved = ctx.saved_tensors  # once: gradient checkpointing gives them away
        if not saved:
            return grad_out, None, None, None
        queries, kv = saved
        grad_q, grad_kv = None, torch.empty_like(kv)
        if kv.shape[3] == 1:
            grad_kv[0], grad_kv[1] = 0, grad_out.sum((2, 3)).unsqueeze(2)
        else:
            grad_q = torch.empty_like(queries)
            packed = *_by_image(queries, grad_out, grad_q), *kv, *grad_kv
            for q, g, gq, k, v, gk, gv in _slices(kv.shape[3], *packed):
                weights = _softmax(torch.bmm(k, q.mT), 1)  # n Nw rows
                torch.bmm(weights, g, out=gv)
                of_logits = _softmax_backward(torch.bmm(v, g.mT), weights, 1)
                torch.bmm(of_logits, q, out=gk)
                torch.bmm(of_logits.mT, k, out=gq)
        return grad_out, grad_q, grad_kv.permute(1, 3, 0, 2, 4).flatten(2), None


def _by_image(*packed: Tensor) -> list[Tensor]:
    """(B, heads, windows, rows, d) -> (B, heads, windows*rows, d)."""
    return [x.flatten(2, 3) for x in packed]
