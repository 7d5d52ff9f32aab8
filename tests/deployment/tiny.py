"""A model that exports in a second, and what an artefact of it says of itself."""

import torch
from torch import Tensor, nn

from broadsight.deployment import Description


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
    image |= {name: changes.pop(name) for name in ("any_batch", "any_size", "channels") if name in changes}
    values = {
        "task": "classify",
        "title": "tiny",
        "source": "tiny",
        "classes": ("ant", "bée", "cat", "dog"),
        "outputs": ("logits",),
        "image": image,
        "preprocessing": {
            "resize": round(side / 0.875),
            "crop": side,
            "crop_pct": 0.875,
            "interpolation": "bicubic",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.25, 0.25, 0.25],
        },
        "provenance": {"commit": None, "versions": {"torch": torch.__version__}},
    }
    return Description(**(values | changes))
