"""The timm contract, written once; the only file that touches timm's less public parts."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import ClassifierHead, calculate_drop_path_rates
from timm.models import build_model_with_cfg, checkpoint_seq, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..errors import check_choice, did_you_mean
from ..layers.any_size import channels_last, pooled_next
from ..layers.buffers import restore_on_load
from ..layers.checks import check_images
from ..layers.folding import fold_norm
from ..layers.kernels.slices import in_slices
from ..surgery.description import EDITED

Sizes = Sequence[int]
Create = Callable[[str, bool, dict[str, Any]], nn.Module]
BUILDERS = tuple(inspect.signature(build_model_with_cfg).parameters)  # arguments of timm's builder, not of a model
ModelT = TypeVar("ModelT", bound=nn.Module)


class Stage(nn.Module):
    """Down-sampling, then blocks and a norm on (B, H', W', C'). (B, C, H, W) -> (B, C', H', W'), channels-last."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module], norm: nn.Module | None = None):
        super().__init__()
        self.grad_checkpointing = False
        self.downsample, self.blocks, self.norm = downsample, nn.Sequential(*blocks), norm or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x).permute(0, 2, 3, 1).contiguous()  # B H W C; a copy only if the map was not channels-last
        x = checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)
        return self.norm(x).permute(0, 3, 1, 2)


class ProjectedHead(ClassifierHead):
    """A classifier with a hidden layer at every position, or after the pool; pool_type and drop_rate as timm's head."""

    def __init__(
        self, in_features: int, num_classes: int, hidden: int, act=nn.GELU, bias=True, pool_first=False, **pooling: Any
    ):
        super().__init__(hidden, num_classes, **pooling)
        self.pool_first = pool_first
        self.proj, self.norm, self.act = nn.Linear(in_features, hidden, bias=bias), nn.BatchNorm2d(hidden), act()

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        pools = self.pool_first and not self.global_pool.is_identity()
        x = self.global_pool(x)[:, :, None, None] if pools else x
        x = pooled_next(self.act(self.norm(self.proj(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))))
        x = self.drop(x[:, :, 0, 0] if pools else self.global_pool(x))
        return self.flatten(x if pre_logits else self.fc(x))

    def reparameterize(self) -> None:
        fold_norm(self, "proj", "norm")


