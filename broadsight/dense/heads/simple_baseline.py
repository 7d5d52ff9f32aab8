"""Keypoints of one object in a crop, as heat maps: SimpleBaseline (Xiao et al., ECCV 2018)."""

from itertools import pairwise

from torch import Tensor, nn

from ..detector import freeze_unused
from ..stages import Normalise, Stages
from . import register


@register("simple_baseline", "keypoints", top_down=True)
class SimpleBaseline(nn.Module):
    """Crops (B, C, H, W) with values from 0 to 1 -> heat maps (B, num_keypoints, ceil(H / stride), ceil(W / stride)).

    In train mode, with targets (heat maps, weights (B, num_keypoints)), {"loss"}: the mean squared error, weighted for
    each keypoint. Only the last map is used; `num_classes` and `input_size` (H, W) are for the record: others work.

    Args:
        channels, deconvs: Of the transposed convolutions, and how many there are, each of which doubles the map.
    """

    task = "keypoints"

    def __init__(
        self,
        stages: Stages,
        num_classes: int = 1,
        *,
        num_keypoints: int = 17,
        channels: int = 256,
        deconvs: int = 3,
        input_size: tuple[int, int] = (256, 192),
    ):
        super().__init__()
        if not 0 <= deconvs <= 5:
            raise ValueError(f"deconvs={deconvs}; expected 0 to 5, which give a stride from 32 to 1")
        self.stages, self.num_classes, self.num_keypoints = stages, num_classes, num_keypoints
        self.input_size, self.stride = (int(input_size[0]), int(input_size[1])), stages.strides[-1] // 2**deconvs
        freeze_unused(stages, len(stages.channels) - 1)
        self.normalise = Normalise(stages)
        widths = [stages.channels[-1], *[channels] * deconvs]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            doubled = nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False)
            layers += [doubled, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.decoder = nn.Sequential(*layers)
        self.head = nn.Conv2d(widths[-1], num_keypoints, 1)
        for layer in (*layers[::3], self.head):
            nn.init.normal_(layer.weight, std=0.001)  # ty: ignore[invalid-argument-type]
        nn.init.zeros_(self.head.bias)  # ty: ignore[invalid-argument-type]

    def forward(self, images: Tensor, targets: tuple[Tensor, Tensor] | None = None) -> Tensor | dict[str, Tensor]:
        cells = [-(-side // self.stride) for side in images.shape[-2:]]
        maps = self.head(self.decoder(self.stages(self.normalise(images))[-1]))[..., : cells[0], : cells[1]]
        if not self.training:
            return maps
        if targets is None:
            raise ValueError("simple_baseline was given no targets; pass (heat maps, weights) or call model.eval()")
        heatmaps, weights = targets
        given, wanted = [[tuple(one.shape) for one in pair] for pair in (targets, (maps, maps[..., 0, 0]))]
        if given != wanted:
            expected = f"{wanted[0]} with {wanted[1]}, as encode() makes with stride={self.stride}"
            raise ValueError(f"heat maps {given[0]} with weights {given[1]} given; expected {expected}")
        return {"loss": ((maps.float() - heatmaps) ** 2 * weights[..., None, None]).mean()}
