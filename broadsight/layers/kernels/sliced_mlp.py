"""The channel MLP a few images at a time on the CPU, so that the wide hidden map never leaves the cache.

Training keeps only the output of fc1: computing what follows again in backward is cheaper than storing it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patches import DepthwiseConv
from .dispatch import untouched
from .slices import image_slices

# The hidden map of one slice should stay in the processor's cache: 4 MB holds one image of the widest early stage.
SLICE_BYTES = 4 << 20
WIDE = 1 << 18  # weights in single precision
ONEDNN = torch.backends.mkldnn.is_available()


def runs_in_slices(mlp: Any, x: Tensor, residual: Tensor | None = None) -> bool:
    plain = untouched(mlp.fc1, nn.Linear) and untouched(mlp.fc2, nn.Linear) and untouched(mlp.act, nn.GELU)
    dw = mlp.depthwise == "none" or untouched(mlp.dw, DepthwiseConv)
    on_cpu = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return on_cpu and plain and dw and mlp.act.approximate == "none"


def sliced_mlp(_: Any, mlp: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """residual + fc2(dw(GELU(fc1(x)))) from the weights of a ChannelMlp."""
    kernel, dw_bias = (None, None) if mlp.depthwise == "none" else (mlp.dw.kernel(), mlp.dw.bias)
    tensors = x, residual, mlp.fc1.weight, mlp.fc1.bias, kernel, dw_bias, mlp.fc2.weight, mlp.fc2.bias
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _SlicedMlp.apply(*tensors, mlp.depthwise, keep)


class _SlicedMlp(torch.autograd.Function):
    """residual + fc2(dw(GELU(fc1(x)))) a few images at a time; backward recomputes all that follows fc1."""

    @staticmethod
    def forward(ctx, x, residual, w1, b1, kernel, dw_bias, w2, b2, depthwise, keep):
        B, H, W, C = x.shape
        x = x.contiguous()
        hidden = x.new_empty(B, H * W, len(w1)) if keep else None
        out = x.new_empty(B, H, W, len(w2))
        for part in image_slices(B, H * W * len(w1) * x.element_size(), SLICE_BYTES):
            h = _linear(x[part].view(-1, C), w1, b1, None if hidden is None else hidden[part].view(-1, len(w1)))
            u = _activate(h, kernel, dw_bias, depthwise, H, W, in_place=not keep)[-1]
            y, start = out[part].view(-1, len(w2)), None if residual is None else residual[part].reshape(-1, len(w2))
            # bfloat16 is slow to add biases in, and oneDNN's products are not added to anything.
            if start is None or b2 is None or x.dtype == torch.bfloat16 or _is_wide(w2):
                _linear(u, w2, b2, y)
                if start is not None:
                    y += start
            else:
                torch.add(start, b2, out=y).addmm_(u, w2.t())
        if keep:
            ctx.save_for_backward(x, hidden, w1, kernel, dw_bias, w2)
            ctx.depthwise, ctx.biases = depthwise, (b1 is not None, b2 is not None)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, hidden, w1, kernel, dw_bias, w2 = ctx.saved_tensors
        B, H, W, C = x.shape
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        grad_w1, grad_w2 = torch.zeros_like(w1), torch.zeros_like(w2)
        grad_b1 = w1.new_zeros(len(w1)) if ctx.biases[0] else None
        grad_b2 = grad.sum((0, 1, 2)) if ctx.biases[1] else None
        grad_kernel = None if kernel is None else torch.zeros_like(kernel)
        grad_dw_bias = None if dw_bias is None else torch.zeros_like(dw_bias)
        for part in image_slices(B, H * W * len(w1) * x.element_size(), SLICE_BYTES):
            g, h = grad[part].view(-1, len(w2)), hidden[part].view(-1, len(w1))
            steps = _activate(h, kernel, dw_bias, ctx.depthwise, H, W)
            _add_product(grad_w2, g, steps[-1])
            g = _linear(g, w2.t(), None, None)
            if ctx.depthwise == "before":  # h -> dw -> GELU
                g = torch.ops.aten.gelu_backward(g, steps[0])
                g = _convolution_backward(g, h, kernel, H, W, grad_kernel, grad_dw_bias)
            else:  # h -> GELU (-> dw)
                if ctx.depthwise == "after":
                    g = _convolution_backward(g, steps[0], kernel, H, W, grad_kernel, grad_dw_bias)
                g = torch.ops.aten.gelu_backward(g, h)
            _add_product(grad_w1, g, x[part].view(-1, C))
            if grad_b1 is not None:
                grad_b1 += g.sum(0)
            _linear(g, w1.t(), None, grad_x[part].view(-1, C))
        grad_residual = grad if ctx.needs_input_grad[1] else None
        return grad_x, grad_residual, grad_w1, grad_b1, grad_kernel, grad_dw_bias, grad_w2, grad_b2, None, None


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if _is_wide(weight):
        y = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return y if out is None else out.copy_(y)
    return torch.mm(rows, weight.t(), out=out) if bias is None else torch.addmm(bias, rows, weight.t(), out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left' @ right."""
    if _is_wide(total):
        total += torch.ops.mkldnn._linear_pointwise(left.t(), right.t(), None, "none", [], "")
    else:
        total.addmm_(left.t(), right)


