"""Keypoints of one person in a crop, as heat maps. SimpleBaseline (Xiao et al., ECCV 2018).

Coordinates are those of `data.pose_geometry`, which makes crops and the heat maps to learn.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .feature_pyramid import freeze_unused
from .normalise import Normalise
from .stages import Stages


class SimpleBaseline(nn.Module):
    """Crops (B, C, H, W) with values from 0 to 1 -> heat maps (B, num_keypoints, ceil(H / stride), ceil(W / stride)).

    In train mode, with (heat maps, weights (B, num_keypoints)) to learn, {"loss"}: the mean squared error, that of each
    keypoint times its weight. Of the backbone's maps only the last is looked at; what the others need is frozen.

    Args:
        stages: The backbone.
        num_classes: Kinds of objects in the data, for the record: a crop is of one object.
        num_keypoints: Heat maps to give.
        channels: Of the transposed convolutions.
        deconvs: How many of them; each doubles the map.
        input_size: (H, W) that crops should have; others are taken too.

    Attributes:
        stride: Pixels of a crop per cell of a heat map, 4 with three transposed convolutions.
    """

    task = "keypoints"

    def __init__(
        self,
        stages: Stages,
        num_classes: int = 1,
        *,
        num_keypoints: int = 17,
        channels: int = 256,
        deconvs: int = 3,
        input_size: tuple[int, int] = (256, 192),
    ):
        super().__init__()
        if not 0 <= deconvs <= 5:
            raise ValueError(f"deconvs={deconvs}; expected 0 to 5, which give a stride from 32 to 1")
        self.stages, self.num_classes, self.num_keypoints = stages, num_classes, num_keypoints
        self.input_size, self.stride = (int(input_size[0]), int(input_size[1])), stages.strides[-1] // 2**deconvs
        freeze_unused(stages, len(stages.channels) - 1)
        self.normalise = Normalise(stages)
        widths = [stages.channels[-1], *[channels] * deconvs]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [
                nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
        self.decoder = nn.Sequential(*layers)
        self.head = nn.Conv2d(widths[-1], num_keypoints, 1)
        for layer in (*layers, self.head):
            if isinstance(layer, nn.ConvTranspose2d | nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.001)
        nn.init.zeros_(self.head.bias)  # ty: ignore[invalid-argument-type]

    def forward(self, images: Tensor, targets: tuple[Tensor, Tensor] | None = None) -> Tensor | dict[str, Tensor]:
        cells = [-(-side // self.stride) for side in images.shape[-2:]]
        maps = self.head(self.decoder(self.stages(self.normalise(images))[-1]))[..., : cells[0], : cells[1]]
        if not self.training:
            return maps
        if targets is None:
            raise ValueError(
                "simple_baseline in train mode was given no targets; pass (heat maps, weights) or call model.eval()"
            )
        heatmaps, weights = targets
        if heatmaps.shape != maps.shape or weights.shape != maps.shape[:2]:
            raise ValueError(
                f"heat maps {tuple(heatmaps.shape)} with weights {tuple(weights.shape)} given; expected "
                f"{tuple(maps.shape)} with {tuple(maps.shape[:2])}, as encode() makes with stride={self.stride}"
            )
        return {"loss": ((maps.float() - heatmaps) ** 2 * weights[..., None, None]).mean()}


def simple_baseline(stages: Stages, num_classes: int = 1, **options) -> SimpleBaseline:
    """SimpleBaseline; its options are those of the class."""
    return SimpleBaseline(stages, num_classes, **options)


def decode(heatmaps: Tensor, *, stride: int = 4, refine: Literal["quarter", "taylor", "none"] = "quarter") -> Tensor:
    """Where heat maps (N, K, h, w) are highest: (N, K, 3), x and y in pixels of the crop, and the height there.

    Args:
        heatmaps: Of N crops with K keypoints.
        stride: Pixels of a crop per cell.
        refine: "quarter": from the highest cell a quarter of a cell towards the higher one of its neighbours, in x and
            in y. "taylor": to where a Gaussian through the cell and its neighbours peaks, exact for maps from `encode`
            (the idea of DARK, Zhang et al., CVPR 2020, without its smoothing). At the border the cell's centre.
    """
    if refine not in REFINEMENTS:
        raise ValueError(f"refine={refine!r} is not known; choose one of {', '.join(map(repr, REFINEMENTS))}")
    heatmaps = heatmaps.float()
    height, width = heatmaps.shape[-2:]
    score, index = heatmaps.flatten(2).max(2)  # N K
    x, y = index % width, index // width
    # The cell and those around it, N K 3 3: its place is the same in a map with a margin less one
    margin = F.pad(heatmaps, (1, 1, 1, 1)).flatten(2)
    offsets = torch.arange(3, device=index.device)
    rows, columns = y[..., None] + offsets, x[..., None] + offsets
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


def _none(patch: Tensor, inside: Tensor) -> Tensor:
    return torch.zeros_like(inside, dtype=patch.dtype)


REFINEMENTS = {"quarter": _quarter, "taylor": _taylor, "none": _none}


@torch.no_grad()
def flip_test(model: nn.Module, crops: Tensor, pairs: Sequence[tuple[int, int]], *, shift: bool = False) -> Tensor:
    """Heat maps (B, K, h, w) of a model in eval mode, averaged with those of the mirrored crops.

    Args:
        model: From crops to heat maps.
        crops: (B, C, H, W).
        pairs: Keypoints that trade places in a mirror, such as left and right eye.
        shift: Move the mirrored crops' maps by a cell to the right, for weights trained where cell i is at i * stride:
            with these a mirrored map lies a cell too far left. Ours need it not.
    """
    maps = model(crops)
    order = torch.arange(maps.shape[1], device=maps.device)
    for left, right in pairs:
        order[left], order[right] = right, left
    mirrored = model(crops.flip(-1)).flip(-1)[:, order]
    if shift:
        mirrored = torch.cat([mirrored[..., :1], mirrored[..., :-1]], -1)
    return (maps + mirrored) / 2


BUILDERS = {"simple_baseline": simple_baseline}
