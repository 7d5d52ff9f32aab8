"""Where a self-supervised ViT looks (DINO, Caron et al., ICCV 2021): attention of its class token in the last block."""

from pathlib import Path
from typing import Any

import timm
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ..data.loading import Batch
from ..data.normalising import Normalise
from ..errors import first_line
from ..inspection.attention import watch_attention
from ..inspection.attention_rows import Rows
from ..inspection.meta_pass import as_pair, in_eval_mode
from ..weights.loading import load_given

NAME = "vit_small_patch16_224.dino"


class Dino:
    """Saliency of a model that has never seen a label, the same for all that are compared by it.

    Class-token attention of the last block, mean over heads, brought to the images' size (bilinear). The images'
    bytes are normalised for this model, at their own size, or rounded up to whole patches.

    Args:
        model: A timm name of a ViT with a class token, or such a model, which is used as it is.
        checkpoint: A file of its weights instead of timm's, without a classifier.
    """

    def __init__(self, model: str | nn.Module = NAME, *, checkpoint: str | Path | None = None):
        self.model: Any = _created(model, checkpoint) if isinstance(model, str) else model
        name = model if isinstance(model, str) else type(model).__name__
        if getattr(self.model, "cls_token", None) is None or not hasattr(self.model, "blocks"):
            raise ValueError(f"{name} has no class token in blocks of attention; give a ViT, such as {NAME}")
        self.about = f"class-token attention of {name}"

    def __call__(self, images: Tensor, batch: Batch) -> Tensor:
        """Images (B, C, H, W) -> (B, H, W), 0 to 1."""
        weights = self.attention(batch.images.to(images.device)).mean(1, keepdim=True)  # B 1 h w
        return F.interpolate(weights, images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]

    def attention(self, photos: Tensor) -> Tensor:
        """Bytes (B, 1 or 3, H, W) -> weights of the class token for each patch (B, heads, h, w)."""
        self.model.to(photos.device)
        config = resolve_model_data_config(self.model)
        images = Normalise(config["mean"], config["std"], photos.device)(photos.expand(-1, 3, -1, -1))
        patch = as_pair(self.model.patch_embed.patch_size)
        grid = [-(-side // step) for side, step in zip(images.shape[-2:], patch, strict=True)]
        size = [cells * step for cells, step in zip(grid, patch, strict=True)]
        if size != list(images.shape[-2:]):
            images = F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True)
        found: list[Tensor] = []

        def keep(name: str, rows: Rows, _: nn.Module) -> None:
            found[:] = [rows.weights(slice(0, 1))[..., 0, :]]  # B heads N, of the latest attention

        with in_eval_mode(self.model), watch_attention(self.model, keep):
            self.model.forward_features(images)
        if not found:
            raise ValueError(f"{type(self.model).__name__} shows no attention of its last block; give another ViT")
        return found[0][..., -grid[0] * grid[1] :].unflatten(-1, (grid[0], grid[1]))  # without other tokens


def _created(name: str, checkpoint: str | Path | None) -> nn.Module:
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(f"{name!r} is no model of timm's; give a ViT, such as {NAME}")
    if checkpoint is not None and not Path(checkpoint).exists():  # said before a model is made in vain
        raise FileNotFoundError(f"{checkpoint} is not a file; give one of the weights of {name}")
    try:
        model = timm.create_model(name, pretrained=checkpoint is None, num_classes=0, dynamic_img_size=True)
    except TypeError as error:
        raise ValueError(f"{name} cannot be made: {first_line(error)}; give a ViT, such as {NAME}") from None
    except Exception as error:
        what = f"the weights of {name} cannot be had: {first_line(error)}"
        raise RuntimeError(f"{what}; give a file of them, or another saliency") from None
    if checkpoint is not None:
        load_given(model, checkpoint)
    return model.requires_grad_(False)
