"""Products of many rows with weights, whose gradients come out in the memory layout of what they belong to.

Autograd's are transposed and then copied into place, which for the largest weights costs more than the product.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def group_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """scale * (x @ weight' + bias) for each group. (G, N, in), (G, out, in), bias (G, 1, out) -> (G, N, out)."""
    if torch.is_grad_enabled() and weight.requires_grad:
        product = GroupProduct.apply(x, weight)
        return product if bias is None else (product + bias) * scale
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias, x, weight.mT, beta=scale, alpha=scale)


def map_product(x: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
    """One weight for all positions, added onto another result. (B, in, n), (out, in), (.., out) -> (B, n, out)."""
    if torch.is_grad_enabled() and weight.requires_grad:
        product = MapProduct.apply(x, weight)
        return product if onto is None else product + onto
    weight = weight.mT.expand(x.shape[0], -1, -1)
    return torch.bmm(x.mT, weight) if onto is None else torch.baddbmm(onto, x.mT, weight)


def gram_triangle(r: Tensor, order: Tensor, mirror: Tensor, groups: int) -> Tensor:
    """Entries of r'r at the positions `order`, of which `mirror` is the inverse. (G*B, n, P) -> (B, G, U)."""
    learns = torch.is_grad_enabled() and r.requires_grad
    return (GramTriangle.apply if learns else GramTriangle.forward)(r, order, mirror, groups)


def shrink_bilinearly(x: Tensor, size: Sequence[int]) -> Tensor:
    """Bilinear samples without antialiasing. (B, C, H, W) -> (B, C, h, w)."""
    (H, W), (h, w) = x.shape[-2:], size
    ratio = H // h
    if ratio % 2 == 0 and (h * ratio, w * ratio) == (H, W) and x.is_contiguous():
        return MiddleSample.apply(x, ratio)
    return F.interpolate(x, (h, w), mode="bilinear", align_corners=False)


class Product(torch.autograd.Function):
    """Keeps both factors for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class GroupProduct(Product):
    """(G, N, in), (G, out, in) -> (G, N, out)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        of_x = torch.bmm(gradient, weight.to(gradient.dtype)) if ctx.needs_input_grad[0] else None
        of_weight = torch.bmm(gradient.mT, x.to(gradient.dtype)) if ctx.needs_input_grad[1] else None
        return of_x, None if of_weight is None else of_weight.to(weight.dtype)


class MapProduct(Product):
    """(B, in, n), (out, in) -> (B, n, out)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.mT, weight.mT.expand(x.shape[0], -1, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        weights = weight.to(gradient.dtype).expand(x.shape[0], -1, -1)  # B out in
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = torch.bmm(weights.mT, gradient.mT) if x.is_contiguous() else torch.bmm(gradient, weights).mT
        if ctx.needs_input_grad[1]:
            rows = x.mT.to(gradient.dtype)
            # addbmm spares the copy of x, but rounds its sum after each image, and is a kernel for each on a GPU.
            if gradient.device.type == "cpu" and gradient.dtype in (torch.float32, torch.float64):
                of_weight = torch.addbmm(gradient.new_zeros(weight.shape), gradient.mT, rows, beta=0)
            else:
                of_weight = torch.mm(gradient.flatten(0, 1).mT, rows.flatten(0, 1))
            of_weight = of_weight.to(weight.dtype)
        return of_x, of_weight


class MiddleSample(torch.autograd.Function):
    """Bilinear samples without antialiasing: the mean of each cell's middle four. (B, C, r*h, r*w) -> (B, C, h, w)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, ratio: int) -> Tensor:
        middle = ratio // 2 - 1
        rows = x.unflatten(2, (-1, ratio))
        rows = torch.lerp(rows[:, :, :, middle], rows[:, :, :, middle + 1], 0.5)  # B C h r*w
        return torch.lerp(rows[..., middle::ratio], rows[..., middle + 1 :: ratio], 0.5)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.ratio = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (gradient,), ratio = gradients, ctx.ratio
        (B, C, h, w), middle = gradient.shape, ratio // 2 - 1
        if ratio == 2:
            of_x = (gradient * 0.25).view(B, C, h, 1, w, 1).expand(-1, -1, -1, 2, -1, 2)
        else:
            of_x = gradient.new_zeros(B, C, h, ratio, w, ratio)
            of_x[:, :, :, middle : middle + 2, :, middle : middle + 2] = (gradient * 0.25)[:, :, :, None, :, None]
        return of_x.reshape(B, C, h * ratio, w * ratio), None


class GramTriangle(torch.autograd.Function):
    """gram_triangle, with one product backwards where automatic differentiation of r'r takes two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(r: Tensor, order: Tensor, mirror: Tensor, groups: int) -> Tensor:
        gram = torch.bmm(r.mT, r).view(groups, -1, r.shape[-1] ** 2).transpose(0, 1)  # B G P*P
        return gram.gather(-1, order.expand(*gram.shape[:2], -1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        r, _, ctx.mirror, ctx.groups = inputs  # a constant of the module need not be saved
        ctx.save_for_backward(r)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        (r,) = ctx.saved_tensors
        P, gradient = r.shape[-1], gradients[0].transpose(0, 1)  # G B U
        full = gradient.gather(-1, ctx.mirror.expand(*gradient.shape[:2], -1)).reshape(-1, P, P)
        # Both halves of the matrix have it now, as a symmetric product wants; the diagonal counts twice.
        full = full + torch.diag_embed(full.diagonal(dim1=-2, dim2=-1))
        return torch.bmm(r, full), None, None, None
