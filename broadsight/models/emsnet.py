"""EMSNet: efficient multi-scale interaction (thesis on efficient vision backbones, chapter 3). See docs/models.md."""

from typing import Any

from timm.layers import DropPath
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from ..layers import ChannelMlp, MultiScaleInteraction
from ..layers.folding import fold_norm
from ..layers.kernels.dispatch import hooked
from ._backbone import ConvNorm, ConvStem, Sizes, StagedBackbone, cfg, drops, make_stages, register_class


class EMSNet(StagedBackbone):
    """Four stages of multi-scale interaction; features at strides 4, 8, 16, 32. No layer but the classifier has a bias.

    Args:
        dims, depths, mlp_ratios: Channels (multiples of 8), blocks, and hidden over outer channels of each stage's MLP.
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
        def block(i: int, drop_path: float) -> EMSBlock:
            interaction = MultiScaleInteraction(dims[i], mixer, ratios, whiten)
            return EMSBlock(interaction, dims[i], dims[i] * mlp_ratios[i], drop_path)

        def downsample(i: int) -> ConvNorm:
            return ConvNorm(dims[i - 1], dims[i], nn.BatchNorm2d(dims[i]), bias=False)

        per_stage: dict[str, Any] = dict(dims=dims, mlp_ratios=mlp_ratios)
        stages = make_stages(depths, drop_path_rate, block=block, downsample=downsample, **per_stage)
        convs = [nn.Conv2d(width, dims[0], 3, stride=2, padding=1, bias=False) for width in (in_chans, dims[0])]
        stem = ConvStem(*((conv, nn.BatchNorm2d(dims[0])) for conv in convs))
        super().__init__(stem, stages, dims, norm=nn.BatchNorm2d(dims[-1]), in_chans=in_chans, **common)

    def init_module(self, module: nn.Module) -> None:
        # The mixer is a chain of linear maps without norms: unit gain, or the gradient of its first layers vanishes.
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)


class EMSBlock(nn.Module):
    """Multi-scale interaction, then a channel MLP, each residual after a BatchNorm. (B, H, W, C) -> (B, H, W, C)."""

    def __init__(self, mixer: nn.Module, dim: int, hidden: int, drop_path: float = 0.0):
        super().__init__()
        self.norm1, self.mixer = nn.BatchNorm2d(dim), mixer
        self.norm2, self.mlp = nn.BatchNorm2d(dim), ChannelMlp(dim, hidden, bias=False)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mixer(self.norm1(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
        normed = self.norm2(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.drop_path(self.mlp(normed)) if drops(self.drop_path) else self.mlp(normed, x)

    def reparameterize(self) -> None:
        """For inference: both norms into the linear layers that follow them, and the mixer's chains multiplied out."""
        if isinstance(self.mixer, MultiScaleInteraction) and not any(map(hooked, self.mixer.modules())):
            fold_norm(self, "norm1", "mixer.in_proj")
            self.mixer = self.mixer.folded()
        fold_norm(self, "norm2", "mlp.fc1")


_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "emsnet_xxtiny": dict(dims=(32, 64, 128, 192), depths=(2, 2, 4, 2)),
    # The printed widths (32, 64, 96, 128) give 2.3 M parameters, not 3.0 M; see docs/models.md for these.
    "emsnet_xtiny": dict(dims=(32, 64, 112, 160), depths=(3, 3, 10, 2)),
    "emsnet_tiny": dict(dims=(64, 96, 128, 256), depths=(3, 3, 10, 2)),
}
default_cfgs = generate_default_cfgs(dict.fromkeys(_ARCHITECTURES, cfg()))
__getattr__ = register_class(__name__, EMSNet, _ARCHITECTURES)
