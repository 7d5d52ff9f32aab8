"""What a benchmark runs: models, under another pooling or with context broadcast, or pools alone, ready to call."""

import importlib.util
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .broadcasting import add_context_broadcast
from .layers import GroupLogits, MultiTokenPool
from .layers.context_broadcast import KINDS
from .pooling import POOLS, PooledModel, create_backbone, swap_pool

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AGREEMENT = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}  # of outputs, relative to the largest
CLASSES = 1000


def _eager(model: nn.Module, example: tuple[Tensor, ...]) -> Callable[..., Any]:
    return model


def _compile(model: nn.Module, example: tuple[Tensor, ...]) -> Callable[..., Any]:
    # dynamic=False: having seen another shape first, torch would otherwise time slower shape-generic kernels
    return torch.compile(model, dynamic=False)


# name -> function(model, its arguments) returning what is called with such arguments in place of the model
RUNTIMES: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Callable[..., Any]]] = {
    "eager": _eager,
    "compile": _compile,
}


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often.

    Args:
        batch: Images per call.
        size: Height and width of an image in pixels; a single number is a square.
        threads: Threads of torch's operators; the previous number is restored afterwards.
        rounds: Calls of each contender that count.
        warmup: Calls of each contender beforehand that do not.
        runtimes: Keys of RUNTIMES; every model becomes one contender per runtime.
        train: Time zero_grad + forward + loss + backward in train mode, not a forward pass in eval mode. The loss is
            cross-entropy, or where a pool has groups of tokens MultiTokenLoss("bce") of these.
        device: `cpu` or `cuda` (also `cuda:1`).
        dtype: Key of DTYPES; weights and images are cast to it, no autocast.
        channels_last: Keep weights and images in channels-last memory format.
        fuse: Run `broadsight.fuse` on every model first; inference only.
        seed: Of weights, images and labels.
        pools: Of `swap_pool`; every model becomes one contender per pool.
        broadcasts: Kinds of `add_context_broadcast`, or "none"; every model becomes one contender per kind.
        head_only: Time the pool alone, on random feature maps of the shapes and memory formats that the backbone gives;
            a training step then ends with the maps' gradients. Needs `pools`, or models that come with a pool of ours.
        light: Run `lighten` on every model first; inference only.
        against: Python file with a class PerGroupPool, which has MultiTokenPool's arguments and the released names of
            parameters. Every pool is then compared with that class on the same weights, and must agree with it.
    """

    batch: int = 8
    size: tuple[int, int] = (224, 224)
    threads: int = 1
    rounds: int = 9
    warmup: int = 2
    runtimes: tuple[str, ...] = ("eager",)
    train: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    channels_last: bool = False
    fuse: bool = False
    seed: int = 0
    pools: tuple[str, ...] = ()
    broadcasts: tuple[str, ...] = ()
    head_only: bool = False
    light: bool = False
    against: str | None = None

    def __post_init__(self) -> None:
        size = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "runtimes", tuple(self.runtimes))
        object.__setattr__(self, "pools", tuple(self.pools))
        object.__setattr__(self, "broadcasts", tuple(self.broadcasts))
        for name, least in {"batch": 1, "threads": 1, "rounds": 1, "warmup": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; expected {least} or more")
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"size={size}; expected two positive numbers, height and width in pixels")
        for runtime in self.runtimes:
            _choose("runtime", runtime, RUNTIMES)
        if not self.runtimes:
            raise ValueError(f"runtimes is empty; expected some of {', '.join(RUNTIMES)}")
        for pool in self.pools:
            _choose("pool", pool, POOLS)
        for kind in self.broadcasts:
            _choose("broadcast", kind, ("none", *KINDS))
        _choose("dtype", self.dtype, DTYPES)
        kind = _choose("device", self.device.partition(":")[0], ("cpu", "cuda"))
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}, but torch finds no CUDA device here; use device='cpu'")
        if self.fuse and self.train:
            raise ValueError("fuse=True with train=True; fusing is for inference, drop one of the two")
        if self.train and (self.light or "map-light" in self.pools):
            raise ValueError("a light pool with train=True; its classifiers are trained in the full one: drop one")
        if self.against is not None and not self.head_only:
            raise ValueError(
                "against a file without head_only; only pools are compared so: add head_only (--head-only)"
            )


@dataclass(frozen=True)
class Contender:
    """Something to be timed.

    Args:
        macs: Multiply-accumulates that one image's forward pass executes.
        forward: A forward pass, in training with its loss.
        call: What is timed.
    """

    name: str
    runtime: str
    model: nn.Module
    macs: int
    forward: Callable[[], Tensor]
    call: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.name} ({self.runtime})"


class PoolOfMaps(nn.Module):
    """A pool that takes its maps one by one: as a model, whose arguments are tensors."""

    def __init__(self, pool: nn.Module):
        super().__init__()
        self.pool: Any = pool

    def forward(self, *maps: Tensor, groups: bool = False) -> Any:
        return GroupLogits(*self.pool.forward_groups(maps)) if groups else self.pool(maps)


@dataclass(frozen=True)
class Variant:
    """A timm model, and what is changed in it."""

    name: str
    pool: str | None = None
    broadcast: str = "none"

    def __str__(self) -> str:
        changes = [self.pool, None if self.broadcast == "none" else f"{self.broadcast} broadcast"]
        return " + ".join([self.name, *(change for change in changes if change)])


def variants(names: Sequence[str], settings: Settings) -> list[Variant]:
    """Every model with every pool and every broadcast of the settings."""
    return [
        Variant(name, pool, broadcast)
        for name in names
        for pool in settings.pools or (None,)
        for broadcast in settings.broadcasts or ("none",)
    ]


def build(variant: Variant, settings: Settings, rival: type[nn.Module] | None = None) -> list[Contender]:
    """A model under every runtime; after the rival's form of its pool, with the same weights, if there is one."""
    title = str(variant)
    model = _create(variant, settings)
    place: dict[str, Any] = {"device": settings.device, "dtype": DTYPES[settings.dtype]}
    memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
    with blame(title, "being prepared"):
        torch.manual_seed(settings.seed)
        shape = settings.batch, model.pretrained_cfg["input_size"][0], *settings.size
        inputs = [torch.randn(shape).to(memory_format=memory_format)]
        labels = torch.randint(CLASSES, (settings.batch,)).to(settings.device)
        grouped = isinstance(model, PooledModel) and model.has_groups
        forms: dict[str, nn.Module] = {title: model.eval()}
        if settings.head_only:
            inputs = _feature_maps(cast(PooledModel, model), inputs[0])
            forms = {title: PoolOfMaps(model.head).eval()}
            if rival is not None:
                theirs = _rebuilt(model.head, rival)
                forms = {f"{title}, {Path(settings.against or '').stem}": PoolOfMaps(theirs).eval(), **forms}
        if settings.fuse:
            from .fusion import fuse

            forms = {name: fuse(form) for name, form in forms.items()}
        macs = [_macs(form, inputs) for form in forms.values()]
        inputs = tuple(x.to(**place) for x in inputs)
        forms = {name: form.to(**place, memory_format=memory_format) for name, form in forms.items()}
        if rival is not None:
            _check_agreement(*forms.values(), inputs, settings)
        for x in inputs:
            x.requires_grad_(settings.head_only and settings.train)
        return [
            _contender(form_name, runtime, form.train(settings.train), work, inputs, labels, grouped)
            for (form_name, form), work in zip(forms.items(), macs, strict=True)
            for runtime in settings.runtimes
        ]


