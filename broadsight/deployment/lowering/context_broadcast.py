"""Context broadcasting, without a lerp, which is translated into seven operations."""

from torch import Tensor

from ...layers import ContextBroadcast
from ...surgery.broadcasting import WindowedBroadcast
from . import lowers


@lowers(ContextBroadcast)
class LoweredContextBroadcast(ContextBroadcast):
    """Tokens (B, N, C) or maps with their context."""

    def broadcast(self, x: Tensor, channel_axis: int, class_token: bool) -> Tensor:
        if self.kind != "cb":
            return super().broadcast(x, channel_axis, class_token)
        return (x + x.mean([axis for axis in range(1, x.ndim) if axis != channel_axis], keepdim=True)) * 0.5


@lowers(WindowedBroadcast)
class LoweredWindowedBroadcast(LoweredContextBroadcast, WindowedBroadcast):
    """Windows as rows of the batch with the context of their images."""
