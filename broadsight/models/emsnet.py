"""EMSNet: efficient multi-scale interaction (thesis on efficient vision backbones, chapter 3).

The text and the tables do not pin every layer; how this reading was found and where it departs: docs/models.md.
"""

from typing import Any

from timm.layers import DropPath
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from ..layers import ChannelMlp, MultiScaleInteraction
from ..layers.folding import as_built, fold_norm
from ._backbone import ConvNorm, Sizes, StagedBackbone, build, cfg, make_stages, same_length

__all__ = ["EMSNet"]


class EMSNet(StagedBackbone):
    """Four stages of multi-scale interaction; features at strides 4, 8, 16, 32. No layer but the classifier has a bias.

    Args:
        dims, depths: Channels (multiples of 8) and blocks of each stage.
        mlp_ratios: Hidden over outer channels of each stage's MLPs.
        mixer, ratios, whiten: The variant of the token mixer; see MultiScaleInteraction.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0 at the first.
        common: num_classes, in_chans, global_pool, drop_rate; anything else is refused.
    """

    def __init__(
        self,
        dims: Sizes,
        depths: Sizes,
        mlp_ratios: Sizes = (8, 8, 4, 4),
        mixer: str = "full",
        ratios: tuple[int, int, int] = (1, 2, 1),
        whiten: str = "channel",
        drop_path_rate: float = 0.0,
        in_chans: int = 3,
        **common,
    ):
        same_length(dims=dims, depths=depths, mlp_ratios=mlp_ratios)

        def block(i: int, drop_path: float) -> EMSBlock:
            interaction = MultiScaleInteraction(dims[i], mixer, ratios, whiten)
            return EMSBlock(interaction, dims[i], dims[i] * mlp_ratios[i], drop_path)

        stages = make_stages(
            depths,
            drop_path_rate,
            block=block,
            downsample=lambda i: ConvNorm(dims[i - 1], dims[i], nn.BatchNorm2d(dims[i]), bias=False),
        )
        norm = nn.BatchNorm2d(dims[-1])
        super().__init__(Stem(in_chans, dims[0]), stages, dims, norm=norm, in_chans=in_chans, **common)

    def init_module(self, module: nn.Module) -> None:
        # The mixer is a chain of linear maps without norms: unit gain, or the gradient of its first layers vanishes.
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)


class EMSBlock(nn.Module):
    """Multi-scale interaction, then a channel MLP, each residual after a BatchNorm. (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self, mixer: nn.Module, dim: int, hidden: int, drop_path: float = 0.0):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(dim)
        self.mixer: nn.Module = mixer
        self.norm2 = nn.BatchNorm2d(dim)
        self.mlp = ChannelMlp(dim, hidden, bias=False)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.dropped = drop_path > 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mixer(self.norm1(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
        normed = self.norm2(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        if self.dropped and self.training:
            return x + self.drop_path(self.mlp(normed))
        return self.mlp(normed, x)

    def reparameterize(self) -> None:
        """For inference: both norms into the linear layers that follow them, and the mixer's chains multiplied out."""
        if isinstance(self.mixer, MultiScaleInteraction) and as_built(self.mixer):
            fold_norm(self, "norm1", "mixer.in_proj")
            self.mixer = self.mixer.folded()
        fold_norm(self, "norm2", "mlp.fc1")


class Stem(nn.Module):
    """Two 3x3 convolutions of stride 2, each with BatchNorm. (B, 3, H, W) -> (B, C, H/4, W/4)."""

    def __init__(self, in_chans: int, dim: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, dim, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(dim)
        self.act = nn.GELU()
        self.conv2 = nn.Conv2d(dim, dim, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))

    def reparameterize(self) -> None:
        for i in (1, 2):
            fold_norm(self, f"conv{i}", f"norm{i}")


default_cfgs = generate_default_cfgs(dict.fromkeys(("emsnet_xxtiny", "emsnet_xtiny", "emsnet_tiny"), cfg()))


@register_model
def emsnet_xxtiny(pretrained: bool = False, **kwargs: Any) -> EMSNet:
    arch = dict(dims=(32, 64, 128, 192), depths=(2, 2, 4, 2), mlp_ratios=(8, 8, 4, 4))
    return build(EMSNet, "emsnet_xxtiny", pretrained, arch, kwargs)


@register_model
def emsnet_xtiny(pretrained: bool = False, **kwargs: Any) -> EMSNet:
    arch = dict(dims=(32, 64, 96, 128), depths=(3, 3, 10, 2), mlp_ratios=(8, 8, 4, 4))
    return build(EMSNet, "emsnet_xtiny", pretrained, arch, kwargs)


@register_model
def emsnet_tiny(pretrained: bool = False, **kwargs: Any) -> EMSNet:
    arch = dict(dims=(64, 96, 128, 256), depths=(3, 3, 10, 2), mlp_ratios=(8, 8, 4, 4))
    return build(EMSNet, "emsnet_tiny", pretrained, arch, kwargs)
