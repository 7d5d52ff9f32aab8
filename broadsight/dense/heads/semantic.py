"""A class for every pixel: Semantic FPN (Kirillov et al., CVPR 2019), UPerNet (Xiao et al., ECCV 2018)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork

from ...errors import check_choice
from ..detector import SteadyBatchNorm2d
from ..stages import Normalise, Stages, cropped
from . import register

IGNORED = 255  # in masks: pixels of no class


class Segmenter(nn.Module):
    """Images (B, C, H, W) with values from 0 to 1 -> logits (B, num_classes, H, W), for any H and W.

    In train mode, with masks (B, H, W) of class numbers or 255, a dict of losses to be summed: "loss", the mean
    cross-entropy; if asked for, "aux", that of the auxiliary head, and "dice", times their weights.

    Args:
        decoder: From the four maps of the backbone to one (B, width, ceil(H / 4), ceil(W / 4)).
        dropout: Share of channels dropped before the classifiers in training.
        auxiliary, aux_weight: From the map of stride 16 to `aux_channels`, for training only, and its loss's weight.
        class_weights, dice: Of each class in the cross-entropy, and of a Dice loss (segmentation-models-pytorch).
    """

    task = "segment"
    class_weights: Tensor | None

    def __init__(
        self,
        stages: Stages,
        decoder: nn.Module,
        width: int,
        num_classes: int,
        *,
        dropout: float = 0.1,
        auxiliary: nn.Module | None = None,
        aux_channels: int = 256,
        aux_weight: float = 0.4,
        class_weights: Sequence[float] | None = None,
        dice: float = 0.0,
    ):
        super().__init__()
        if class_weights is not None and len(class_weights) != num_classes:
            raise ValueError(f"{len(class_weights)} class_weights for num_classes={num_classes}; give one for each")
        self.stages, self.num_classes = stages, num_classes
        self.normalise, self.decoder = Normalise(stages), decoder
        self.classifier = pixel_classifier(width, num_classes, dropout)
        self.aux_weight, self.dice_weight, self.weight_values = aux_weight, dice, class_weights
        self.auxiliary = self.dice = None
        if auxiliary is not None:
            self.auxiliary = nn.Sequential(auxiliary, pixel_classifier(aux_channels, num_classes, dropout))
        weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)
        if dice:
            self.dice = _smp("the Dice loss").losses.DiceLoss("multiclass", ignore_index=IGNORED)

    def init_non_persistent_buffers(self) -> None:
        """Fill the weights of the classes again; see `layers.buffers`."""
        if self.class_weights is not None:
            self.class_weights.copy_(torch.tensor(self.weight_values))

    def forward(self, images: Tensor, masks: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        maps = self.stages(self.normalise(images))
        logits = enlarged(self.classifier(self.decoder(maps)), self.stages.strides[0], images)
        if not self.training:
            return logits
        if masks is None:
            raise ValueError("a segmenter in train mode was given no masks; pass them or call model.eval()")
        losses = {"loss": self.cross_entropy(logits, masks)}
        if self.dice is not None:
            losses["dice"] = self.dice_weight * self.dice(logits.float(), masks)
        if self.auxiliary is not None:
            logits = enlarged(self.auxiliary(maps[2]), self.stages.strides[2], images)
            losses["aux"] = self.aux_weight * self.cross_entropy(logits, masks)
        return losses

    def cross_entropy(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Mean over pixels that have a class; 0 if there are none."""
        total = F.cross_entropy(logits.float(), masks, self.class_weights, ignore_index=IGNORED, reduction="sum")
        counted = masks != IGNORED
        if self.class_weights is None:
            return total / counted.sum().clamp(min=1)
        weight = (self.class_weights[torch.where(counted, masks, 0)] * counted).sum()
        return total / torch.where(weight > 0, weight, 1)


