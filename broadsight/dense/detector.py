"""Parts that our detectors add to torchvision's classes: the transform, a feature pyramid, anchors on its maps."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7

from ..inspection.meta_pass import copied, idle_parameters
from .stages import Stages

WIDTH = 256  # channels of a pyramid

# Arguments of torchvision's classes that this package sets itself.
OURS = {"backbone", "num_classes", "min_size", "max_size", "image_mean", "image_std", "size", "kwargs"}


class DetectionTransform(GeneralizedRCNNTransform):
    """Images (C, H_i, W_i) with values from 0 to 1 -> one normalised batch, padded below and at the right with zeros;
    in train mode they are not resized: the data pipeline has done that."""

    def __init__(self, stages: Stages, image_size: Sequence[int] | None, square: bool):
        given = image_size or (1, 1)
        if len(given) != 2 or min(given) < 1:
            raise ValueError(f"image_size={image_size}; expected two sides in pixels, such as (800, 1333), or None")
        first, second = given
        if not square and first > second:
            raise ValueError(f"image_size={image_size}; expected the shorter side first: {(second, first)}")
        size: dict[str, Any] = dict(size_divisible=1, fixed_size=(second, first)) if square else {}  # (W, H) there
        super().__init__(first, second, list(stages.mean), list(stages.std), **size)
        self.image_size = None if image_size is None else (first, second)

    def normalize(self, image: Tensor) -> Tensor:
        if image.shape[-3] != len(self.image_mean):  # torch would broadcast
            raise ValueError(f"an image has {image.shape[-3]} channels; the model takes {len(self.image_mean)}")
        return super().normalize(image)

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self.training or self.image_size is None:
            return image, target
        sides = image.shape[-2:]
        factor = min(self.image_size[0] / min(sides), self.image_size[1] / max(sides))
        if self.fixed_size is None and target is None and min(sides) * factor < 1:  # torchvision would make it 0
            size = [max(1, int(side * factor)) for side in sides]
            return F.interpolate(image[None], size, mode="bilinear", align_corners=False)[0], None
        return super().resize(image, target)


class Detector(nn.Module):
    """A base class to put before one of torchvision's detectors: losses in train mode, predictions in eval mode.

    Args:
        backbone, options: Gives maps by name, and has `stages`; and what else torchvision's class takes.
        num_classes, outputs: Classes of objects, labelled from 1, and as torchvision's class counts them.
        image_size: (shorter side, longest side) to resize to in eval mode, if `square` (H, W); None keeps the size.
    """

    task = "detect"
    backbone: Any

    def __init__(
        self,
        backbone: Any,
        num_classes: int,
        outputs: int | None,
        image_size: Sequence[int] | None,
        *,
        square: bool = False,
        **options: Any,
    ):
        theirs = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("torchvision."))
        accepted = set(inspect.signature(theirs).parameters) - OURS
        if unknown := sorted(options.keys() - accepted - {"size"}):  # torchvision's classes ignore what they lack
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}; options are {', '.join(sorted(accepted))}")
        super().__init__(backbone, num_classes=outputs, **options)
        self.transform, self.num_classes = DetectionTransform(backbone.stages, image_size, square), num_classes
        self.shift = int(outputs == num_classes)  # torchvision's class has no background class then
        for name, module in self.named_modules():
            if name in ("head", "rpn.head") or name.endswith("_predictor"):
                in_float32(module)

    @property
    def stages(self) -> Stages:
        return self.backbone.stages

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if not self.training:
            return [{**found, "labels": found["labels"] + self.shift} for found in super().forward(images)]
        if targets is None:
            raise ValueError("a detector in train mode was given no targets; pass them or call model.eval()")
        check_labels([target["labels"] for target in targets], self.num_classes)
        return super().forward(images, [{**target, "labels": target["labels"] - self.shift} for target in targets])


class FeaturePyramid(nn.Module):
    """(B, C, H, W), normalised, -> maps (B, width, H_i, W_i) by name, "0" the lowest, in float32 under autocast too.

    Args:
        lowest, width: Stride of the lowest map of the pyramid, and channels of all maps.
        extra: Levels above stride 32. "c5": two convolutions, the first on the last map of the backbone (RetinaNet);
            "p5": the same on the last map of the pyramid (FCOS); "pool": one by sub-sampling (R-CNN).
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
    """Anchors on maps of known strides, which torchvision derives from sizes, wrongly where a side was rounded up.

    Args:
        scale, offset: Side of the smallest square anchor, and of the first centre from the image's corner, in strides.
        aspect_ratios, per_octave: Height / width of the anchors; and how many sizes, spaced up to twice the smallest.
    """

    def __init__(
        self,
        strides: Sequence[int],
        scale: float,
        aspect_ratios: Sequence[float] = (1.0,),
        per_octave: int = 1,
        offset: float = 0,
    ):
        octave = [scale * 2 ** (i / per_octave) for i in range(per_octave)]
        sizes = tuple(tuple(int(stride * factor) for factor in octave) for stride in strides)
        super().__init__(sizes, (tuple(aspect_ratios),) * len(strides))
        self.strides, self.offset = tuple(strides), offset

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
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
            maps = copy(images.to(next(stages.parameters())))
    for name in idle_parameters(copy, maps[first:]):
        stages.get_parameter(name).requires_grad_(False)


class SteadyBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that also trains on one value per channel: with the running statistics, which it then keeps."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.shape[0] * input.shape[2] * input.shape[3] <= 1:
            known = self.running_mean, self.running_var
            return F.batch_norm(input, *known, self.weight, self.bias, training=False, eps=self.eps)
        return super().forward(input)


def check_labels(labels: Sequence[Tensor], num_classes: int) -> None:
    every = torch.cat([one.reshape(-1) for one in labels]) if labels else torch.empty(0)
    # One answer for the whole batch: a GPU has to be waited for.
    low, high = torch.stack(every.aminmax()).tolist() if every.numel() else (1, 1)
    if not 1 <= low <= high <= num_classes:
        raise ValueError(f"labels from {low} to {high}; expected 1 to {num_classes}, the number of classes")


def in_float32(module: nn.Module) -> None:
    """Make a head return its outputs in float32, contiguous: bfloat16 at 1000 is 8 pixels apart, and some of
    torchvision's losses call `view`."""
    module.register_forward_hook(_as_float32)


def _as_float32(module: nn.Module, inputs: tuple, output: Any) -> Any:
    return tree_map(lambda x: x.float().contiguous(), output)