def _is_wide(weight: Tensor) -> bool:
    """Whether oneDNN's product is worth its preparations: MKL's takes twice as long on processors not of its maker."""
    counted = torch._C._len_torch_dispatch_stack()  # who counts products knows those of torch alone
    return ONEDNN and weight.dtype == torch.float32 and weight.numel() > WIDE and not counted


def _activate(
    h: Tensor, kernel: Tensor | None, bias: Tensor | None, depthwise: str, H: int, W: int, in_place: bool = False
) -> list[Tensor]:
    """The maps between fc1 and fc2, each (n*H*W, hidden): the input of a second step, if there is one, and the end."""
    gelu = torch.ops.aten.gelu_ if in_place else F.gelu
    if depthwise == "before":
        d = _convolution(h, kernel, bias, H, W)
        return [d, gelu(d)]
    u = gelu(h)
    return [u] if depthwise == "none" else [u, _convolution(u, kernel, bias, H, W)]


def _as_map(rows: Tensor, H: int, W: int) -> Tensor:
    return rows.view(-1, H, W, rows.shape[1]).permute(0, 3, 1, 2)  # n C H W, channels-last in memory


def _as_rows(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])  # n*H*W C


def _convolution(rows: Tensor, kernel: Any, bias: Tensor | None, H: int, W: int) -> Tensor:
    return _as_rows(F.conv2d(_as_map(rows, H, W), kernel, bias, padding=kernel.shape[-1] // 2, groups=len(kernel)))


def _convolution_backward(
    grad: Tensor, rows: Tensor, kernel: Any, H: int, W: int, grad_kernel: Any, grad_bias: Tensor | None
) -> Tensor:
    """Gradient of the rows; those of kernel and bias are added to the given tensors."""
    C, side = len(kernel), kernel.shape[-1]
    # oneDNN is slow with maps that are smaller than the kernel; zeros around them change nothing.
    edges = [0, max(0, side - W), 0, max(0, side - H)]
    maps = (F.pad(_as_map(x, H, W), edges) if any(edges) else _as_map(x, H, W) for x in (grad, rows))
    plain: list[Any] = [[C], [1, 1], [side // 2] * 2, [1, 1], False, [0, 0], C, [True, True, True]]
    g, gk, gb = torch.ops.aten.convolution_backward(*maps, kernel, *plain)
    grad_kernel += gk
    if grad_bias is not None:
        grad_bias += gb
    return _as_rows(g[..., :H, :W])
