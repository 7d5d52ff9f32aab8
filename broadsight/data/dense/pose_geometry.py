"""From a person's box to an upright crop of one size, and from keypoints to the heat maps that a pose model learns.

Coordinates are continuous: x = 0 is the left edge of the image, the centre of its first pixel is at 0.5. Cell i of a
heat map covers [i * stride, (i + 1) * stride) of the crop. COCO's boxes are such; to its keypoints add 0.5 on reading.
"""

import torch
from torch import Tensor

REACH = 3  # standard deviations; beyond these nothing is left of a Gaussian


def crop_affine(
    boxes: Tensor,
    input_size: tuple[int, int] = (256, 192),
    *,
    padding: float = 1.25,
    scale: float | Tensor = 1.0,
    rotation: float | Tensor = 0.0,
) -> Tensor:
    """Matrices (N, 2, 3) from pixels of the image to those of a crop (H, W) around each box (N, 4), x1 y1 x2 y2.

    Args:
        padding: How much larger the region that fills the crop is than the box, once that has the aspect of the crop.
        scale: Factor on that region, one or (N,); above 1 the person appears smaller.
        rotation: Degrees by which the image is turned counter-clockwise about the box's centre, one or (N,).
    """
    boxes = boxes if boxes.is_floating_point() else boxes.float()
    low, high = boxes[:, :2], boxes[:, 2:]
    centres, (width, height) = (low + high) / 2, (high - low).clamp(min=1).unbind(1)
    width = torch.maximum(width, height * (input_size[1] / input_size[0])) * padding
    zoom = input_size[1] / (width * torch.as_tensor(scale).to(centres))  # N
    angle = torch.deg2rad(torch.as_tensor(rotation).to(centres))
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    turn = torch.stack([cos, sin, -sin, cos], 1).unflatten(1, (2, 2))  # y points down
    middle = centres.new_tensor([input_size[1] / 2, input_size[0] / 2])
    return torch.cat([turn, middle[:, None] - turn @ centres[:, :, None]], 2)


def invert_affine(matrices: Tensor) -> Tensor:
    """The inverse matrices (N, 2, 3)."""
    back = torch.linalg.inv(matrices[:, :, :2])
    return torch.cat([back, -back @ matrices[:, :, 2:]], 2)


def apply_affine(points: Tensor, matrices: Tensor) -> Tensor:
    """Points (N, K, 2 or more) moved by matrices (N, 2, 3); columns beyond x and y are kept."""
    moved = points[..., :2] @ matrices[:, :, :2].mT + matrices[:, None, :, 2]
    return torch.cat([moved, points[..., 2:]], -1)


def encode(
    points: Tensor, input_size: tuple[int, int] = (256, 192), *, stride: int = 4, sigma: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Heat maps (N, K, ceil(H / stride), ceil(W / stride)) with a Gaussian of height 1 exactly at each keypoint, and
    weights (N, K): 1 for what is to be learned; 0, with an empty map, for points not labelled or beyond their reach.
    Points (N, K, 3) are x and y in pixels of the crop (H, W), and 0 if not labelled; `sigma` counts in cells."""
    cells = [-(-side // stride) for side in input_size]
    place = points[..., :2] / stride - 0.5  # in cells, whose centres are whole numbers: N K 2
    last = place.new_tensor([cells[1] - 1, cells[0] - 1])
    reached = ((place >= -REACH * sigma) & (place <= last + REACH * sigma)).all(-1)  # N K
    weights = ((points[..., 2] > 0) & reached).to(points.dtype)
    axes = [torch.arange(n, device=place.device, dtype=place.dtype) for n in reversed(cells)]  # x, y
    away = [(axis - place[..., i, None]) ** 2 for i, axis in enumerate(axes)]  # N K w, N K h
    columns, rows = (torch.exp(-(square / (2 * sigma**2))) for square in away)
    maps = rows[..., :, None] * columns[..., None, :]  # N K h w
    return torch.where(weights[..., None, None] > 0, maps, 0), weights
