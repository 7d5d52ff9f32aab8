"""The poolings that MAP is compared with: average, fully connected layers, Fourier magnitudes of the last map."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import register_pool
from .merge_maps import check_features


class PlainPool(nn.Module):
    """Pools the last feature map into a vector and classifies it. [(B, C_i, H_i, W_i)] -> (B, num_classes).

    `channels` are those of each map, lowest level first; with no classes the result is the vector (B, num_features)
    that a subclass's `pool` gives; `drop` is the dropout before the classifier.
    """

    fc: nn.Module
    like: Tensor

    def __init__(self, channels: Sequence[int], num_classes: int, num_features: int = 0, drop: float = 0.0):
        super().__init__()
        self.channels, self.dim, self.num_features = tuple(channels), channels[-1], num_features or channels[-1]
        self.drop = nn.Dropout(drop)
        self.register_buffer("like", torch.empty(0), persistent=False)  # knows device and dtype, with or without layers
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes: int) -> None:
        """A new classifier for num_classes; 0: none."""
        self.num_classes = num_classes
        fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        if isinstance(fc, nn.Linear):
            nn.init.trunc_normal_(fc.weight, std=0.02)
            nn.init.zeros_(fc.bias)
        self.fc = fc.to(self.like.device, self.like.dtype).train(self.training)

    def merge_maps(self, features: Sequence[Tensor]) -> Tensor:
        """The one map that is pooled: the last."""
        check_features(features, self.channels)
        return features[-1]

    def pool(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, num_features)."""
        raise NotImplementedError

    def classify(self, merged: Tensor, pre_logits: bool = False) -> Tensor:
        """From the last map to logits (B, num_classes), or to the pooled vector (B, num_features)."""
        return self.pool(merged) if pre_logits else self.fc(self.drop(self.pool(merged)))

    def forward(self, features: Sequence[Tensor], pre_logits: bool = False) -> Tensor:
        return self.classify(self.merge_maps(features), pre_logits)


@register_pool("gap")
class AveragePool(PlainPool):
    """The mean over all positions (GAP), normed if asked for, and a linear classifier."""

    def __init__(self, channels: Sequence[int], num_classes: int, *, norm: bool = False, drop: float = 0.0):
        super().__init__(channels, num_classes, drop=drop)
        self.norm: nn.Module = nn.LayerNorm(channels[-1], eps=1e-6) if norm else nn.Identity()

    def pool(self, x: Tensor) -> Tensor:
        return self.norm(x.mean((2, 3)))


@register_pool("vgg")
class FlattenPool(PlainPool):
    """All positions side by side into two fully connected layers, as VGG ends.

    The layers are `hidden` wide (0: as the map's channels) and made for a `grid`, to which any other map is averaged.
    """

    def __init__(
        self, channels: Sequence[int], num_classes: int, *, grid: tuple[int, int], hidden: int = 0, drop: float = 0.0
    ):
        super().__init__(channels, num_classes, hidden, drop)
        self.grid, hidden = grid, self.num_features
        self.fc1, self.fc2 = nn.Linear(channels[-1] * grid[0] * grid[1], hidden), nn.Linear(hidden, hidden)

    def pool(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(self.drop(F.relu(self.fc1(self.to_grid(x).flatten(1))))))

    def to_grid(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.grid)


@register_pool("dft")
class FourierPool(PlainPool):
    """Magnitudes of the lowest frequencies of every channel, which shifting the image does not change (DFT pooling).

    So many frequencies along each axis, the constant one included; then a `hidden` layer (0: as the map's channels).
    """

    def __init__(
        self, channels: Sequence[int], num_classes: int, *, frequencies: int = 4, hidden: int = 0, drop: float = 0.0
    ):
        super().__init__(channels, num_classes, hidden, drop)
        self.frequencies, self.fc1 = frequencies, nn.Linear(channels[-1] * frequencies**2, self.num_features)

    def pool(self, x: Tensor) -> Tensor:
        return F.relu(self.fc1(self.magnitudes(x).flatten(1)))

    def magnitudes(self, x: Tensor) -> Tensor:
        """|DFT| / (H*W) at the lowest frequencies. (B, C, H, W) -> (B, C, frequencies, frequencies)."""
        # Two small products instead of a whole transform: few frequencies are wanted, and exporters know products.
        (cos_h, sin_h), (cos_w, sin_w) = self.waves(x.shape[2], x), self.waves(x.shape[3], x)
        cosine, sine = x @ cos_w.mT, x @ sin_w.mT  # B C H f
        real, imaginary = cos_h @ cosine - sin_h @ sine, cos_h @ sine + sin_h @ cosine  # B C f f
        wide = torch.promote_types(x.dtype, torch.float32)  # float16 has no squares below 1e-7
        squares = real.to(wide).square() + imaginary.to(wide).square()
        return (squares + torch.finfo(wide).tiny).sqrt().to(x.dtype)

    def waves(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines over one axis, divided by its length. Each (frequencies, length)."""
        lengths = length, self.frequencies
        place, frequency = (torch.arange(n, device=like.device, dtype=torch.float32) for n in lengths)
        angle = 2 * math.pi / length * frequency[:, None] * place
        return angle.cos().to(like.dtype) / length, angle.sin().to(like.dtype) / length
