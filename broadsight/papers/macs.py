"""How each paper counts: what its tool (a Convention) and its form of a layer (`beyond`) have beyond our products."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from timm.layers import LayerNorm2d, SelectAdaptivePool2d
from torch import Tensor, nn

from .. import layers
from ..inspection.macs import count_calls
from ..layers.coarse_attention import AttentionPath
from ..layers.patches import Propagate
from ..layers.pooling.group_linear import GroupLayerNorm
from ..layers.pooling.merge_maps import grows
from ..surgery.pooling import PooledModel


@dataclass(frozen=True)
class Convention:
    """What a counting tool adds to convolutions and matrix products, or that it knows layers alone."""

    name: str
    # Of all products, those of Conv2d and Linear modules alone; attention and the like are free. Then `beyond` gives
    # whatever a layer's published form has in such modules and ours has not.
    layers_only: bool = False
    layer_norm: int = 0  # operations per element of the result
    batch_norm: int = 0
    gelu: int = 0
    sample: int = 0  # operations per element sampled bilinearly
    pool: int = 0  # operations per element pooled globally
    transposed_at_output: bool = False  # counted on the larger map, a known slip of older tools


PRODUCTS = Convention("products")
LAYERS = Convention("layers", layers_only=True)
FVCORE = Convention("fvcore", layer_norm=5, batch_norm=2, sample=4, pool=1)
FVCORE_MEAN = Convention("fvcore, mean pool", layer_norm=5, batch_norm=2, sample=4)  # a mean is invisible to that tool
OLD_PROFILER = Convention("older profilers", layer_norm=5, batch_norm=2, gelu=1, sample=4, transposed_at_output=True)


def published_macs(model: nn.Module, size: tuple[int, int], convention: Convention) -> int:
    """Multiply-accumulates of the paper's formulation for one image of size (H, W), as the paper's tool counts them."""
    return sum(count(model, (1, 3, *size), convention=convention))


def count(model: nn.Module, *shapes: Sequence[int], convention: Convention) -> tuple[int, int]:
    """(executed, extra) of one call on tensors of these shapes; where the tool overlooks more, extra is negative."""
    executed, extra = count_calls(model, *shapes, beyond=lambda module, *call: beyond(module, convention, *call))
    return executed, extra - (executed if convention.layers_only else 0)


def beyond(module: nn.Module, convention: Convention, inputs: tuple, output: Any) -> int:
    """What the published form and the tool have beyond the products that a layer executes in one call."""
    match module:
        case nn.LayerNorm() | LayerNorm2d():
            return convention.layer_norm * output.numel()
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return convention.batch_norm * output.numel()
        case nn.GELU():
            return convention.gelu * output.numel()
        case SelectAdaptivePool2d():
            return 0 if module.is_identity() else convention.pool * inputs[0].numel()
        case nn.Conv2d() | nn.Linear() | nn.ConvTranspose2d():
            positions = inputs[0] if isinstance(module, nn.ConvTranspose2d) else output
            return positions.numel() * module.weight[0].numel() if convention.layers_only else 0
        case layers.BilinearPatchEmbed():  # the samples themselves, which are no matrix product
            return convention.sample * output[:, 0].numel() * inputs[0].shape[1]
        case layers.SuperTokenAttention():  # the authors' unfold and fold, which are convolutions, and their first pool
            B, C, H, W = output.shape
            (h, w), p, q = module.cell, -(-H // module.cell[0]), -(-W // module.cell[1])
            moved = 81 * (module.iterations * (2 * C + 1) + C)
            return 0 if module.cell == (1, 1) else B * p * q * (moved + convention.pool * C * h * w)
        case layers.PartialAttention():  # the equations project every token, background included, before the one query
            B, N, C = output.shape
            background = N - module.foreground_count(N)
            executed = 2 * C**2 + 2 * module.heads * N * C
            return B * (background * (3 * C**2 + 2 * C) - executed) if background else 0
        case AttentionPath():  # the paper widens before it pools: the same result from a projection at full size
            B, H, W, _ = inputs[0].shape
            coarse = -(-H // module.patch) * -(-W // module.patch)
            return B * (H * W - coarse) * module.expand.weight.numel()
        case Propagate():  # the products, which a counter of convolutions does not see in our form
            return (output if convention.transposed_at_output else inputs[0]).numel() * module.patch**2
        case layers.AbstractTokenAttention():  # windows are padded before the projections; we pad after them
            B, H, W, _ = inputs[0].shape
            added = (H + -H % module.window) * (W + -W % module.window) - H * W
            return B * added * (module.qkv.weight.numel() + module.proj.weight.numel())
        case layers.MultiTokenNeck() if convention.layers_only:  # all of it: in ours there are no layers
            B, _, height, width = inputs[0][module.merge.level].shape
            positions, block, tokens = height * width, module.block, module.learned.shape[1]
            projections = 2 * tokens + 2 * (tokens + positions)  # query and result, keys and values
            mlp = tokens * (block.mlp.fc1.weight.numel() + block.mlp.fc2.weight.numel())
            return B * (module.merge.weight.numel() * positions + projections * block.q.weight.numel() + mlp)
        case layers.MultiTokenPool():
            return _of_pool(module, convention, inputs[0])
        case layers.PoolNeck():  # its pool, too, is called by parts
            return _of_pool(module.pool, convention, inputs[1])
        case PooledModel() if module.pooled and isinstance(module.head, layers.MultiTokenPool):
            images, pyramid = inputs[0], module.pyramid  # its pool is called by parts there and seen by no hook
            shapes = zip(pyramid.channels, pyramid.sizes, strict=True)
            maps = [images.new_empty(images.shape[0], channels, *size) for channels, size in shapes]
            if tuple(images.shape[-2:]) != pyramid.image_size:
                maps = pyramid(module.backbone, images)
            return _of_pool(module.head, convention, maps)
    return 0


def _of_pool(module: layers.MultiTokenPool, convention: Convention, maps: Sequence[Tensor]) -> int:
    """Maps at one grid, keys and values for all, every token asks; if layers alone count, all of it: ours are none."""
    at = module.level if module.level > 0 else -1
    B, grid = maps[at].shape[0], maps[at].shape[-2:]
    positions, made = grid[0] * grid[1], module.tokens + module.distill_tokens
    Q = made + module.mean_token
    keys, block = Q + positions, cast(layers.GroupClassAttention, module.blocks[0])
    G, D, A, H = module.groups, module.dim, block.q.out_features, block.heads
    mixing = 0 if block.mix_before is None else H * H
    mlp = block.mlp.fc1.weight.numel() + block.mlp.fc2.weight.numel()
    each = G * (2 * Q * D * A + 2 * keys * D * A + 2 * mixing * Q * keys) + Q * mlp
    if convention.layers_only:
        merge = 0 if module.merge is None else module.merge.weight.numel() * positions
        gram = 0 if module.gram is None else module.gram.reduce.numel() * positions + module.gram.embed.numel()
        used = [module.average_classifier] if module.light else [module.classifier, module.distill_classifier]
        classifiers = sum(c.fc.weight.numel() for c in used if c is not None and c.fc is not None)
        return B * (merge + gram + len(module.blocks) * each + classifiers)
    extra = 0
    for q in [Q] * (len(module.blocks) - 1) + [1 if module.light else made]:
        ours = G * q * (4 * D * A + 2 * H * D * keys + mixing * (D + keys)) + q * mlp
        once = G * D * A if isinstance(block.norm1, GroupLayerNorm) else 0  # the norm's shift, seen by the values
        extra += B * (each + 2 * G * Q * keys * A - ours) - once
    if module.level > 0:
        growing = [x for x in maps if grows(x.shape[-2:], grid)]
        extra += sum(B * D * x.shape[1] * (positions - x.shape[2] * x.shape[3]) for x in growing)
    return extra
