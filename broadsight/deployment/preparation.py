"""What a model goes through before it is captured: all that inference allows, nothing that changes its answers."""

from copy import deepcopy
from typing import Any

from torch import nn

from ..surgery.fusion import fuse
from .lowering import lower


def prepare(model: nn.Module, size: tuple[int, int] | None = None) -> nn.Module:
    """A copy for exporters and other runtimes: in eval mode, folded as far as it can be, in plain operations.

    `capture` makes a program of it, with batch and image size left open if asked; plain torch.export cannot prove all
    conditions on open sizes. Its outputs are equal up to rounding; the given model does not change.

    Args:
        size: (height, width) of images if they all have the same. Positions that a model would resample for every
            image are then resampled here, once; few runtimes know how.

    timm's fused attention is taken apart into its products: exporters take it apart as well, but then choke on views of
    what it gave, and runtimes know the plain form by sight.
    """
    try:
        made = fuse(model)
    except ValueError:  # it would lose its context broadcasting: slower is better than wrong
        made = deepcopy(model).eval().requires_grad_(False)
    lower(made)
    for module in made.modules():
        part: Any = module
        if getattr(part, "fused_attn", False) is True:
            part.fused_attn = False
        if size is not None and getattr(part, "dynamic_img_size", False) is True and hasattr(part, "set_input_size"):
            part.set_input_size(img_size=_whole_patches(size, getattr(part, "patch_embed", None)))
    return made


def _whole_patches(size: tuple[int, int], embed: Any) -> tuple[int, int]:
    """The size of images once they are padded, where the model pads them to whole patches."""
    if not getattr(embed, "dynamic_img_pad", False):
        return size
    height, width = (-(-side // patch) * patch for side, patch in zip(size, embed.patch_size, strict=True))
    return height, width


def why_one_size(model: nn.Module) -> str:
    """Why an exported model takes images of one size only; empty if it takes any."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    resamples = any(getattr(module, "dynamic_img_size", False) is True for module in model.modules())
    if config.get("fixed_input_size") or resamples:
        return "its positions or windows are made for it; --size exports it for another"
    return ""