class SemanticFPN(nn.Module):
    """Four maps -> their sum (B, width, ...) at stride 4: a top-down pass, and a convolution for each doubling."""

    def __init__(self, channels: Sequence[int], pyramid_channels: int, width: int, norm: Callable[..., nn.Module]):
        super().__init__()
        self.pyramid = FeaturePyramidNetwork(list(channels), pyramid_channels)
        widths = [[pyramid_channels] + [width] * max(0, level - 1) for level in range(len(channels))]
        layer = partial(Conv2dNormActivation, out_channels=width, kernel_size=3, norm_layer=norm)
        self.branches = nn.ModuleList(nn.ModuleList(map(layer, before)) for before in widths)
        initialise(self.branches)

    def forward(self, maps: list[Tensor]) -> Tensor:
        maps = list(self.pyramid({str(level): x for level, x in enumerate(maps)}).values())
        results = []
        for level, (x, branch) in enumerate(zip(maps, self.branches, strict=True)):
            for number, convolution in enumerate(branch):  # ty: ignore[invalid-argument-type]
                x = enlarged(convolution(x), 2, maps[level - number - 1]) if level else convolution(x)
            results.append(x)
        return torch.stack(results).sum(0)


class UPerNetDecoder(nn.Module):
    """Four maps -> one at stride 4: segmentation-models-pytorch's, without its norms of the input, as in the paper."""

    def __init__(self, channels: Sequence[int], width: int, norm: Callable[..., nn.Module]):
        super().__init__()
        decoders = _smp("UPerNet").decoders
        self.decoder: Any = decoders.upernet.decoder.UPerNetDecoder([0, 0, *channels], decoder_channels=width)
        self.decoder.feature_norms = nn.ModuleList(nn.Identity() for _ in channels)
        for module in list(self.decoder.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, norm(child.num_features))
        initialise(self.decoder)

    def forward(self, maps: list[Tensor]) -> Tensor:
        return self.decoder([maps[0], maps[0], *maps])  # it expects maps at strides 1 and 2, which it ignores


def group_norm(channels: int) -> nn.GroupNorm:
    """In 32 groups, or fewer where channels are: two at least in a group, since one value has no deviation."""
    return nn.GroupNorm(1 if channels % 2 else math.gcd(32, channels // 2), channels)


NORMS: dict[str, Any] = {"batch": SteadyBatchNorm2d, "group": group_norm}


@register("semantic_fpn", "segment")
def semantic_fpn(
    stages: Stages,
    num_classes: int,
    *,
    pyramid_channels: int = 256,
    channels: int = 128,
    norm: str = "batch",
    **options: Any,
) -> Segmenter:
    """Semantic FPN, with `channels` in the convolutions after the pyramid; other options are as of `upernet`."""
    check_choice("norm", norm, NORMS)
    decoder = SemanticFPN(stages.channels, pyramid_channels, channels, NORMS[norm])
    return Segmenter(stages, decoder, channels, num_classes, **options)


@register("upernet", "segment")
def upernet(
    stages: Stages,
    num_classes: int,
    *,
    channels: int = 512,
    aux_weight: float = 0.4,
    aux_channels: int = 256,
    norm: str = "batch",
    **options: Any,
) -> Segmenter:
    """UPerNet, with a second, simple head on the map of stride 16 in training.

    Args:
        channels, aux_channels, aux_weight: Of the decoder, of the second head, and of its loss; 0 for no such head.
        norm: Of the decoder, "batch" or "group". With one or two images per device, use "group": with one, "batch" has
            only running statistics for the globally pooled branch, which then never change.
        options: `dropout`, `class_weights` and `dice` of Segmenter.
    """
    check_choice("norm", norm, NORMS)
    decoder = UPerNetDecoder(stages.channels, channels, NORMS[norm])
    if aux_weight:
        second = initialise(Conv2dNormActivation(stages.channels[2], aux_channels, 3, norm_layer=NORMS[norm]))
        options |= dict(auxiliary=second, aux_channels=aux_channels, aux_weight=aux_weight)
    return Segmenter(stages, decoder, channels, num_classes, **options)


def pixel_classifier(channels: int, num_classes: int, dropout: float) -> nn.Sequential:
    classifier = nn.Conv2d(channels, num_classes, 1)
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)  # ty: ignore[invalid-argument-type]
    return nn.Sequential(nn.Dropout2d(dropout), classifier)


def enlarged(x: Tensor, factor: int, like: Tensor) -> Tensor:
    """A map enlarged `factor` times per side and cropped to the size of `like`, at the right and below."""
    x = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
    return cropped(x, like.shape[-2], like.shape[-1])


def initialise(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


def _smp(purpose: str) -> Any:
    try:
        import segmentation_models_pytorch
    except ImportError:
        raise ImportError(f"{purpose} needs segmentation-models-pytorch; pip install broadsight[seg]") from None
    return segmentation_models_pytorch
