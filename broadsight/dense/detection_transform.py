"""What happens to images before a detector, and to its predictions after it."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from .stages import Stages


class DetectionTransform(GeneralizedRCNNTransform):
    """Images (C, H_i, W_i) with values from 0 to 1 -> one normalised batch, padded below and at the right with zeros.

    In train mode no image is resized: the data pipeline has done that. Predictions are given in pixels of the image
    that came, whatever it was resized to.

    Args:
        stages: Whose mean and std images are normalised by.
        image_size: (shorter side, longest side) that images are resized to in eval mode; None takes them as they come.
        exact: Resize to precisely `image_size`, then (H, W), whatever the aspect.
        size_divisible: Sides of the batch are multiples of this.
    """

    def __init__(
        self,
        stages: Stages,
        image_size: Sequence[int] | None = None,
        *,
        exact: bool = False,
        size_divisible: int = 32,
    ):
        if image_size is not None and (len(image_size) != 2 or min(image_size) < 1):
            raise ValueError(f"image_size={image_size}; expected two sides in pixels, such as (800, 1333), or None")
        if image_size is not None and not exact and image_size[0] > image_size[1]:
            raise ValueError(f"image_size={image_size}; expected the shorter side first: {tuple(image_size[::-1])}")
        first, second = image_size or (1, 1)
        super().__init__(
            first,
            second,
            list(stages.mean),
            list(stages.std),
            size_divisible=size_divisible,
            fixed_size=(second, first) if exact else None,  # (W, H) there
        )
        self.image_size = None if image_size is None else (first, second)

    def normalize(self, image: Tensor) -> Tensor:
        """(..., C, H, W), one image or a batch."""
        if image.shape[-3] != len(self.image_mean):  # would be broadcast in silence
            raise ValueError(f"an image has {image.shape[-3]} channels; the model takes {len(self.image_mean)}")
        return super().normalize(image)

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self.training or self.image_size is None:
            return image, target
        sides = image.shape[-2:]
        factor = min(self.image_size[0] / min(sides), self.image_size[1] / max(sides))
        if self.fixed_size is None and target is None and min(sides) * factor < 1:  # nothing would be left of the side
            size = [max(1, int(side * factor)) for side in sides]
            return F.interpolate(image[None], size, mode="bilinear", align_corners=False)[0], None
        return super().resize(image, target)
