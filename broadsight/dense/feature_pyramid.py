"""Stages with a feature pyramid over them, as torchvision's detectors want a backbone; and anchors on its maps."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7

from ..inspection.meta_pass import copied
from .stages import Stages

WIDTH = 256


class FeaturePyramid(nn.Module):
    """(B, C, H, W), normalised, -> maps (B, width, H_i, W_i) by name, "0" the lowest, in float32 under autocast too.

    Args:
        stages: The backbone.
        lowest: Stride of the lowest map of the pyramid.
        extra: Further levels above stride 32: "c5": two convolutions, the first on the last map of the backbone
            (RetinaNet); "p5": the same on the last map of the pyramid (FCOS); "pool": one by sub-sampling (R-CNN).
        width: Channels of all maps.

    Attributes:
        strides: Of the maps.
    """

    def __init__(self, stages: Stages, lowest: int, extra: str, width: int = WIDTH):
        super().__init__()
        self.stages, self.out_channels = stages, width
        self.first = stages.strides.index(lowest)
        self.strides = (*stages.strides[self.first :], *((64,) if extra == "pool" else (64, 128)))
        channels = list(stages.channels[self.first :])
        if extra == "pool":
            levels: ExtraFPNBlock = LastLevelMaxPool()
        else:
            levels = LastLevelP6P7(channels[-1] if extra == "c5" else width, width)
            levels.use_P5 = extra == "p5"  # it goes by the number of channels alone, which may be alike
        self.fpn = FeaturePyramidNetwork(channels, width, levels)
        freeze_unused(stages, self.first)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.stages(images)[self.first :]
        levels = self.fpn({str(number): x for number, x in enumerate(maps)})
        # Anchors and boxes are of the maps' type: single precision at least
        return {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in levels.items()}


class StridedAnchors(AnchorGenerator):
    """Anchors centred on the positions of maps whose strides are known.

    torchvision derives strides from sizes, and is off where a map's side was rounded up: 800 pixels are 7 positions
    at stride 128, and 114 pixels apart to it.

    Args:
        sizes: Sides of the square anchors of each map.
        aspect_ratios: Height / width, of every map.
        strides: Of each map.
        offset: Of the first centre from the image's corner, in strides.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[float]],
        aspect_ratios: Sequence[float],
        strides: Sequence[int],
        offset: float = 0.0,
    ):
        super().__init__(tuple(map(tuple, sizes)), (tuple(aspect_ratios),) * len(sizes))
        self.strides, self.offset = tuple(strides), offset

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """One (A, 4) for each image, all the same; of positions row by row, lowest level first."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        steps = [[torch.tensor(stride, device=feature_maps[0].device)] * 2 for stride in self.strides]
        levels = self.grid_anchors([list(x.shape[-2:]) for x in feature_maps], steps)
        shifted = [anchors + self.offset * stride for anchors, stride in zip(levels, self.strides, strict=True)]
        return [torch.cat(shifted)] * len(image_list.image_sizes)


def octave_sizes(strides: Sequence[int], scale: float, per_octave: int = 1) -> list[tuple[float, ...]]:
    """Sides of anchors for each stride: `scale` strides, and evenly spaced up to twice that."""
    return [tuple(int(stride * scale * 2 ** (i / per_octave)) for i in range(per_octave)) for stride in strides]


def freeze_unused(stages: Stages, first: int) -> None:
    """No gradient for parameters that only the maps below `first` depend on, their norms for one: they would wait for
    it in vain, which distributed training takes for an error."""
    if not first or not any(parameter.requires_grad for parameter in stages.parameters()):
        return
    images = torch.zeros(1, stages.in_chans, *stages.pyramid.image_size)
    with torch.enable_grad():
        try:
            copy = copied(stages, stages, with_values=False).eval()
            maps = copy(images.to("meta"))
        except Exception:  # some models insist on arithmetic
            copy = copied(stages, stages, with_values=True).eval()
            like = next(stages.parameters())
            maps = copy(images.to(like.device, like.dtype))
        sources = {name: p for name, p in copy.named_parameters() if p.requires_grad}
        total = torch.stack([x.sum() for x in maps[first:]]).sum()
        gradients = torch.autograd.grad(total, list(sources.values()), allow_unused=True)
    for name, gradient in zip(sources, gradients, strict=True):
        if gradient is None:
            stages.get_parameter(name).requires_grad_(False)