def load_rival(path: str) -> type[nn.Module]:
    """The class PerGroupPool of a Python file, which is executed."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; expected a Python file that defines the class PerGroupPool")
    spec = importlib.util.spec_from_file_location(f"rival_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file; expected one that defines the class PerGroupPool")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {_first_line(error)}") from error
    found = getattr(module, "PerGroupPool", None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"{path} defines no module class PerGroupPool; expected one with MultiTokenPool's arguments")
    return found


def _contender(
    name: str,
    runtime: str,
    model: nn.Module,
    macs: int,
    inputs: tuple[Tensor, ...],
    labels: Tensor,
    grouped: bool,
) -> Contender:
    from .losses import MultiTokenLoss

    run = RUNTIMES[runtime](model, inputs)
    loss = MultiTokenLoss("bce")

    def forward() -> Tensor:
        if not model.training:
            return run(*inputs)
        return loss(run(*inputs, groups=True), labels) if grouped else F.cross_entropy(run(*inputs).float(), labels)

    def train() -> None:
        model.zero_grad(set_to_none=True)
        for x in inputs:
            x.grad = None
        forward().backward()

    @torch.inference_mode()
    def infer() -> None:
        forward()

    return Contender(name, runtime, model, macs, forward, train if model.training else infer)


def _create(variant: Variant, settings: Settings) -> Any:
    """The model with seeded random weights, built for the size if it is tied to one; refuses what the settings cannot
    be applied to."""
    name, pool = variant.name, variant.pool
    cfg = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    tied = cfg is not None and cfg.fixed_input_size and tuple(cfg.input_size[1:]) != settings.size
    height, width = settings.size
    side = height if height == width else (height, width)  # a few models take a single number only
    options: dict[str, Any] = {"img_size": side} if tied else {}
    if pool is not None and isinstance(_without_weights(name), PooledModel):
        raise ValueError(f"{name} has its own pool; name a plain backbone beside pools (--pool), or drop the pools")
    torch.manual_seed(settings.seed)
    try:
        create = timm.create_model if pool is None else create_backbone
        model: Any = create(name, num_classes=CLASSES, **options)
    except Exception as error:
        if tied and cfg is not None:
            needed = "x".join(map(str, cfg.input_size[1:]))
            raise ValueError(
                f"{name} cannot be built for {height}x{width}; it is made for {needed}, use that size"
            ) from error
        with blame(name, "being built"):
            raise
    if pool is not None:
        model = swap_pool(model, pool, img_size=options.get("img_size"))
    if variant.broadcast != "none":
        add_context_broadcast(model, variant.broadcast, image_size=options.get("img_size"))
    pooled = isinstance(model, PooledModel)
    if settings.head_only and not pooled:
        raise ValueError(f"{name} has no pool of ours to run alone; choose one (--pool map), or name a map_* model")
    if settings.light and not pooled:
        raise ValueError(f"{name} has no light form; only models under 'map' have one")
    if settings.against is not None and not isinstance(model.head, MultiTokenPool):
        raise ValueError(f"{variant} has no groups of tokens to compare; expected 'map', 'ga' or 'cap'")
    return model.lighten() if settings.light else model


def _without_weights(name: str) -> nn.Module:
    with blame(name, "being built"), torch.device("meta"):
        return timm.create_model(name)


def _feature_maps(model: PooledModel, images: Tensor) -> list[Tensor]:
    """Noise in the shapes and memory formats of the maps that the backbone makes of such images."""
    with torch.no_grad():
        maps = model.pyramid(model.backbone, images[:1])
    last = [x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() for x in maps]
    formats = [torch.channels_last if is_last else torch.contiguous_format for is_last in last]
    return [
        torch.randn(len(images), *x.shape[1:]).to(memory_format=format_)
        for x, format_ in zip(maps, formats, strict=True)
    ]


def _rebuilt(pool: MultiTokenPool, rival: type[nn.Module]) -> nn.Module:
    """The rival's form of a pool. The pool receives its weights, none of which stays at a neutral initial value."""
    from .release import load_release

    block: Any = pool.blocks[0]
    gram = pool.gram
    theirs = rival(
        pool.channels,
        pool.num_classes,
        level=pool.level,
        dim=pool.dim,
        groups=pool.groups,
        tokens=pool.tokens,
        mean_token=pool.mean_token,
        gram=gram is not None,
        gram_dim=None if gram is None else gram.gram_dim,
        gram_groups=1 if gram is None else gram.embed.shape[0] // pool.groups,
        attn_dim=block.q.out_features,
        heads=block.heads,
        mlp_ratio=block.mlp.fc1.out_features * block.mlp.channel_groups / pool.dim,
        mlp_groups=block.mlp.channel_groups,
        head_mixing=block.mix_before is not None,
        classifier=pool.classifier_kind,
        drop=block.drop.p,
        fc_drop=pool.fc_drop_rate,
        light=pool.light,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    load_release(pool, theirs.state_dict())
    return theirs


def _macs(model: nn.Module, inputs: Iterable[Tensor]) -> int:
    from .macs import PRODUCTS, count

    return count(model, *[(1, *x.shape[1:]) for x in inputs], PRODUCTS)[0]


@torch.no_grad()
def _check_agreement(theirs: nn.Module, ours: nn.Module, inputs: tuple[Tensor, ...], settings: Settings) -> None:
    pairs = [(theirs(*inputs), ours(*inputs))]
    if settings.train:
        pairs += zip(theirs(*inputs, groups=True), ours(*inputs, groups=True), strict=True)
    for expected, came in pairs:
        if expected is not None:
            error, largest = (came - expected).abs().max().item(), expected.abs().max().item()
            if not error <= AGREEMENT[settings.dtype] * largest:  # true for NaN
                raise ValueError(
                    f"outputs differ by up to {error:.2g} (the largest is {largest:.2g}) from {settings.against}"
                )


def _choose(what: str, value: str, allowed: Any) -> str:
    if value not in allowed:
        near = get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {value!r}; expected one of {', '.join(allowed)}{hint}")
    return value


@contextmanager
def blame(name: str, doing: str) -> Generator[None, None, None]:
    """Whatever goes wrong inside, say in one line for which model."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{name} failed while {doing}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
