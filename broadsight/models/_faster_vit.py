"""The backbone of MAP's FasterViT-3, of NVIDIA's package `fastervit`, which is imported when one is built."""

import importlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import check_choice
from ..inspection.meta_pass import as_pair
from ..layers.checks import check_images
from ._backbone import feature_take_indices

MISSING = "FasterViT needs the package fastervit, whose licence, NVIDIA's, is non-commercial"
INSTALL = 'pip install "broadsight[fastervit]" or pip install fastervit'
# FasterViT-3, by the names of the package.
SHAPE: dict[str, Any] = dict(dim=128, in_dim=64, depths=(3, 3, 12, 5), num_heads=(2, 4, 8, 16), ct_size=2)
FIXED: dict[str, Any] = dict(mlp_ratio=4, layer_scale=1e-5, do_propagation=True, drop_path_rate=0.0)


class MissingPackageError(ImportError, ValueError):
    """A package that we do not install ourselves is not there; the user can mend it."""


def package() -> Any:
    """The module of `fastervit` with the model. Importing it registers faster_vit_*_224 and more with timm."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it imports timm by former paths
            return importlib.import_module("fastervit.models.faster_vit")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "fastervit":
            raise MissingPackageError(f"{MISSING}; {INSTALL}") from None
        raise ImportError(f"the installed fastervit cannot be imported: {error}") from error


def packaged(num_classes: int, window: int = 7, **changes: Any) -> nn.Module:
    """The package's own model: FasterViT-3, or of another shape."""
    made = package().FasterViT
    with _RatesOnCpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.meshgrid", UserWarning)
        return made(num_classes=num_classes, window_size=(window,) * 4, **(SHAPE | FIXED | changes))


