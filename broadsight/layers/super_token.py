"""Super-token attention: attend among pooled tokens, then hand the answer back to every pixel."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .relative_position import RelativePositionBias


@register_notrace_module
class SuperTokenAttention(nn.Module):
    """Pool, associate, attend, scatter back (Huang et al., CVPR 2023). (B, C, H, W) -> (B, C, H, W).

    Every cell of pixels seeds one super token. Each pixel belongs, by a soft-max over the 3 x 3 super tokens around its
    cell, to nine of them; the super tokens become the weighted means of their pixels, attend to each other, and every
    pixel receives the mixture of its nine. Super tokens beyond the border are zero and keep their share of the soft-max.
    Any H and W: the grid is zero-padded at the bottom and the right and cropped back. Memory format in = out.

    Args:
        dim: Channels in and out.
        cell: Side, or (height, width), in pixels of the cell that seeds one super token; 1 is plain attention.
        heads: Heads of the attention among super tokens.
        iterations: How often the association is refined.
        qkv_bias: Bias of the query, key and value projections.
        relative_grid: (height, width) of the super-token grid for which a relative position bias is learned; resized
            for other grids. None: no bias.
    """

    def __init__(
        self,
        dim: int,
        cell: int | tuple[int, int],
        heads: int,
        iterations: int = 1,
        qkv_bias: bool = True,
        relative_grid: tuple[int, int] | None = None,
    ):
        super().__init__()
        cell = (cell, cell) if isinstance(cell, int) else tuple(cell)
        if heads < 1 or dim % heads:
            raise ValueError(f"dim={dim} does not split into heads={heads}; choose a divisor of dim")
        if len(cell) != 2 or min(cell) < 1:
            raise ValueError(f"cell={cell} is not a side or (height, width) of at least 1 pixel")
        if iterations < 1:
            raise ValueError(f"iterations={iterations} leaves no association; choose 1 or more")
        self.cell: tuple[int, int] = cell
        self.heads, self.iterations = heads, iterations
        self.scale = dim**-0.5  # the association is not split into heads: all channels count
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.position = None if relative_grid is None else RelativePositionBias(heads, relative_grid)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns residual + attention(x); the sum is fused with the way back from the cells."""
        n = x.permute(0, 2, 3, 1)
        r = None if residual is None else residual.permute(0, 2, 3, 1)
        if self.cell == (1, 1):
            y = self.attend(n)
            y = y if r is None else r + y
        else:
            y = self.attend_super_tokens(n, r)
        y = y.permute(0, 3, 1, 2)
        if x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last):
            return y.contiguous()
        return y

    @torch.jit.ignore
    def extra_macs(self, convention, inputs, output) -> int:
        """What the authors' formulation spends beyond ours: unfold and fold as convolutions, and the first pooling."""
        B, C, H, W = output.shape
        (h, w), p, q = self.cell, -(-H // self.cell[0]), -(-W // self.cell[1])
        if self.cell == (1, 1):
            return 0
        unfolds = (self.iterations + 1) * 81 * C
        folds = self.iterations * 81 + self.iterations * 81 * C
        return B * (p * q * (unfolds + folds) + convention.pool * C * p * h * q * w)

    def attend_super_tokens(self, n: Tensor, residual: Tensor | None) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C), through the super tokens."""
        B, H, W, C = n.shape
        h, w = self.cell
        p, q = (H + h - 1) // h, (W + w - 1) // w
        if not torch.jit.is_scripting():
            n = _autocast(n)
        # Under export the sizes are symbols: padding by a symbolic zero avoids a branch that would pin them.
        if _exporting() or p * h != H or q * w != W:
            n = F.pad(n, [0, 0, 0, q * w - W, 0, p * h - H])
        pixels = n.reshape(B, p, h, q, w, C).transpose(2, 3).reshape(B * p * q, h * w, C)  # the one copy
        with torch.no_grad():  # the association is a clustering step, not a learned map
            share, mass = self.associate(pixels.detach(), B, p, q)
        tokens = aggregate(pixels, share, B, p, q) / mass  # B p q C
        tokens = self.attend(tokens.to(n.dtype))
        y = distribute(tokens, share).view(B, p, q, h, w, C).transpose(2, 3)  # B p h q w C
        if residual is not None and not _exporting() and p * h == H and q * w == W:
            return (residual.reshape(B, p, h, q, w, C) + y).view(B, H, W, C)
        y = y.reshape(B, p * h, q * w, C)[:, :H, :W]
        return y.contiguous() if residual is None else residual + y

    def associate(self, pixels: Tensor, B: int, p: int, q: int) -> tuple[Tensor, Tensor]:
        """pixels (B*p*q, P, C) -> share (B*p*q, 9, P) of each pixel in its nine super tokens, mass (B, p, q, 1) of each.

        The nine come first: the soft-max then runs over contiguous pixels.
        """
        tokens = pixels.mean(1).view(B, p, q, -1)
        share = pixels
        mass = tokens
        for i in range(self.iterations):
            if i > 0:
                tokens = (fold(torch.bmm(share, pixels), B, p, q) / mass).to(pixels.dtype)
            logits = torch.bmm(neighbours(tokens * self.scale), pixels.transpose(1, 2))  # B*p*q 9 P
            # Half precision would lose the small shares, and the guard below would vanish in float16.
            wide = logits if logits.dtype == torch.float64 else logits.float()
            weights = wide.softmax(1)
            mass = fold(weights.sum(2, keepdim=True), B, p, q) + 1e-12
            share = weights.to(pixels.dtype)
        return share, mass

    def attend(self, x: Tensor) -> Tensor:
        """Multi-head self-attention among all cells of a map. (B, p, q, C) -> (B, p, q, C)."""
        B, p, q, C = x.shape
        # Rows of the projection are ordered per head as [q | k | v], as in the release.
        qkv = self.qkv(x).reshape(B, p * q, self.heads, 3, C // self.heads).permute(3, 0, 2, 1, 4)
        bias = None if self.position is None else self.position(p, q)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=bias)  # B heads N d
        return self.proj(y.transpose(1, 2).reshape(B, p, q, C))


def neighbours(tokens: Tensor) -> Tensor:
    """The 3 x 3 tokens around each, zero beyond the border. (B, p, q, C) -> (B*p*q, 9, C), row-major."""
    B, p, q, C = tokens.shape
    around = F.pad(tokens, [0, 0, 1, 1, 1, 1]).unfold(1, 3, 1).unfold(2, 3, 1)  # B p q C 3 3
    return around.permute(0, 1, 2, 4, 5, 3).reshape(B * p * q, 9, C)


def fold(parts: Tensor, B: int, p: int, q: int) -> Tensor:
    """The adjoint of `neighbours`: adds what was meant for each token. (B*p*q, 9, C) -> (B, p, q, C).

    Separable: three shifted sums of rows, then three of columns.
    """
    parts = parts.view(B, p, q, 3, 3, parts.shape[-1])
    rows = parts[:, :, :, 1] + F.pad(parts[:, :-1, :, 2], [0, 0, 0, 0, 0, 0, 1, 0])
    rows = rows + F.pad(parts[:, 1:, :, 0], [0, 0, 0, 0, 0, 0, 0, 1])  # B p q 3 C
    tokens = rows[:, :, :, 1] + F.pad(rows[:, :, :-1, 2], [0, 0, 1, 0])
    return tokens + F.pad(rows[:, :, 1:, 0], [0, 0, 0, 1])


def aggregate(pixels: Tensor, share: Tensor, B: int, p: int, q: int) -> Tensor:
    """Weighted sums of pixels into super tokens. (B*p*q, P, C) -> (B, p, q, C); no gradient reaches the shares."""
    if torch.jit.is_scripting():
        return fold(torch.bmm(share, pixels), B, p, q)
    else:
        return _Aggregate.apply(pixels, share, B, p, q)


def distribute(tokens: Tensor, share: Tensor) -> Tensor:
    """Mixtures of super tokens back to pixels. (B, p, q, C) -> (B*p*q, P, C); no gradient reaches the shares."""
    if torch.jit.is_scripting():
        return torch.bmm(share.transpose(1, 2), neighbours(tokens))
    else:
        return _Distribute.apply(tokens, share)


class _Aggregate(torch.autograd.Function):
    """Each is the other's backward, so only the shares are kept: nine numbers a pixel instead of its channels."""

    generate_vmap_rule = True

    @staticmethod
    def forward(pixels, share, B, p, q):
        return fold(torch.bmm(share, pixels), B, p, q)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        return _Distribute.apply(grad, *ctx.saved_tensors), None, None, None, None


class _Distribute(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tokens, share):
        return torch.bmm(share.transpose(1, 2), neighbours(tokens))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])
        ctx.grid = inputs[0].shape[:3]

    @staticmethod
    def backward(ctx, grad):
        return _Aggregate.apply(grad, *ctx.saved_tensors, *ctx.grid), None


@torch.jit.unused
def _autocast(x: Tensor) -> Tensor:
    """The dtype in which autocast would run matrix products, once, so that forward and backward agree on it."""
    device = x.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if autocasts else x


def _exporting() -> bool:
    if torch.jit.is_scripting():
        return False
    else:
        return torch.compiler.is_exporting()
