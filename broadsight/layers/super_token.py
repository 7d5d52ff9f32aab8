"""Super-token attention: attend among pooled tokens, then hand the answer back to every pixel."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .any_size import crop_to, join_cells, pad_to, split_cells
from .exported import attention, exporting, split_heads
from .kernels.dispatch import untouched
from .kernels.slices import image_slices, runs_eagerly
from .relative_position import RelativePositionBias
from .super_token_exported import sample_exported, spread_exported

SLICE_BYTES = 7 << 19  # of pixels that are worked on at a time on the CPU


@register_notrace_module
class SuperTokenAttention(nn.Module):
    """Pool, associate, attend, scatter back (Huang et al., CVPR 2023). (B, C, H, W) -> (B, C, H, W).

    Every cell of pixels seeds one super token. Each pixel belongs, by a soft-max over the 3 x 3 super tokens around its
    cell, to nine of them; the super tokens become the weighted means of their pixels, attend to each other, and every
    pixel receives the mixture of its nine. Super tokens beyond the border are zero and keep their share of the
    soft-max. Any H and W: the grid is zero-padded at the bottom and the right and cropped back. The memory format that
    comes in goes out.

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
        self.by_head = True  # rows of the projection are ordered per head as [q | k | v], as in the release
        self.scale = dim**-0.5  # of the association, which is not split into heads: all channels count
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.position = None if relative_grid is None else RelativePositionBias(heads, relative_grid)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns residual + attention(x); the sum is fused with the way back to the pixels."""
        if not torch.jit.is_scripting() and exporting():
            return self._exported(x, residual)
        if self.cell == (1, 1):
            y = _formatted_like(x, self.attend(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
            return y if residual is None else residual + y
        if torch.jit.is_scripting():
            return self.attend_traced(x, residual)
        else:
            x = _autocast(x)
            if not runs_eagerly():
                return self.attend_traced(x, residual)
            if not x.is_contiguous(memory_format=torch.channels_last):
                x = x.contiguous()  # the result takes over the strides, so they have to be those of a whole map
            tokens, share = _Sample.apply(x, self.cell, self.iterations, self.scale)
            return _Spread.apply(self.attend(tokens), share, residual, x.shape, x.stride(), self.cell)

    def attend_traced(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """What a compiler, an exporter or a functional transform sees: the same steps on the whole batch."""
        h, w = self.cell
        tokens, share, _ = sample(to_cells(x, self.cell), grid_of(x, self.cell), self.iterations, self.scale)
        tokens = self.attend(tokens)
        y = torch.bmm(share.transpose(1, 2), neighbours(tokens))  # B*p*q P C
        y = y.unflatten(1, (h, w)).unflatten(0, (x.shape[0], tokens.shape[1], tokens.shape[2]))  # B p q h w C
        y = _formatted_like(x, crop_to(join_cells(y), x.shape[2], x.shape[3]).permute(0, 3, 1, 2))
        return y if residual is None else residual + y

    @torch.jit.unused
    def _exported(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """What other runtimes run well: few nodes, and no shape that depends on the batch."""
        _, C, H, W = x.shape
        x = x.permute(0, 2, 3, 1)
        if self.cell == (1, 1):
            y = self._attend_exported(x.reshape(-1, H * W, C), H, W).transpose(2, 3).reshape(-1, C, H, W)
            if untouched(self.proj, nn.Linear):  # as a convolution, the layout of those around it
                y = F.conv2d(y, self.proj.weight[:, :, None, None], self.proj.bias)
            else:
                y = self.proj(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:
            tokens, share, around = sample_exported(x, self.cell, self.iterations, self.scale)
            _, p, q, _ = tokens.shape
            tokens = self._attend_exported(tokens.flatten(1, 2), p, q).transpose(1, 2).reshape(-1, p, q, C)
            y = spread_exported(self.proj(tokens), share, around, self.cell, H, W).permute(0, 3, 1, 2)
        return y if residual is None else residual + y

    def _attend_exported(self, x: Tensor, p: int, q: int) -> Tensor:
        """Attention among the tokens of a p x q grid, by head and not yet projected. (B, N, C) -> (B, heads, N, d)."""
        qkv = self.qkv(x)
        if self.by_head:
            C = x.shape[2]
            qkv = qkv.view(-1, p * q, self.heads, 3, C // self.heads).transpose(2, 3).reshape(-1, p * q, 3 * C)
        queries, keys, values = split_heads(qkv, 3, self.heads)
        return attention(queries, keys, values, None if self.position is None else self.position(p, q))

    @torch.jit.ignore
    def reparameterize(self) -> None:
        """For inference: the rows of the projection ordered as [q | k | v], each by head, which is one split."""
        if self.by_head and untouched(self.qkv, nn.Linear):
            for name, value in self.qkv.named_parameters():
                by_kind = value.detach().unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                setattr(self.qkv, name, nn.Parameter(by_kind.contiguous(), requires_grad=False))
            self.by_head = False

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

    def attend(self, x: Tensor) -> Tensor:
        """Multi-head self-attention among all cells of a map. (B, p, q, C) -> (B, p, q, C)."""
        B, p, q, C = x.shape
        qkv = self.qkv(x)
        if self.by_head:
            qkv = qkv.reshape(B, p * q, self.heads, 3, C // self.heads).permute(3, 0, 2, 1, 4)
        else:
            qkv = qkv.reshape(B, p * q, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        bias = None if self.position is None else self.position(p, q)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=bias)  # B heads N d
        return self.proj(y.transpose(1, 2).reshape(B, p, q, C))


def grid_of(x: Tensor, cell: tuple[int, int]) -> tuple[int, int, int]:
    """(B, C, H, W) -> B, and how many cells there are in a column and in a row."""
    return x.shape[0], (x.shape[2] + cell[0] - 1) // cell[0], (x.shape[3] + cell[1] - 1) // cell[1]


def to_cells(x: Tensor, cell: tuple[int, int]) -> Tensor:
    """Pixels by cell in raster order, zero-padded below and on the right: one copy. (B, C, H, W) -> (B*p*q, P, C)."""
    _, p, q = grid_of(x, cell)
    x = pad_to(x.permute(0, 2, 3, 1), p * cell[0], q * cell[1])
    return split_cells(x, cell[0], cell[1]).flatten(3, 4).flatten(0, 2)


def sample(cells: Tensor, grid: tuple[int, int, int], iterations: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Associate pixels with super tokens and average them.

    cells (B*p*q, P, C), grid (B, p, q) -> tokens (B, p, q, C), the share (B*p*q, 9, P) of each pixel in its nine super
    tokens, and the mass (B, p, q, 1) that each super token holds. No gradient reaches shares and mass. The nine come
    first, so that the soft-max runs over contiguous pixels.
    """
    constant = cells.detach()
    tokens = constant.mean(1).unflatten(0, grid)
    share, mass = cells, tokens
    for i in range(iterations):
        logits = torch.bmm(neighbours(tokens.detach() * scale), constant.transpose(1, 2))  # B*p*q 9 P
        # Half precision would lose the small shares, and the guard below would vanish in float16.
        weights = (logits if logits.dtype == torch.float64 else logits.float()).softmax(1)
        share = weights.to(cells.dtype)
        sums = torch.bmm(share, cells if i == iterations - 1 else constant)  # B*p*q 9 C
        folded = fold(torch.cat([sums.to(weights.dtype), weights.sum(2, keepdim=True)], 2), grid)  # B p q C+1
        mass = folded[..., -1:].detach() + 1e-12
        tokens = (folded[..., :-1] / mass).to(cells.dtype)
    return tokens, share, mass


