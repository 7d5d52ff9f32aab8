"""Parts that our detectors add to torchvision's classes."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from .stages import Stages

# Arguments of torchvision's classes that this package sets itself.
OURS = {"backbone", "num_classes", "min_size", "max_size", "image_mean", "image_std", "size", "kwargs"}


class DetectionTransform(GeneralizedRCNNTransform):
    """Images (C, H_i, W_i) with values from 0 to 1 -> one normalised batch, padded below and at the right with zeros.

    In train mode images are not resized: the data pipeline has done that. Predictions are in pixels of the given
    image, whatever it was resized to.

    Args:
        image_size: (shorter side, longest side) that images are resized to in eval mode; None keeps their size.
        exact: Resize to `image_size` as (H, W), whatever the aspect.
        size_divisible: Sides of the batch are multiples of this.
    """

    def __init__(
        self, stages: Stages, image_size: Sequence[int] | None = None, *, exact: bool = False, size_divisible: int = 32
    ):
        if image_size is not None and (len(image_size) != 2 or min(image_size) < 1):
            raise ValueError(f"image_size={image_size}; expected two sides in pixels, such as (800, 1333), or None")
        if image_size is not None and not exact and image_size[0] > image_size[1]:
            raise ValueError(f"image_size={image_size}; expected the shorter side first: {tuple(image_size[::-1])}")
        first, second = image_size or (1, 1)
        fixed = (second, first) if exact else None  # (W, H) there
        mean, std = list(stages.mean), list(stages.std)
        super().__init__(first, second, mean, std, size_divisible=size_divisible, fixed_size=fixed)
        self.image_size = None if image_size is None else (first, second)

    def normalize(self, image: Tensor) -> Tensor:
        """(..., C, H, W), one image or a batch."""
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
    """A base class to put before one of torchvision's detectors.

    In train mode `model(images, targets)` returns a dict of losses, in eval mode `model(images)` a list of predictions;
    targets are ignored then.

    Args:
        backbone: Gives maps by name, and has `stages`.
        num_classes, outputs: Classes of objects, labelled from 1, and as torchvision's class counts them.
        options: Of torchvision's class.

    Attributes:
        task: "detect", "instances" or "keypoints".
        from_zero: Whether torchvision's class has no background class and labels objects from 0.
    """

    task = "detect"
    from_zero = False
    backbone: Any
    transform: DetectionTransform

    def __init__(
        self, backbone: nn.Module, transform: DetectionTransform, num_classes: int, outputs: int | None, **options: Any
    ):
        theirs = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("torchvision."))
        accepted = set(inspect.signature(theirs).parameters) - OURS
        if unknown := sorted(options.keys() - accepted - {"size"}):  # torchvision's classes ignore what they lack
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}; options are {', '.join(sorted(accepted))}")
        super().__init__(backbone, num_classes=outputs, **options)
        self.transform, self.num_classes = transform, num_classes

    @property
    def stages(self) -> Stages:
        return self.backbone.stages

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        shift = int(self.from_zero)
        if not self.training:
            return [{**found, "labels": found["labels"] + shift} for found in super().forward(images)]
        if targets is None:
            raise ValueError("a detector in train mode was given no targets; pass them or call model.eval()")
        for target in targets:
            check_labels(target["labels"], self.num_classes)
        return super().forward(images, [{**target, "labels": target["labels"] - shift} for target in targets])


class SteadyBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that also trains on one value per channel: with the running statistics, which it then keeps."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.shape[0] * input.shape[2] * input.shape[3] <= 1:
            known = self.running_mean, self.running_var
            return F.batch_norm(input, *known, self.weight, self.bias, training=False, eps=self.eps)
        return super().forward(input)


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Refuse labels beyond 1 to num_classes."""
    if labels.numel() and not 1 <= labels.min() <= labels.max() <= num_classes:
        low, high = labels.min(), labels.max()
        raise ValueError(f"labels from {low} to {high}; expected 1 to {num_classes}, the number of classes")


def in_float32(module: nn.Module) -> None:
    """Make a head return its outputs in float32, contiguous: bfloat16 at 1000 is 8 pixels apart, and some of
    torchvision's losses call `view`."""
    module.register_forward_hook(_as_float32)


def _as_float32(module: nn.Module, inputs: tuple, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.float().contiguous()
    if isinstance(output, dict):
        return {name: _as_float32(module, inputs, x) for name, x in output.items()}
    return type(output)(_as_float32(module, inputs, x) for x in output)
