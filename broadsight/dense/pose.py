"""Heat maps of keypoints: where they peak, in coordinates of `pose_geometry`, and the mean with those of the mirror."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.dense.transforms import Pairs, mirrored_order
from ..errors import check_choice


def decode(heatmaps: Tensor, *, stride: int = 4, refine: Literal["quarter", "taylor", "none"] = "quarter") -> Tensor:
    """Maxima of heat maps (N, K, h, w) of N crops, with `stride` pixels a cell: (N, K, 3), x and y in pixels of the
    crop, and the value there. Refined by "quarter": from the highest cell a quarter of a cell towards the higher one of
    its neighbours, in x and in y; "taylor": the peak of a Gaussian through the cell and its neighbours, exact for maps
    from `encode` (the idea of DARK, CVPR 2020, without its smoothing); "none", and at the border: the cell's centre."""
    check_choice("refine", refine, REFINEMENTS)
    heatmaps = heatmaps.float()
    height, width = heatmaps.shape[-2:]
    score, index = heatmaps.flatten(2).max(2)  # N K
    x, y = index % width, index // width
    # The cell and its neighbours, N K 3 3. In the map with a margin, their indices begin at those of the cell.
    margin = F.pad(heatmaps, (1, 1, 1, 1)).flatten(2)
    rows, columns = (place[..., None] + torch.arange(3, device=index.device) for place in (y, x))
    around = (rows[..., :, None] * (width + 2) + columns[..., None, :]).flatten(2)
    patch = margin.gather(2, around).unflatten(2, (3, 3))
    inside = torch.stack([(x > 0) & (x < width - 1), (y > 0) & (y < height - 1)], -1)  # N K 2
    shift = REFINEMENTS[refine](patch, inside)
    return torch.cat([(torch.stack([x, y], -1) + 0.5 + shift) * stride, score[..., None]], -1)


def _quarter(patch: Tensor, inside: Tensor) -> Tensor:
    slope = torch.stack([patch[..., 1, 2] - patch[..., 1, 0], patch[..., 2, 1] - patch[..., 0, 1]], -1)
    return slope.sign() / 4 * inside


def _taylor(patch: Tensor, inside: Tensor) -> Tensor:
    """One step of Newton's method on the logarithm, which is a parabola if the peak is a Gaussian."""
    p = patch.clamp(min=1e-10).log()
    centre = p[..., 1, 1]
    dx, dy = (p[..., 1, 2] - p[..., 1, 0]) / 2, (p[..., 2, 1] - p[..., 0, 1]) / 2
    dxx, dyy = p[..., 1, 2] - 2 * centre + p[..., 1, 0], p[..., 2, 1] - 2 * centre + p[..., 0, 1]
    dxy = (p[..., 2, 2] - p[..., 2, 0] - p[..., 0, 2] + p[..., 0, 0]) / 4
    determinant = dxx * dyy - dxy**2
    usable = inside.all(-1) & (determinant > 1e-12) & (patch[..., 1, 1] > 0)  # a peak, and no plateau
    step = torch.stack([dxy * dy - dyy * dx, dxy * dx - dxx * dy], -1)
    step = step / torch.where(usable, determinant, 1)[..., None]
    return (step * usable[..., None]).clamp(-0.5, 0.5)  # further, another cell would be the highest


REFINEMENTS = {"quarter": _quarter, "taylor": _taylor, "none": lambda patch, inside: patch.new_zeros(inside.shape)}


@torch.no_grad()
def flip_test(model: nn.Module, crops: Tensor, pairs: Pairs, *, shift: bool = False) -> Tensor:
    """Heat maps (B, K, h, w) of crops (B, C, H, W), averaged with those of the mirrored crops, in which pairs change
    places; `shift` moves these a cell to the right, for weights trained with cell i at i * stride."""
    maps = model(crops)
    mirrored = model(crops.flip(-1)).flip(-1)[:, mirrored_order(maps.shape[1], pairs)]
    if shift:
        mirrored = torch.cat([mirrored[..., :1], mirrored[..., :-1]], -1)
    return (maps + mirrored) / 2
