"""A feature pyramid over Stages, as torchvision's detectors expect a backbone; and anchors on its maps."""

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
        lowest: Stride of the lowest map of the pyramid.
        extra: Levels above stride 32. "c5": two convolutions, the first on the last map of the backbone (RetinaNet);
            "p5": the same on the last map of the pyramid (FCOS); "pool": one by sub-sampling (R-CNN).
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
        levels: ExtraFPNBlock = LastLevelMaxPool()
        if extra != "pool":
            levels = LastLevelP6P7(channels[-1] if extra == "c5" else width, width)
            levels.use_P5 = extra == "p5"  # torchvision compares numbers of channels, which may be equal
        self.fpn = FeaturePyramidNetwork(channels, width, levels)
        freeze_unused(stages, self.first)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.stages(images)[self.first :]
        levels = self.fpn({str(number): x for number, x in enumerate(maps)})
        # Anchors and boxes take the dtype of the maps: at least single precision
        return {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in levels.items()}


class StridedAnchors(AnchorGenerator):
    """Anchors centred on the positions of maps of known strides.

    torchvision derives strides from sizes, wrongly where a map's side was rounded up: 800 pixels have 7 positions at
    stride 128, which it takes to be 114 pixels apart.

    Args:
        strides: Of the maps.
        scale: Side of the smallest square anchor, in strides.
        aspect_ratios: Height / width of the anchors.
        per_octave: How many sizes there are, evenly spaced up to twice the smallest.
        offset: Of the first centre from the image's corner, in strides.
    """

    def __init__(
        self,
        strides: Sequence[int],
        scale: float,
        aspect_ratios: Sequence[float] = (1.0,),
        *,
        per_octave: int = 1,
        offset: float = 0.0,
    ):
        octave = [scale * 2 ** (i / per_octave) for i in range(per_octave)]
        sizes = tuple(tuple(int(stride * factor) for factor in octave) for stride in strides)
        super().__init__(sizes, (tuple(aspect_ratios),) * len(strides))
        self.strides, self.offset = tuple(strides), offset

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """One (A, 4) for each image, all the same: positions row by row, lowest level first."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        steps = [[torch.tensor(stride, device=feature_maps[0].device)] * 2 for stride in self.strides]
        levels = self.grid_anchors([list(x.shape[-2:]) for x in feature_maps], steps)
        shifted = [anchors + self.offset * stride for anchors, stride in zip(levels, self.strides, strict=True)]
        return [torch.cat(shifted)] * len(image_list.image_sizes)


def freeze_unused(stages: Stages, first: int) -> None:
    """Switch gradients off for parameters that only maps below `first` depend on, such as their norms: distributed
    training treats a parameter without a gradient as an error."""
    if not first or not any(parameter.requires_grad for parameter in stages.parameters()):
        return
    images = torch.zeros(1, stages.in_chans, *stages.pyramid.image_size)
    with torch.enable_grad():
        try:
            copy = copied(stages, stages, with_values=False).eval()
            maps = copy(images.to("meta"))
        except Exception:  # some models need real values
            copy = copied(stages, stages, with_values=True).eval()
            like = next(stages.parameters())
            maps = copy(images.to(like.device, like.dtype))
        sources = {name: p for name, p in copy.named_parameters() if p.requires_grad}
        total = torch.stack([x.sum() for x in maps[first:]]).sum()
        gradients = torch.autograd.grad(total, list(sources.values()), allow_unused=True)
    for name, gradient in zip(sources, gradients, strict=True):
        if gradient is None:
            stages.get_parameter(name).requires_grad_(False)
