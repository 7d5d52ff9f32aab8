"""MAT's samples at learned positions, with two operations on the offsets."""

import torch
from torch import Tensor

from ...layers import BilinearPatchEmbed
from . import lowers


@lowers(BilinearPatchEmbed)
class LoweredBilinearPatchEmbed(BilinearPatchEmbed):
    """(B, C, H, W) -> (B, C', H/2, W/2), sizes rounded up."""

    def positions(self, offsets: Tensor, H: int, W: int) -> Tensor:
        column = torch.arange(offsets.shape[2], device=offsets.device, dtype=offsets.dtype)
        row = torch.arange(offsets.shape[1], device=offsets.device, dtype=offsets.dtype)[:, None]
        centre_x, centre_y = (4 * column + 2) / W - 1, (4 * row + 2) / H - 1
        shape = offsets.shape[1:3]
        centres = torch.stack([centre_x.expand(shape), centre_y.expand(shape)], -1)
        two = torch.full_like(column[0], 2)  # a tensor: not all exporters divide by a size that is left open
        return offsets * torch.stack([two / W, two / H]) + centres
