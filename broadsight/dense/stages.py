"""Any timm model as a dense backbone: four maps at strides 4, 8, 16 and 32, whatever the model's own are."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from ..data.normalising import per_channel
from ..errors import check_choice
from ..layers.checks import check_images
from ..layers.pooling.multi_token_pool import MultiTokenPool
from ..layers.pooling.neck import MultiTokenNeck, PoolNeck
from ..surgery.pooling import LAYER_NORMS, PooledModel, create_backbone, ends_with_layer_norm, swap_pool
from ..surgery.pyramid import Pyramid, as_backbone, find_pyramid, maps_of, takes

STRIDES = (4, 8, 16, 32)
NECKS = ("fpn", "map", "tokens")
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class Stages(nn.Module):
    """(B, in_chans, H, W), normalised, -> four maps (B, channels[i], ceil(H / strides[i]), ceil(W / strides[i])).

    Images are padded to multiples of 32, and maps cropped. A stride that the model lacks is made from its nearest map
    by transposed convolutions or pooling. For a model of one image size, every image is resized to `fixed_size`.

    Args:
        model, pyramid: A timm model without its classifier, and how its maps are obtained.
        normed: Put a LayerNorm on every map, for models whose stages end in sums without a norm.
        pooled: How the maps are obtained that the pool of a PoolNeck takes, as they are in its own model.
    """

    def __init__(
        self, model: nn.Module, pyramid: Pyramid, normed: bool, mean: tuple, std: tuple, pooled: Pyramid | None = None
    ):
        super().__init__()
        # `network` is part of the names in every checkpoint of a dense model
        self.network, self.pyramid, self.pooled, self.strides = model, pyramid, pooled, STRIDES
        self.in_chans, self.mean, self.std = pyramid.in_chans, mean, std
        height, width = (cells(side, 32) * 32 for side in pyramid.image_size)
        self.fixed_size = None if takes(model, pyramid, (height + 32, width + 64)) else pyramid.image_size
        offered = [round(pyramid.image_size[0] / size[0]) for size in pyramid.sizes]
        self.sources = sources_of(offered)
        self.channels = tuple(pyramid.channels[source] for source in self.sources)
        self.norms = nn.ModuleList(LayerNorm2d(width) if normed else nn.Identity() for width in self.channels)
        pairs = zip(self.sources, self.channels, STRIDES, strict=True)
        self.rescale = nn.ModuleList(rescaling(width, offered[source] / stride) for source, width, stride in pairs)
        self.neck: nn.Module | None = None  # applied to the list of maps
        self.frozen_stats = False  # whether BatchNorms of the model keep their statistics in training

    def train(self, mode: bool = True) -> "Stages":
        super().train(mode)
        if self.frozen_stats:  # usual for detectors with pretrained weights, since their batches are small
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def forward(self, images: Tensor) -> list[Tensor]:
        check_images(images, self.in_chans)
        height, width = images.shape[-2:]
        right, below = (cells(side, STRIDES[-1]) * STRIDES[-1] - side for side in (width, height))
        if isinstance(right + below, torch.SymInt) or right or below:  # an exported program cannot branch on sizes
            images = F.pad(images, (0, right, 0, below))
        seen = images
        if self.fixed_size and tuple(images.shape[-2:]) != self.fixed_size:
            seen = F.interpolate(images, self.fixed_size, mode="bilinear", align_corners=False, antialias=True)
        maps, *pooled = maps_of([self.pyramid, *([self.pooled] if self.pooled else [])], self.network, seen)
        levels = []
        for source, norm, rescale, stride in zip(self.sources, self.norms, self.rescale, STRIDES, strict=True):
            x = rescale(norm(maps[source]))
            whole = images.shape[-2] // stride, images.shape[-1] // stride
            if x.shape[-2:] != whole:  # such as patches of 14 pixels
                x = F.interpolate(x, whole, mode="bilinear", align_corners=False)
            levels.append(cropped(x, cells(height, stride), cells(width, stride)))
        if self.neck is None:
            return levels
        return self.neck(levels, *(self.unpadded(one, height, width) for one in pooled))

    def unpadded(self, maps: list[Tensor], height: int, width: int) -> list[Tensor]:
        """What the pool takes of an image of (height, width), without what that was padded with."""
        if self.fixed_size or self.pooled is None:
            return maps
        (tall, wide), cut = self.pooled.image_size, []
        for x, (rows, columns) in zip(maps, self.pooled.sizes, strict=True):
            cut.append(cropped(x, cells(height, round(tall / rows)), cells(width, round(wide / columns))))
        return cut


class Normalise(nn.Module):
    """(B, C, H, W) or (C, H, W) with values from 0 to 1 -> less the mean and over the deviation of the backbone, which
    belong to its description, not to its weights: they are not in the state dict."""

    mean: Tensor
    std: Tensor

    def __init__(self, stages: Stages):
        super().__init__()
        self.values = {"mean": stages.mean, "std": stages.std}
        for name, values in self.values.items():
            self.register_buffer(name, torch.empty(len(values), 1, 1), persistent=False)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Fill mean and deviation; see `layers.buffers`."""
        for name, values in self.values.items():
            self.get_buffer(name).copy_(torch.tensor(values).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


def cells(side: int, stride: int) -> int:
    """Cells of a stride along a side, the last of which may be cut."""
    return (side + stride - 1) // stride


def cropped(x: Tensor, height: int, width: int) -> Tensor:
    """The upper left of a map (B, C, H, W)."""
    if isinstance(height, int) and isinstance(width, int):
        # A slice of the whole is a copy to some runtimes
        return x if tuple(x.shape[-2:]) == (height, width) else x[..., :height, :width]
    # torch.export with free sizes would ask of a slice whether it is the whole map
    rows, columns = (torch.arange(side, device=x.device) for side in (height, width))
    return x.index_select(-2, rows).index_select(-1, columns)


def open_stages(
    backbone: str | nn.Module,
    *,
    pretrained: bool = False,
    in_chans: int | None = None,
    neck: str = "fpn",
    neck_args: Mapping[str, Any] | None = None,
    **timm_args: Any,
) -> Stages:
    """A backbone for dense prediction from a timm name or a model.

    Args:
        backbone: A timm name, or a model object, which is changed: of a swapped pooling, the part below it is used.
        pretrained, timm_args, in_chans: For timm.create_model, the first two only with a name; 3 channels by default.
        neck: "fpn" leaves the maps as they are, for a decoder to merge; "map" feeds the tokens of the model's pool back
            to the stages first, see PoolNeck: of its own multi-token pool, or a new one as `swap_pool` puts it there;
            "tokens" does so with learned tokens of its own, see MultiTokenNeck.
        neck_args: For MultiTokenNeck; its norm is "group" unless given, since detectors train on small batches.
    """
    check_choice("neck", neck, NECKS)
    if neck_args and neck != "tokens":
        raise ValueError(f"neck_args {', '.join(neck_args)} given with neck={neck!r}; they are for neck='tokens'")
    if isinstance(backbone, str):
        model: Any = create_backbone(backbone, pretrained=pretrained, in_chans=in_chans or 3, **timm_args)
    elif pretrained or timm_args:
        raise ValueError(f"{', '.join(['pretrained', *timm_args])} given with a model object; they are for a name")
    else:
        model = backbone
    described, pool = getattr(model, "pretrained_cfg", None) or {}, None
    if neck == "map":
        pool = model if isinstance(model, PooledModel) else swap_pool(model, "map", num_classes=1)
        if not isinstance(pool.head, MultiTokenPool):
            kind = type(pool.head).__name__
            raise ValueError(f"neck='map' feeds tokens of a pool back, and {kind} has none; pool with map, ga or cap")
        model = pool.backbone
    elif isinstance(model, PooledModel):
        for tap in model.pyramid.taps:
            tap.detach(model.backbone)
        model = model.backbone
    # Maps are sums without a norm if the model uses LayerNorm; a swapped pooling has replaced the last one
    inside = [module for module in model.modules() if isinstance(module, (*LAYER_NORMS, nn.BatchNorm2d))]
    normed = ends_with_layer_norm(model) or isinstance(inside[-1] if inside else None, LAYER_NORMS)
    normed = normed and not len(getattr(model, "feature_norms", ()))
    info = getattr(model, "feature_info", None)
    offered = [entry.get("reduction") for entry in getattr(info, "info", info) or []]
    indices = None if len(set(offered)) < 2 or None in offered else sorted(set(sources_of(offered)))
    pyramid = whole = find_pyramid(model, indices=indices, stem="", in_chans=in_chans)
    if pool is not None and set(further := pool.pyramid.indices or ()) - set(pyramid.indices or ()):
        every = sorted({*further, *(pyramid.indices or ())})
        whole = find_pyramid(model, indices=every, stem="", in_chans=in_chans)
    model = as_backbone(model, whole)
    mean, std = (per_channel(described.get(key) or usual, pyramid.in_chans) for key, usual in IMAGENET.items())
    stages = Stages(model, pyramid, normed, mean, std, None if pool is None else pool.pyramid)
    if pool is not None:
        stages.neck = PoolNeck(pool.head, stages.channels)
    elif neck == "tokens":
        arguments: dict[str, Any] = {"norm": "group", **(neck_args or {})}
        stages.neck = MultiTokenNeck(stages.channels, **arguments)
    return stages


def sources_of(offered: list[int]) -> list[int]:
    """For each of our strides the index of the nearest one offered, the last of equals."""
    places = range(len(offered))
    if len(set(offered)) == 1 and len(offered) >= len(STRIDES):  # blocks of a plain ViT: the last four are used
        return list(places)[-len(STRIDES) :]
    return [min(reversed(places), key=lambda place: abs(math.log2(offered[place] / stride))) for stride in STRIDES]


def rescaling(channels: int, factor: float) -> nn.Module:
    """From a map to one about `factor` times as large, by powers of two; interpolation does the rest."""
    doublings = round(math.log2(factor))
    if doublings < 0:
        return nn.MaxPool2d(2**-doublings)
    layers: list[nn.Module] = []
    for _ in range(doublings):
        layers += [LayerNorm2d(channels), nn.GELU(), nn.ConvTranspose2d(channels, channels, 2, stride=2)]
    return nn.Sequential(*layers[2:])
