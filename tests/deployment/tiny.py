"""A model that exports in a second, and what an artefact of it says of itself."""

from typing import Any

import torch
from torch import Tensor, nn

from broadsight.data.loading import Transforms
from broadsight.deployment import Description
from broadsight.deployment.request import Request


class Tiny(nn.Module):
    """(B, 3, H, W) -> (B, 4): one convolution, a mean, one linear layer."""

    num_classes = 4

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


class Pair(Tiny):
    """Two outputs: (B, 8, h, w) and (B, 4)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.conv(x).relu()
        return maps, self.head(maps.mean((2, 3)))


def described(side: int = 32, **changes) -> Description:
    image = {"channels": 3, "height": side, "width": side, "any_batch": True, "any_size": False}
    image |= {name: changes.pop(name) for name in image.keys() & changes.keys()}
    transforms = Transforms(side, mean=(0.5,) * 3, std=(0.25,) * 3, crop_pct=0.875)
    values = {
        "task": "classify",
        "title": "tiny",
        "source": "tiny",
        "classes": ("ant", "bée", "cat", "dog"),
        "outputs": ("logits",),
        "image": image,
        "preprocessing": preprocessing(transforms),
        "provenance": {"commit": None, "versions": {"torch": torch.__version__}},
    }
    return Description(**(values | changes))


def preprocessing(seen: Transforms) -> dict[str, Any]:
    return {
        "resize": int(seen.size / seen.crop_pct),
        "crop": seen.size,
        "crop_pct": seen.crop_pct,
        "interpolation": seen.interpolation,
        "mean": list(seen.mean),
        "std": list(seen.std),
    }


def ask(format: str, **options) -> Request:
    """How an artefact is asked for; of which model is the subject's business."""
    return Request("net", format=format, **options)