def neighbours(tokens: Tensor) -> Tensor:
    """The 3 x 3 tokens around each, zero beyond the border. (B, p, q, C) -> (B*p*q, 9, C), row-major."""
    around = F.pad(tokens, [0, 0, 1, 1, 1, 1]).unfold(1, 3, 1).unfold(2, 3, 1)  # B p q C 3 3
    return around.permute(0, 1, 2, 4, 5, 3).flatten(3, 4).flatten(0, 2)


def fold(parts: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """The adjoint of `neighbours`: adds up what was meant for each token. (B*p*q, 9, C) -> (B, p, q, C).

    Separable: three shifted sums of rows, then three of columns.
    """
    parts = parts.unflatten(1, (3, 3)).unflatten(0, grid)  # B p q 3 3 C
    down, up = F.pad(parts[:, :, :, 2], [0, 0, 0, 0, 0, 0, 1, 0]), F.pad(parts[:, :, :, 0], [0, 0, 0, 0, 0, 0, 0, 1])
    rows = parts[:, :, :, 1] + down[:, :-1] + up[:, 1:]  # B p q 3 C
    right, left = F.pad(rows[:, :, :, 2], [0, 0, 1, 0]), F.pad(rows[:, :, :, 0], [0, 0, 0, 1])
    return rows[:, :, :, 1] + right[:, :, :-1] + left[:, :, 1:]


class _Sample(torch.autograd.Function):
    """Pixels to super tokens: associate and average. (B, C, H, W) -> tokens (B, p, q, C), shares (B*p*q, 9, P).

    The shares are constants to the gradient. So this step and `_Spread` are linear and each other's backward, and only
    the shares are kept for it: nine numbers a pixel instead of its channels.
    """

    @staticmethod
    def forward(ctx, x, cell, iterations, scale):
        tokens, shares, masses = [], [], []
        for part in _slices(x):
            token, share, mass = sample(to_cells(x[part], cell), grid_of(x[part], cell), iterations, scale)
            tokens.append(token)
            shares.append(share)
            masses.append(mass)
        share, mass = _join(shares), _join(masses)
        ctx.save_for_backward(share, mass)
        ctx.cell, ctx.like = cell, (x.shape, x.stride(), x.dtype)
        ctx.mark_non_differentiable(share)
        return _join(tokens), share

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
        return _spread(
            tokens, share, residual, shape, stride, tokens.dtype if residual is None else residual.dtype, cell
        )

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
    tokens: Tensor,
    share: Tensor,
    residual: Tensor | None,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    cell: tuple[int, int],
) -> Tensor:
    """residual + the map, of the given shape and strides, in which every pixel holds the mixture of its nine tokens."""
    out = torch.empty_strided(shape, stride, dtype=dtype, device=tokens.device)
    B, C, H, W = shape
    h, w = cell
    p, q = tokens.shape[1:3]
    channels_first = out.is_contiguous()
    whole = p * h == H and q * w == W
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


def _formatted_like(x: Tensor, y: Tensor) -> Tensor:
    """y, which is channels-last, in the memory format of x."""
    channels_first = x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)
    return y.contiguous() if channels_first else y


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.jit.unused
def _autocast(x: Tensor) -> Tensor:
    """The dtype in which autocast would run matrix products, once, so that forward and backward agree on it."""
    device = x.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if autocasts else x
