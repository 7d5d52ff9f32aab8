"""Partial attention: full attention among a few salient tokens, and one query for all the others."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .any_size import join_heads, split_heads
from .checks import check_divides
from .kernels.dispatch import accelerated
from .kernels.partial_attention import is_long, is_on_cpu, mixed_heads, top_k


@register_notrace_module
class PartialAttention(nn.Module):
    """Foreground tokens attend to each other with mixed heads; the background answers to a single query.

    (B, N, C), scores (B, N) -> (B, N, C). The tokens with the highest scores are the foreground. Together with a
    learned abstract token they pass multi-head attention whose heads are mixed before and after the soft-max. The
    abstract token's result then queries the background, and what it finds is added to every background token.

    With one query the background is never projected: q . (W x) = (W' q) . x, and a weighted mean of W x is W applied to
    the weighted mean. So the background costs two passes over the tokens.

    Args:
        dim, heads: Channels in and out, and attention heads.
        foreground: (n, of): n of every `of` tokens are foreground, rounded down, at least one and not all. of = 0: n
            tokens, however many there are.
        foreground_limit, background_required: The most foreground tokens; False allows all to be foreground.
        head_expansion: How many times more heads there are between the two mixings.
        channel_hidden: Hidden width of the MLP that the background's answer passes.
        background_identity: Add the background tokens themselves to their update, as the equations read.
        project_all: Apply the output projection at the end, to background tokens as well.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        foreground: tuple[int, int],
        *,
        head_expansion: int = 4,
        channel_hidden: int | None = None,
        background_identity: bool = True,
        background_required: bool = True,
        foreground_limit: int | None = None,
        project_all: bool = False,
    ):
        super().__init__()
        check_divides("dim", dim, "heads", heads)
        if len(foreground) != 2 or foreground[0] < 1 or foreground[1] < 0:
            raise ValueError(f"foreground={tuple(foreground)} is not a pair (n, of) with n of at least 1")
        if foreground_limit is not None and foreground_limit < 1:
            raise ValueError(f"foreground_limit={foreground_limit} leaves no token; choose 1 or more, or None")
        if head_expansion < 1:
            raise ValueError(f"head_expansion={head_expansion} leaves no head; choose 1 or more")
        self.dim, self.heads, self.head_expansion, self.scale = dim, heads, head_expansion, (dim // heads) ** -0.5
        self.foreground, self.foreground_limit = (int(foreground[0]), int(foreground[1])), foreground_limit or 0
        self.background_identity, self.background_required = background_identity, background_required
        self.project_all = project_all
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        # A bias of the keys would add one constant to a whole row of logits, which the soft-max cancels.
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.proj, self.token = nn.Linear(dim, dim), nn.Parameter(torch.zeros(1, 1, dim))
        self.head_up = nn.Parameter(torch.zeros(head_expansion * heads, heads))
        self.head_down = nn.Parameter(torch.zeros(heads, head_expansion * heads))
        hidden = max(4, dim // 32) if channel_hidden is None else channel_hidden
        first, norm, last = nn.Linear(dim, hidden), nn.LayerNorm(hidden, eps=1e-6), nn.Linear(hidden, dim)
        self.channel_mlp = nn.Sequential(OrderedDict(fc1=first, norm=norm, act=nn.ReLU(), fc2=last))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Heads start unmixed, a little noise aside: ordinary multi-head attention."""
        nn.init.zeros_(self.q_bias)
        nn.init.zeros_(self.v_bias)
        for weight in (self.token, self.head_up, self.head_down):
            nn.init.trunc_normal_(weight, std=0.02)
        identity = torch.eye(self.heads, device=self.head_up.device, dtype=self.head_up.dtype)
        with torch.no_grad():
            self.head_up += identity.repeat(self.head_expansion, 1)
            self.head_down += identity.repeat(1, self.head_expansion) / self.head_expansion

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        B, N, C = x.shape
        n = self.foreground_count(N)
        token = self.token.expand(B, -1, -1).to(x.dtype)
        index = select_foreground(scores, n)  # B*n rows of the flattened tokens
        chosen = x.flatten(0, 1).index_select(0, index).unflatten(0, (B, n))
        attended = self.attend(torch.cat([token, chosen], 1))  # B 1+n C
        attended = attended if self.project_all else self.proj(attended)
        rows = attended[:, 1:].flatten(0, 1)
        if self.all_foreground(N, n):
            out = torch.zeros_like(rows).index_copy(0, index, rows)
        else:
            hidden = torch.zeros(B * N, dtype=attended.dtype, device=x.device)
            hidden = hidden.index_fill(0, index, float("-inf")).view(B, 1, N)
            update = self.channel_mlp(self.query_background(attended[:, 0], x, hidden))  # B 1 C
            out = x + update if self.background_identity else update.expand(-1, x.shape[1], -1)
            out = out.flatten(0, 1).index_copy(0, index, rows.to(out.dtype))
        out = out.unflatten(0, (B, -1))
        return self.proj(out) if self.project_all else out

    def all_foreground(self, N: int, n: int) -> bool:
        """Whether no token is left for the background."""
        return N == 1 or (not self.background_required and n == N)

    def foreground_count(self, N: int) -> int:
        """How many of N tokens are foreground."""
        n = N * self.foreground[0] // self.foreground[1] if self.foreground[1] else self.foreground[0]
        n = min(n, self.foreground_limit) if self.foreground_limit else n
        return max(1, min(n, N - 1 if self.background_required else N))

    def attend(self, x: Tensor) -> Tensor:
        """Multi-head attention with heads mixed around the soft-max, not yet projected. (B, F, C) -> (B, F, C)."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        queries, keys, values = split_heads(F.linear(x, self.qkv.weight, bias), 3, self.heads)  # each B h F d
        return join_heads(self.mix_heads(queries, keys.transpose(-2, -1), values))

    @accelerated(mixed_heads, is_on_cpu)
    def mix_heads(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of some queries with mixed heads. (B, h, R, d), (B, h, d, F), (B, h, F, d) -> (B, h, R, d)."""
        # As 1x1 convolutions the mixings read the maps once; the scale rides on the first one's weights.
        logits = F.conv2d(queries @ keys, (self.head_up * self.scale)[:, :, None, None])  # B e*h R F
        weights = F.conv2d(logits.softmax(-1), self.head_down[:, :, None, None])  # B h R F
        return weights @ values

    def query_background(self, query: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
        """One query (B, C) over the rows of x (B, N, C), to whose logits hidden (B, 1, N) is added. -> (B, 1, C)."""
        (B, _, C), h = x.shape, self.heads
        _, key, value = self.qkv.weight.view(3, h, C // h, C).unbind(0)  # each h d C
        heads = (query * self.scale).view(B, h, C // h).transpose(0, 1)  # h B d
        probes = (heads @ key.to(heads.dtype)).transpose(0, 1)  # B h C: each head's query in the space of the tokens
        logits = probes @ x.transpose(1, 2).to(probes.dtype)  # B h N
        means = (logits + hidden.to(logits.dtype)).softmax(-1).to(x.dtype) @ x  # B h C
        found = means.transpose(0, 1) @ value.transpose(1, 2).to(means.dtype)  # h B d
        return found.transpose(0, 1).reshape(B, 1, C) + self.v_bias


def select_foreground(scores: Tensor, n: int) -> Tensor:
    """Flat indices b*N + i of the n highest scores of each row; of equals the lower index wins. (B, N) -> (B*n,)."""
    B, N = scores.shape
    return (highest(scores, n) + N * torch.arange(B, device=scores.device)[:, None]).reshape(-1)


@accelerated(top_k, is_long)
def highest(scores: Tensor, n: int) -> Tensor:
    """(B, N) -> (B, n)."""
    return scores.argsort(dim=1, descending=True, stable=True)[:, :n]
