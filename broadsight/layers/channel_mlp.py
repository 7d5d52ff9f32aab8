"""The channel MLP that all families share: expand, activate, contract, with an optional depth-wise convolution."""

from timm.layers import register_notrace_module
from torch import Tensor, nn

from ..errors import check_choice
from .kernels.dispatch import accelerated
from .kernels.sliced_mlp import runs_in_slices, sliced_mlp
from .patches import DepthwiseConv


@register_notrace_module
class ChannelMlp(nn.Module):
    """fc2(dw(GELU(fc1(x)))) over channels-last maps. (B, H, W, C) -> (B, H, W, C).

    `depthwise` is "none"; "before" the activation; or "after" it, as a residual (u + dw(u)).
    """

    def __init__(self, dim: int, hidden: int, *, depthwise: str = "none", bias: bool = True):
        super().__init__()
        check_choice("depthwise", depthwise, ("none", "before", "after"))
        self.depthwise, mixes = depthwise, depthwise != "none"
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.dw = DepthwiseConv(hidden, bias=bias, residual=depthwise == "after") if mixes else nn.Identity()
        self.act, self.fc2 = nn.GELU(), nn.Linear(hidden, dim, bias=bias)

    @accelerated(sliced_mlp, runs_in_slices)
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns residual + mlp(x); the sum costs nothing extra in the fast form."""
        x = self.fc1(x)
        x = self.act(self.dw(x) if self.depthwise == "before" else x)
        x = self.fc2(self.dw(x) if self.depthwise == "after" else x)
        return x if residual is None else residual + x
