"""What our detectors have in common, beside what torchvision's classes give them."""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .detection_transform import DetectionTransform
from .stages import Stages

# Arguments of torchvision's classes that this package sets itself.
OURS = {"backbone", "num_classes", "min_size", "max_size", "image_mean", "image_std", "size", "kwargs"}


class Detector(nn.Module):
    """Comes before one of torchvision's detectors in a class's bases.

    In train mode `model(images, targets)` gives a dict of losses, in eval mode `model(images)` a list of predictions;
    targets are not looked at then.

    Args:
        backbone: Gives maps by name, and has `stages`.
        transform: Takes the place of torchvision's.
        num_classes: Classes of objects, labelled from 1.
        outputs: As torchvision's class counts its classes.
        options: Of torchvision's class.

    Attributes:
        task: "detect", "instances" or "keypoints".
    """

    task = "detect"
    backbone: Any
    transform: DetectionTransform

    def __init__(
        self, backbone: nn.Module, transform: DetectionTransform, num_classes: int, outputs: int | None, **options: Any
    ):
        theirs = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("torchvision."))
        accepted = set(inspect.signature(theirs).parameters) - OURS
        if unknown := sorted(options.keys() - accepted - {"size"}):  # torchvision's classes swallow anything
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}; options are {', '.join(sorted(accepted))}")
        super().__init__(backbone, num_classes=outputs, **options)
        self.transform, self.num_classes = transform, num_classes

    @property
    def stages(self) -> Stages:
        return self.backbone.stages

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        if not self.training:
            return super().forward(images)
        if targets is None:
            raise ValueError("a detector in train mode was given no targets; pass them or call model.eval()")
        for labels in (target["labels"] for target in targets):
            if labels.numel() and not 1 <= labels.min() <= labels.max() <= self.num_classes:
                raise ValueError(f"labels from {labels.min()} to {labels.max()}; expected 1 to {self.num_classes}")
        return super().forward(images, targets)


class SteadyBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that trains on a single value per channel too: by the running statistics, which then stay."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.shape[0] * input.shape[2] * input.shape[3] <= 1:
            known = self.running_mean, self.running_var
            return F.batch_norm(input, *known, self.weight, self.bias, training=False, eps=self.eps)
        return super().forward(input)


def in_float32(module: nn.Module) -> None:
    """Have a head give its outputs in float32, contiguous: boxes are not to be decoded in bfloat16, 8 pixels apart at
    1000, and some of torchvision's losses view what comes."""
    module.register_forward_hook(_as_float32)


def _as_float32(module: nn.Module, inputs: tuple, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.float().contiguous()
    if isinstance(output, dict):
        return {name: _as_float32(module, inputs, x) for name, x in output.items()}
    return type(output)(_as_float32(module, inputs, x) for x in output)