class FasterViT(nn.Module):
    """The package's layers under their names, up to the last map (B, 8 dim, H/32, W/32), without norm and classifier.

    Its maps are those of the patch embedding and, after its down-sampling, of each level: at strides 4, 8, 16, 32, 32.

    Args:
        img_size: Side of the images, or (H, W), which are equal: a multiple of 32 windows.
        window: Side of a window of attention, in positions of a map.
        dim, in_dim: Channels of the first map, and of the layer before it.
        ct_size: Side of the square of carrier tokens of a window.
    """

    def __init__(
        self,
        in_chans: int = 3,
        *,
        img_size: int | Sequence[int] = 224,
        window: int = 7,
        dim: int = SHAPE["dim"],
        in_dim: int = SHAPE["in_dim"],
        depths: Sequence[int] = SHAPE["depths"],
        num_heads: Sequence[int] = SHAPE["num_heads"],
        ct_size: int = SHAPE["ct_size"],
        drop_path_rate: float = 0.0,
    ):
        super().__init__()
        package()  # what is missing is said first
        self.img_size, self.in_chans, self.grad_checkpointing = as_pair(img_size), in_chans, False
        height, width = self.img_size
        if height != width or height < 1 or height % (32 * window):
            expected = f"expected a square with a side that is a multiple of {32 * window}"
            raise ValueError(f"img_size={height}x{width} for FasterViT; {expected}")
        shape = dict(dim=dim, in_dim=in_dim, depths=depths, num_heads=num_heads, ct_size=ct_size)
        given = dict(in_chans=in_chans, drop_path_rate=drop_path_rate, resolution=height)
        model: Any = packaged(0, window, **given, **shape)
        self.patch_embed, self.levels = model.patch_embed, model.levels
        for name, module in list(self.named_modules()):
            if hasattr(module, "to_global_feature"):
                del module.pos_embed  # a second name of a layer in there, which safetensors would refuse
            if hasattr(module, "relative_bias"):  # it would keep tensors of its last pass in its state
                relative = hasattr(module, "relative_position_index")
                self.set_submodule(name, RelativeBias(module) if relative else PositionCode(module))
        names = ["patch_embed", *(f"levels.{i}" for i in range(4))]
        places = zip(names, (1, 2, 4, 8, 8), (4, 8, 16, 32, 32), strict=True)
        self.feature_info = [dict(num_chs=n * dim, reduction=r, module=name) for name, n, r in places]

    def forward_intermediates(
        self, x: Tensor, indices: Any = None, norm=False, stop_early=False, output_fmt="NCHW", intermediates_only=False
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps of images (B, in_chans, H, W) by timm's arguments, of which `norm` has no effect, and the last one."""
        check_choice("output_fmt", output_fmt, ("NCHW", "NHWC"))
        check_images(x, self.in_chans)
        if tuple(x.shape[2:]) != self.img_size:
            came, built = ("x".join(map(str, size)) for size in (x.shape[2:], self.img_size))
            raise ValueError(
                f"images are {came} pixels; this FasterViT was built for {built}; create it with another img_size"
            )
        take, last = feature_take_indices(len(self.levels) + 1, indices)
        x = self.patch_embed(x)
        maps = {0: x}
        for i, level in enumerate(self.levels[:last] if stop_early else self.levels, 1):
            x = maps[i] = checkpoint(level, x) if self.grad_checkpointing and self.training else level(x)
        taken = [maps[i] if output_fmt == "NCHW" else maps[i].permute(0, 2, 3, 1) for i in take]
        return taken if intermediates_only else (x, taken)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.forward_intermediates(x, indices=1)[0]

    forward = forward_features

    def prune_intermediate_layers(self, indices: Any = 1, prune_norm=False, prune_head=True) -> list[int]:
        """Drop the levels after the last map taken; returns the positions of those taken."""
        take, last = feature_take_indices(len(self.levels) + 1, indices)
        self.levels, self.feature_info = self.levels[:last], self.feature_info[: last + 1]
        return take

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        level = r"^levels\.(\d+)"
        fine = [
            (rf"{level}\.blocks\.(\d+)", None),
            (rf"{level}\.global_tokenizer", (0,)),
            (rf"{level}\.downs", (99998,)),
        ]
        return dict(stem=r"^patch_embed", blocks=level if coarse else fine)


class RelativeBias(nn.Module):
    """A bias on the scores of tokens in a window by how far they lie apart, from an MLP. (B, heads, N, N) -> the same.

    Tokens of the window are the last; carrier tokens before them get none.
    """

    def __init__(self, packaged: Any):
        super().__init__()
        self.cpb_mlp, self.side = packaged.cpb_mlp, packaged.window_size[0]
        self.cpb_mlp[1].inplace = False  # exported, what comes before is a constant, which nothing may overwrite

    def forward(self, scores: Tensor, count: int) -> Tensor:
        reach = 8 * _steps(1 - self.side, self.side, scores) / (self.side - 1)
        table = 16 * self.cpb_mlp(_grid(reach.sign() * (reach.abs() + 1).log2() / 3, scores)).sigmoid()
        steps = torch.arange(self.side, device=scores.device)
        offsets = steps[:, None] - steps + self.side - 1
        bias = table.unflatten(0, (2 * self.side - 1, -1))
        bias = bias[offsets[:, None, :, None], offsets[None, :, None]]  # h w h w heads
        bias = bias.flatten(2, 3).flatten(0, 1).permute(2, 0, 1)
        return scores + F.pad(bias, (scores.shape[-1] - count, 0) * 2)


class PositionCode(nn.Module):
    """Adds an MLP's code of where each token lies in its square, from -1 to 1 (B, N, C)."""

    def __init__(self, packaged: Any):
        super().__init__()
        self.cpb_mlp, self.side = packaged.cpb_mlp, math.isqrt(packaged.relative_bias.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        half = self.side // 2
        return x + self.cpb_mlp(_grid((_steps(0, self.side, x) - half) / half, x))


def _steps(first: int, end: int, like: Tensor) -> Tensor:
    return torch.arange(first, end, device=like.device, dtype=torch.float32)


def _grid(places: Tensor, like: Tensor) -> Tensor:
    """All pairs of places, row by row. (n,) -> (n², 2)."""
    return torch.cartesian_prod(places, places).to(like.dtype)


class _RatesOnCpu(TorchFunctionMode):
    """Lets the package read its drop path rates from a tensor when a model is built on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **((kwargs or {}) | ({"device": "cpu"} if func is torch.linspace else {})))
