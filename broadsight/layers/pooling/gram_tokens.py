"""Tokens made from an image's Gram matrix: which channels fire together, wherever they do."""

from math import gcd

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from ..folding import fold_product, inference_form
from ..kernels.products import gram_triangle, group_product

HALF = (torch.float16, torch.bfloat16)


@register_notrace_module
class GramTokens(nn.Module):
    """Class tokens for every group from second-order statistics of the image. (B, n, dim) -> (G, B, tokens, dim).

    Each group reduces the channels, multiplies the result with itself over all positions, and maps the upper triangle
    of that Gram matrix, scaled to length one, to its tokens.

    Args:
        dim, groups, tokens: Channels of the image and of the tokens; groups, and tokens in each.
        gram_dim, gram_groups: Channels that the Gram matrix is taken of; channel groups of its map to the tokens.
    """

    order: Tensor
    mirror: Tensor

    def __init__(self, dim: int, groups: int, tokens: int, gram_dim: int, gram_groups: int):
        super().__init__()
        triangle = gram_dim * (gram_dim + 1) // 2
        self.dim, self.groups, self.tokens, self.gram_dim = dim, groups, tokens, gram_dim
        self.reduce = nn.Parameter(torch.empty(groups * gram_dim, dim))
        self.reduce_norm: nn.Module = nn.BatchNorm1d(groups * gram_dim)
        sizes = groups * gram_groups, dim * tokens // gram_groups, triangle // gram_groups
        self.embed = nn.Parameter(torch.empty(sizes))
        self.embed_norm = nn.BatchNorm1d(groups * dim * tokens)
        self.register_buffer("order", torch.empty(triangle, dtype=torch.long), persistent=False)
        self.register_buffer("mirror", torch.empty(gram_dim**2, dtype=torch.long), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.reduce, std=0.02)
        nn.init.trunc_normal_(self.embed, std=0.02)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Compute both index buffers; timm and `restore_buffers` call this after loading."""
        places = torch.arange(len(self.order), device=self.order.device)
        triangle = torch.triu_indices(self.gram_dim, self.gram_dim, device=self.order.device)
        # The triangle's entries are dealt out to the tokens like cards: entry e belongs to token e mod tokens.
        rows, columns = triangle[:, places.view(-1, self.tokens).mT.flatten()]
        self.order.copy_(rows * self.gram_dim + columns)
        self.mirror[rows * self.gram_dim + columns] = self.mirror[columns * self.gram_dim + rows] = places

    def forward(self, x: Tensor) -> Tensor:
        (B, n, D), G, P, T = x.shape, self.groups, self.gram_dim, self.tokens
        folded = inference_form(self.reduce, self.reduce_norm)
        if folded is None:
            r = self.reduce_norm(torch.mm(x.reshape(B * n, D), self.reduce.mT))
            r = r.view(B, n, G, P).permute(2, 0, 1, 3).reshape(G * B, n, P)
        else:
            (weight, shift), rows = folded, x.reshape(1, B * n, D).expand(G, -1, -1)
            r = torch.baddbmm(shift.view(G, 1, P), rows, weight.view(G, P, D).mT).view(G * B, n, P)
        if low := r.dtype in HALF or (r.device.type != "meta" and torch.is_autocast_enabled(r.device.type)):
            # Products of half precision would lose the small entries, and entries of any size overflow it: there the
            # triangle is computed in full precision, and scaled before the map.
            with torch.autocast(r.device.type, enabled=False):
                entries, length = self.statistics(r.float(), G)
            entries = (entries / length).to(x.dtype)
        else:
            entries, length = self.statistics(r, G)
        entries = entries.view(B, self.embed.shape[0], -1).transpose(0, 1)  # GR B U/R
        tokens = group_product(entries, self.embed)  # GR B dim*T/R
        tokens = tokens.view(G, -1, B, tokens.shape[-1]).permute(2, 0, 1, 3).reshape(B, G, D * T)
        tokens = self.embed_norm((tokens if low else tokens / length).flatten(1))
        return tokens.view(B, G, D, T).permute(1, 0, 3, 2)

    def statistics(self, r: Tensor, G: int) -> tuple[Tensor, Tensor]:
        """The triangle (B, G, U) of each Gram matrix in token order, and its length (B, G, 1), both unscaled."""
        entries = gram_triangle(r, self.order, self.mirror, G)
        n = r.shape[1]
        # The published form divides the reduced map by n, which cancels but for where the length is cut off at 1e-12.
        return entries, torch.linalg.vector_norm(entries, dim=-1, keepdim=True).clamp_min(1e-12 * n * n)

    def reparameterize(self) -> None:
        fold_product(self, "reduce", "reduce_norm")


def choose_gram_groups(dim: int, tokens: int, gram_dim: int, gram_groups: int | None = None) -> int:
    """The channel groups of GramTokens, by default the largest possible up to 32; refuses what does not divide."""
    triangle = gram_dim * (gram_dim + 1) // 2
    if triangle % tokens:
        entries = f"the {triangle} entries of a Gram matrix of gram_dim={gram_dim}"
        raise ValueError(f"{entries} do not split over {tokens} tokens; choose another number of tokens or gram_dim")
    common = gcd(triangle, dim * tokens)
    possible = [n for n in range(1, min(common, 10_000) + 1) if common % n == 0]
    if gram_groups is None:
        return max(n for n in possible if n <= 32)
    if gram_groups < 1 or common % gram_groups:
        near = min(possible, key=lambda n: abs(n - gram_groups))
        both = f"both {triangle} Gram entries and dim * tokens = {dim * tokens}"
        raise ValueError(f"gram_groups={gram_groups} does not divide {both}; the nearest that does is {near}")
    return gram_groups
