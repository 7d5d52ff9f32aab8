"""Bytes of images -> numbers as a model takes them, on its device."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def per_channel(values: Iterable[float], channels: int) -> tuple[float, ...]:
    """A value for each channel: as they are, or their mean for all where there are other channels."""
    values = tuple(float(value) for value in values)
    return values if len(values) == channels else (sum(values) / len(values),) * channels


class Normalise:
    """(B, C, H, W) of bytes -> the same of floats, on the device; `mean` and `std` are of values between 0 and 1."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
        layout: torch.memory_format = torch.contiguous_format,
    ):
        shape = (1, len(mean), 1, 1)
        self.device, self.layout = torch.device(device), layout
        self.mean = torch.tensor([255 * value for value in mean], device=self.device).view(shape)
        self.scale = torch.tensor([1 / (255 * value) for value in std], device=self.device).view(shape)

    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True).contiguous(memory_format=self.layout)
        return (images - self.mean).mul_(self.scale)

    def invert(self, images: Tensor) -> Tensor:
        """Back to numbers between 0 and 255, not rounded."""
        return images / self.scale + self.mean