class StagedBackbone(nn.Module):
    """A hierarchical image model with the whole timm contract. Families supply the parts.

    Args:
        stem: (B, in_chans, H, W) -> (B, dims[0], H/4, W/4), sizes rounded up; its first convolution is `stem.conv1`.
        stages: Four stages at strides 4, 8, 16, 32.
        dims: Channels of each stage.
        norm: Applied to the last map before the head.
        head: Builds the classifier: a ClassifierHead from (num_classes, pool_type, drop_rate).
        feature_norms: Norms of the stage outputs for dense prediction; they touch nothing but `forward_intermediates`.
    """

    def __init__(
        self,
        stem: nn.Module,
        stages: Sequence[Stage],
        dims: Sizes,
        *,
        head: Callable[..., ClassifierHead] | None = None,
        norm: nn.Module | None = None,
        feature_norms: Sequence[nn.Module] = (),
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        **unknown: Any,
    ):
        super().__init__()
        if unknown:
            names = [*inspect.signature(type(self)).parameters, "num_classes", "in_chans", "global_pool", "drop_rate"]
            known = [name for name in dict.fromkeys(names) if name not in ("common", "unknown")]
            argument = next(iter(unknown))
            hint = f"{did_you_mean(argument, known)}it takes {', '.join(known)}"
            raise UnknownArgumentError(f"{type(self).__name__} has no argument {argument!r}; {hint}")
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.stem, self.stages, self.norm = stem, nn.Sequential(*stages), norm or nn.Identity()
        self.feature_norms = nn.ModuleList(feature_norms)
        build_head = head or partial(ClassifierHead, dims[-1])
        self.head = build_head(num_classes=num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.num_features, self.head_hidden_size = dims[-1], self.head.in_features
        info = (dict(num_chs=dim, reduction=4 * 2**i, module=f"stages.{i}") for i, dim in enumerate(dims))
        self.feature_info: list[dict[str, Any]] = list(info)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw every parameter and reset every buffer; what is drawn depends on torch's seed alone."""
        for module in self.modules():
            getattr(module, "reset_parameters", lambda: None)()
        for module in self.modules():
            self.init_module(module)
        self._init_classifier()

    def _init_classifier(self) -> None:
        if isinstance(self.head.fc, nn.Linear):
            nn.init.trunc_normal_(self.head.fc.weight, std=0.02)
            nn.init.zeros_(self.head.fc.bias)

    def init_module(self, module: nn.Module) -> None:
        """What a family draws otherwise than torch does by default."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch does, but a checkpoint that does not fit is refused in one line, before anything is loaded."""
        own = self.state_dict()
        bent = [key for key in own if key in state_dict and own[key].shape != state_dict[key].shape]
        shapes = f"{tuple(state_dict[bent[0]].shape)}, expected {tuple(own[bent[0]].shape)}" if bent else ""
        faults = {f"has shape {shapes}": bent}
        if strict:  # torch itself knows how to do without the counter of old BatchNorms
            needed = [key for key in own if not key.endswith("num_batches_tracked")]
            faults["is missing"] = [key for key in needed if key not in state_dict]
            faults["is unexpected"] = [key for key in state_dict if key not in own]
        if any(faults.values()):
            more = {fault: f" (and {len(keys) - 1} more)" if len(keys) > 1 else "" for fault, keys in faults.items()}
            said = "; ".join(f"{keys[0]!r}{more[fault]} {fault}" for fault, keys in faults.items() if keys)
            advice = "nothing was loaded; build the variant that it was saved from"
            raise RuntimeError(f"the checkpoint does not fit {type(self).__name__}: {said}; {advice}")
        return super().load_state_dict(state_dict, strict, assign)

    def adapt_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """What timm's loader passes a checkpoint through. The norms of a dense model are new where it has none."""
        own = self.state_dict()
        return {key: own[key] for key in own if key.startswith("feature_norms.")} | state_dict

    def no_weight_decay(self) -> set[str]:
        """The abstract tokens, where a family has some."""
        return {name for name, _ in self.named_parameters() if name.endswith("attn.token")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        stage, last = r"^stages\.(\d+)", (r"^norm|^feature_norms", (99999,))
        fine = [
            (rf"{stage}\.(?:downsample|cls_)", (0,)),
            (rf"{stage}\.blocks\.(\d+)", None),
            (rf"{stage}\.norm", (99998,)),
        ]
        return dict(stem=r"^stem", blocks=[*([(stage, None)] if coarse else fine), last])

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            cast(Stage, stage).grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for num_classes (0: none) and, if given, another pooling ("": none)."""
        self.num_classes, weight = num_classes, next(self.parameters())
        self.head.reset(num_classes, global_pool)
        self.head.to(weight.device, weight.dtype).train(self.training)
        self._init_classifier()

    def forward_intermediates(
        self, x: Tensor, indices: Any = None, norm=False, stop_early=False, output_fmt="NCHW", intermediates_only=False
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Stage outputs of images (B, in_chans, H, W), and the final features unless intermediates_only.

        Args:
            indices: Stages to take: the last n, or a sequence of positions; all if None.
            norm: Apply the final norm to the last stage's output.
            stop_early: Skip the stages after the last one taken; the final features are then that stage's.
            output_fmt: "NCHW" or "NHWC".
        """
        check_choice("output_fmt", output_fmt, ("NCHW", "NHWC"))
        take, last_taken = feature_take_indices(len(self.stages), indices)
        last = len(self.stages) - 1
        check_images(x, self.in_chans)
        sides = x.shape[2], x.shape[3]
        x = in_slices(self.stem, channels_last(x))
        features: dict[int, Tensor] = {}
        for i, stage in enumerate(self.stages[: last_taken + 1] if stop_early else self.stages):
            x = in_slices(stage, x)
            if i in take:
                features[i] = self.feature_norms[i](x) if len(self.feature_norms) else x
        if norm and last in features and not len(self.feature_norms):
            features[last] = self.norm(x)
        grids = [[-(-side // self.feature_info[i]["reduction"]) for side in sides] for i in take]
        maps = [self.as_map(features[i], grid) for i, grid in zip(take, grids, strict=True)]
        maps = maps if output_fmt == "NCHW" else [one.permute(0, 2, 3, 1) for one in maps]
        if intermediates_only:
            return maps
        return x if stop_early and last_taken < last else self.norm(x), maps

    def as_map(self, features: Tensor, grid: Sizes) -> Tensor:
        """What a stage gives as (B, C, *grid); a family whose stages give something else says how."""
        return features

    def prune_intermediate_layers(self, indices: Any = 1, prune_norm=False, prune_head=True) -> list[int]:
        """Drop what is not needed for the given stages; returns their positions."""
        take, last_taken = feature_take_indices(len(self.stages), indices)
        if prune_norm or last_taken < len(self.stages) - 1:  # it fits the last stage alone
            self.norm = nn.Identity()
        self.stages, self.feature_info = self.stages[: last_taken + 1], self.feature_info[: last_taken + 1]
        self.num_features = self.feature_info[-1]["num_chs"]
        norms = (norm if i in take else nn.Identity() for i, norm in enumerate(self.feature_norms))
        self.feature_norms = nn.ModuleList(norms)
        if prune_head:
            self.head = ClassifierHead(self.num_features, 0, pool_type="")
            self.num_classes, self.head_hidden_size = 0, self.num_features
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, num_features, H/32, W/32)."""
        check_images(x, self.in_chans)
        # The images are small beside the maps: one copy here, and none after it.
        x = in_slices(self.stem, channels_last(x))
        for stage in self.stages:
            x = in_slices(stage, x)
        return pooled_next(self.norm(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features -> logits (B, num_classes), or pooled features (B, head_hidden_size) before the classifier."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class ConvStem(nn.Module):
    """Convolutions, each followed by a norm, with GELU between them. (B, in_chans, H, W) -> (B, C, H/4, W/4)."""

    def __init__(self, *layers: tuple[nn.Conv2d, nn.Module]):
        super().__init__()
        for i, (conv, norm) in enumerate(layers, 1):
            self.add_module(f"conv{i}", conv)
            self.add_module(f"norm{i}", norm)
        self.act, self.count = nn.GELU(), len(layers)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.count + 1):
            x = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x if i == 1 else self.act(x)))
        return x

    def reparameterize(self) -> None:
        """Fold every BatchNorm into its convolution, for inference; a LayerNorm stays."""
        for i in range(1, self.count + 1):
            fold_norm(self, f"conv{i}", f"norm{i}")


class ConvNorm(nn.Module):
    """A 3x3 convolution of stride 2 and a norm: how most families shrink the map. (B, C, H, W) -> (B, C', H/2, W/2)."""

    def __init__(self, in_dim: int, dim: int, norm: nn.Module, *, bias: bool = True):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_dim, dim, 3, stride=2, padding=1, bias=bias), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))

    def reparameterize(self) -> None:
        fold_norm(self, "conv", "norm")


def drops(drop_path: nn.Module) -> bool:
    """Whether branches are dropped now; if not, a layer may add its result to the residual itself, at no cost."""
    return drop_path.training and not isinstance(drop_path, nn.Identity)


def build(
    make: Callable[..., ModelT], name: str, pretrained: bool, arch: Mapping[str, Any], kwargs: dict[str, Any]
) -> ModelT:
    """Call timm's builder for make(**arch, **kwargs), as every entry point does; device and dtype are handled here."""
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    kwargs.setdefault("feature_cfg", dict(out_indices=(0, 1, 2, 3), feature_cls="getter"))
    kwargs.setdefault("pretrained_filter_fn", lambda state_dict, model: model.adapt_checkpoint(state_dict))
    if kwargs.get("features_only") and "feature_norms" in inspect.signature(make).parameters:
        kwargs.setdefault("feature_norms", True)
    with nullcontext() if device is None else torch.device(device):
        model: Any = build_model_with_cfg(cast(Any, make), name, pretrained, **{**arch, **kwargs})
    if name != EDITED:  # of a registered model the name is the description, not how it is put together
        model._model_args = {key: value for key, value in kwargs.items() if key not in BUILDERS}
        if "img_size" not in kwargs:  # what is inside was made for one, and for any other: saved, it would be for one
            model._traits = {**getattr(model, "_traits", {}), "img_size": None}
    restore_on_load(model)
    return model if dtype is None else model.to(dtype=dtype)


def register(module: str, names: Iterable[str], create: Create) -> Callable[[str], Callable[..., nn.Module]]:
    """Register create(name, pretrained, keywords) with timm for each name that the module's `default_cfgs` describe.

    Gives the module's `__getattr__`, so that the entry points are also functions of the module.
    """
    found: dict[str, Callable[..., nn.Module]] = {}
    for name in names:

        def entry(pretrained: bool = False, *, _name: str = name, **kwargs: Any) -> nn.Module:
            return create(_name, pretrained, kwargs)

        entry.__name__, entry.__qualname__, entry.__module__ = name, name, module
        found[name] = register_model(entry)

    def find(name: str) -> Callable[..., nn.Module]:
        if name not in found:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return found[name]

    return find


def register_class(module: str, cls: type[nn.Module], architectures: Mapping[str, dict[str, Any]]) -> Any:
    """Register models of one class, which differ in what it is built with; see `register`."""

    def create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
        return build(cls, name, pretrained, architectures[name], kwargs)

    return register(module, architectures, create)


def cfg(**overrides: Any) -> dict[str, Any]:
    """timm's description of an ImageNet model of ours; weights are loaded from a file the user names."""
    images = dict(input_size=(3, 224, 224), crop_pct=0.9, interpolation="bicubic")
    colours = dict(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    layers = dict(num_classes=1000, pool_size=(7, 7), first_conv="stem.conv1", classifier="head.fc")
    return {**images, **colours, **layers, "url": "", "license": "apache-2.0", **overrides}


def make_stages(
    depths: Sizes,
    drop_path_rate: float,
    *,
    block: Callable[[int, float], nn.Module],
    downsample: Callable[[int], nn.Module],
    norm: Callable[[int], nn.Module | None] = lambda i: None,
    **per_stage: Sequence,
) -> list[Stage]:
    """Four stages: downsample(stage) but in the first, block(stage, rate) with rates that grow linearly, norm(stage).

    `per_stage` are the family's arguments that must have an entry for each stage, as `depths` has.
    """
    for argument, values in dict(depths=depths, **per_stage).items():
        if len(values) != 4:
            raise ValueError(f"{argument}={tuple(values)} has {len(values)} entries; expected 4, one for each stage")
    rates = iter(cast(list[float], calculate_drop_path_rates(drop_path_rate, sum(depths))))
    return [
        Stage(downsample(i) if i else nn.Identity(), [block(i, next(rates)) for _ in range(depth)], norm(i))
        for i, depth in enumerate(depths)
    ]


class UnknownArgumentError(TypeError, ValueError):
    """A constructor got an argument that it does not know; both a wrong call and a wrong value."""
