"""What programs for other runtimes are built from: the same functions in operations that all of them run well.

Runtimes know matrix products, soft-max, transposition and gathering. Views of every third row, fused attention, stable
sorts and writes by index are translated into chains of small operations, or not at all.
"""

import torch
from torch import Tensor


def exporting() -> bool:
    """Whether torch.export or an exporter to ONNX is watching."""
    if torch.jit.is_scripting():
        return False
    else:
        return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys, ... side by side in the last axis, each by head. (B, N, parts*C) -> parts of (B, heads, N, d)."""
    B, N, C = x.shape
    return x.view(B, N, parts * heads, C // (parts * heads)).transpose(1, 2).chunk(parts, 1)


def attention(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Soft-max attention. (..., N, d), (..., M, d), (..., M, d) -> (..., N, d); leading axes are broadcast.

    hidden is added to the logits: minus infinity for keys that nobody may see.
    """
    logits = (queries @ keys.transpose(-2, -1)) * keys.shape[-1] ** -0.5
    return (logits if hidden is None else logits + hidden).softmax(-1) @ values


def rank_foreground(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n highest scores of each row without a stable sort; of equals the lower index wins. (B, N), n ->

    index (B, n): where they are, ascending.
    rank (B, N): 1 for the first of them, 2 for the second, ...; 0 for all the others.
    """
    N = scores.shape[1]
    least = scores.topk(n, 1).values.amin(1, keepdim=True)  # B 1
    # Above the least, equal to it, below it, each of them by position: no two are equal, and whole numbers are exact.
    order = torch.sign(scores - least) * N - torch.arange(N, dtype=scores.dtype, device=scores.device)  # B N
    highest = order.topk(n, 1)
    chosen = (order >= highest.values.amin(1, keepdim=True)).long()
    return highest.indices.topk(n, 1, largest=False).values, chosen.cumsum(1) * chosen
