"""What a benchmark runs: models, under another pooling or with context broadcast, or pools alone, ready to call."""

import json
import re
import runpy
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..deployment.formats import runtimes
from ..errors import UsageError, check_arguments, first_line, is_usage
from ..inspection.macs import count_calls
from ..inspection.precision import DTYPES
from ..layers import GroupLogits, MultiTokenNeck, MultiTokenPool
from ..losses import MultiTokenLoss
from ..models import from_run
from ..options import assignments, value_of
from ..surgery.broadcasting import add_context_broadcast
from ..surgery.fusion import fuse
from ..surgery.pooling import PooledModel, check_pool_arguments, create_backbone, swap_pool
from .settings import Settings

if TYPE_CHECKING:
    from .runtimes import Artefacts

DECIDED = {"num_classes": "every model has the same classes", "img_size": "--size says it for all, NAME@256 for one"}
AGREEMENT = {"fp32": 1e-3, "bf16": 1e-1, "fp16": 2e-2}  # of outputs, relative to the largest
CLASSES = 1000


@dataclass(frozen=True)
class Candidate:
    """Something to be timed."""

    name: str
    runtime: str
    model: nn.Module
    macs: int  # multiply-accumulates that one image's forward pass executes
    forward: Callable[[], Tensor]  # a forward pass, in training with its loss
    call: Callable[[], Any]  # what is timed
    variant: "Variant"
    size: tuple[int, int]
    artefact: Path | None = None  # what an exported runtime runs, or the weights; None where no runtime is exported
    difference: float | None = None  # of an exported runtime's outputs from the model's, relative to the largest
    objects: float | None = None  # that a dense model finds in an image
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.name} ({how(self)})"


def how(one: Any) -> str:
    """What runs a candidate or a row: the runtime, and the precision if it is not the usual one."""
    return one.runtime if one.precision == "fp32" else f"{one.runtime} {one.precision}"


class PoolOfMaps(nn.Module):
    """A pool that takes its maps one by one: as a model, whose arguments are tensors."""

    def __init__(self, pool: nn.Module):
        super().__init__()
        self.pool: Any = pool

    def forward(self, *maps: Tensor, groups: bool = False) -> Any:
        return GroupLogits(*self.pool.forward_groups(maps)) if groups else self.pool(maps)


@dataclass(frozen=True)
class Variant:
    """A timm model, what is changed in it, and the size of images if it has one of its own."""

    name: str
    pool: str | None = None
    broadcast: str = "none"
    size: tuple[int, int] | None = None
    head: str | None = None  # of a dense model, like
    neck: str = "fpn"
    args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by part: of the "model", its "pool", ...

    def of(self, part: str) -> dict[str, Any]:
        """The arguments of a part."""
        return dict(self.args.get(part, {}))

    def __str__(self) -> str:
        def named(part: str, name: str) -> str:
            return ":".join(filter(None, [name, spelled(self.of(part))]))

        at = "" if self.size is None else "@" + "x".join(map(str, dict.fromkeys(self.size)))
        parts = [named("model", self.name) + at, self.pool and named("pool", self.pool)]
        parts.append(None if self.broadcast == "none" else f"{named('broadcast', self.broadcast)} broadcast")
        parts.append(None if self.neck == "fpn" else f"{named('neck', self.neck)} neck")
        return (f"{self.head} on " if self.head else "") + " + ".join(filter(None, parts))


def spelled(args: Mapping[str, Any]) -> str:
    """Arguments as a name has them, without spaces."""
    texts = ((name, value if isinstance(value, str) else json.dumps(value)) for name, value in args.items())
    return ",".join(f"{name}={text}".replace(" ", "") for name, text in texts)


def variants(names: Sequence[str], settings: Settings) -> list[Variant]:
    """Every model of `names` under every pool, broadcasting and neck, with the arguments that each part has."""

    def check_model(name: str, given: Mapping[str, Any], where: str = "--model-args") -> None:
        for key in given.keys() & DECIDED.keys():
            raise UsageError(f"{where} gives {key}={given[key]}; leave it out: {DECIDED[key]}")
        from_run.check_arguments(name, given, where)

    def check_broadcast(kind: str, given: Iterable[str]) -> None:
        check_arguments(add_context_broadcast, given, "--broadcast-args", ("model", "kind", "image_size"))

    models = [(*name_and_arguments(one), size) for one, size in map(name_and_size, names)]
    for name, own, _ in models:
        check_model(name, own, "its name")
    check_arguments(MultiTokenNeck, settings.neck_args, "--neck-args", ("channels",))
    pools, necks = settings.pools or (None,), (settings.necks or ("fpn",)) if settings.head else ("fpn",)
    broadcasts = settings.broadcasts or ("none",)
    of_model = _shared_out(settings.model_args, [name for name, *_ in models], check_model)
    of_pool = _shared_out(settings.pool_args, pools, lambda *one: check_pool_arguments(*one, "--pool-args"))
    of_broadcast = _shared_out(settings.broadcast_args, [one for one in broadcasts if one != "none"], check_broadcast)
    found = []
    for (name, own, size), pool, broadcast, neck in product(models, pools, broadcasts, necks):
        args: dict[str, Any] = {
            "model": {**of_model[name], **own},
            "pool": of_pool[pool],
            "broadcast": of_broadcast.get(broadcast),
        }
        args |= {"head": settings.head_args, "neck": settings.neck_args if neck == "tokens" else None}
        given = {part: dict(one) for part, one in args.items() if one}
        found.append(Variant(name, pool, broadcast, size, settings.head, neck, given))
    return found


def _shared_out(given: Mapping[str, Any], parts: Sequence[Any], check: Callable[..., None]) -> dict[Any, dict]:
    """For each part those of the arguments that `check` lets pass; its error for an argument that no part has."""
    found: dict[Any, dict[str, Any]] = {part: {} for part in parts}
    for name, value in given.items():
        refused = None
        for part, mine in found.items():
            try:
                check(part, {name: value})
                mine[name] = value
            except ValueError as error:
                refused = error
        if refused and not any(name in mine for mine in found.values()):
            raise refused
    return found


def name_and_arguments(name: str) -> tuple[str, dict[str, Any]]:
    """`NAME` or `NAME:key=value,key=[1,2]` in its parts."""
    model, _, text = name.partition(":")
    if "=" not in text:
        return name, {}
    pairs = re.split(r",(?![^\[\]{}]*[\]}])", text)
    return model, {key: value_of(value) for key, value in assignments(pairs, f"{model}:").items()}


def name_and_size(given: str) -> tuple[str, tuple[int, int] | None]:
    """`NAME`, `NAME@256` or, height first, `NAME@224x320` in its parts; a name may have arguments."""
    name, at, size = given.partition("@")
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", size)
    if at and (found is None or not all(int(side or 1) for side in found.groups())):
        raise ValueError(f"{given!r} has no size behind its @; expected pixels, such as {name}@256 or {name}@224x320")
    return name, None if found is None else (int(found[1]), int(found[2] or found[1]))


def build(
    variant: Variant, settings: Settings, rival: type[nn.Module] | None = None, artefacts: "Artefacts | None" = None
) -> list[Candidate]:
    """A model under every runtime; after its pool in the rival's form, with the same weights, if there is one."""
    title = str(variant)
    settings = settings if variant.size is None else replace(settings, size=variant.size)
    model = create(variant, settings)
    lineup = settings.lineup()
    memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
    with blame(title, "being prepared"):
        torch.manual_seed(settings.seed)
        shape = settings.batch, channels(variant, model), *settings.size
        inputs = [torch.randn(shape).to(memory_format=memory_format)]
        labels = torch.randint(CLASSES, (settings.batch,)).to(settings.device)
        weights = None if artefacts is None else artefacts.weights(model, title, inputs[0])
        grouped = isinstance(model, PooledModel) and model.has_groups
        forms: dict[str, nn.Module] = {title: model.eval()}
        if settings.head_only:
            inputs = _feature_maps(cast(PooledModel, model), inputs[0])
            forms = {title: PoolOfMaps(model.head).eval()}
            if rival is not None:
                theirs = _rebuilt(model.head, rival)
                forms = {f"{title}, {Path(settings.against or '').stem}": PoolOfMaps(theirs).eval(), **forms}
        if settings.fuse:
            forms = {name: fuse(form) for name, form in forms.items()}
        macs = {name: count_calls(form, *[(1, *x.shape[1:]) for x in inputs])[0] for name, form in forms.items()}
        size, image, placed = (inputs[0].shape[-2], inputs[0].shape[-1]), inputs[0], {}
        for precision in dict.fromkeys(one for runtime, one in lineup if runtime not in runtimes()):
            place: dict[str, Any] = {"device": settings.device, "dtype": DTYPES[precision]}
            given = tuple(x.to(**place) for x in inputs)
            copies = {name: deepcopy(form).to(**place, memory_format=memory_format) for name, form in forms.items()}
            if rival is not None:
                _check_agreement(*copies.values(), given, settings, AGREEMENT[precision])
            for x in given:
                x.requires_grad_(settings.head_only and settings.train)
            placed[precision] = given, copies
        made = []
        for name, (runtime, precision) in product(forms, lineup):
            if runtime in runtimes():
                assert artefacts is not None
                run, path, difference = artefacts.open(runtime, model, name, image, precision)
                form, calls = model, (lambda run=run: torch.from_numpy(run()), run)
            else:
                (given, copies), path, difference = placed[precision], weights, None
                form = copies[name].train(settings.train)
                calls = _calls(form, runtime, given, labels, grouped)
            known: dict[str, Any] = dict(artefact=path, difference=difference, precision=precision)
            made.append(Candidate(name, runtime, form, macs[name], *calls, variant, size, **known))
        return made


def load_rival(path: str) -> type[nn.Module]:
    """The class PerGroupPool of a Python file, which is executed."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; expected a Python file that defines the class PerGroupPool")
    try:
        found = runpy.run_path(path).get("PerGroupPool")
    except Exception as error:
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"{path} defines no module class PerGroupPool; expected one with MultiTokenPool's arguments")
    return found


def _calls(
    model: nn.Module, runtime: str, inputs: tuple[Tensor, ...], labels: Tensor, grouped: bool
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """What runs a torch model forward, in training with its loss, and what is timed of it."""
    # dynamic=False: having seen another shape first, torch would otherwise time slower shape-generic kernels
    run = torch.compile(model, dynamic=False) if runtime == "compile" else model
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

    return forward, train if model.training else infer


def channels(variant: Variant, model: Any) -> int:
    """Of the images that a model takes."""
    return variant.of("model").get("in_chans") or model.pretrained_cfg["input_size"][0]


def create(variant: Variant, settings: Settings) -> Any:
    """The model with seeded random weights, built for the size if it is tied to one, if the settings apply to it."""
    name, pool = variant.name, variant.pool
    cfg: Any = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    tied = cfg is not None and cfg.fixed_input_size and tuple(cfg.input_size[1:]) != settings.size
    height, width = settings.size
    side = height if height == width else (height, width)  # a few models take a single number only
    options: dict[str, Any] = {"img_size": side} if tied else {}
    if pool is not None:
        with blame(name, "being built"), torch.device("meta"):
            own = isinstance(timm.create_model(name), PooledModel)
        if own:
            raise ValueError(f"{name} has its own pool; name a plain backbone beside pools (--pool), or drop the pools")
    torch.manual_seed(settings.seed)
    try:
        create = timm.create_model if pool is None else create_backbone
        model: Any = create(name, num_classes=CLASSES, **options, **variant.of("model"))
    except Exception as error:
        if isinstance(error, ImportError) and is_usage(error):  # a package to install
            raise
        if tied:
            made_for = "{}x{}, use that size".format(*cfg.input_size[1:])
            raise ValueError(f"{name} cannot be built for {height}x{width}; it is made for {made_for}") from error
        if variant.args and isinstance(error, ValueError):  # of the user's values
            raise ValueError(f"{variant}: {first_line(error)}") from error
        with blame(name, "being built"):
            raise
    if pool is not None:
        model = swap_pool(model, pool, img_size=options.get("img_size"), **variant.of("pool"))
    if variant.broadcast != "none":
        said = variant.of("broadcast")
        add_context_broadcast(model, variant.broadcast, image_size=options.get("img_size"), **said)
    if settings.head_only and not isinstance(model, PooledModel):
        raise ValueError(f"{name} has no pool of ours to run alone; choose one (--pool map), or name a map_* model")
    if settings.light and not isinstance(model, PooledModel):
        raise ValueError(f"{name} has no light form; only models under 'map' have one")
    if settings.against is not None and not isinstance(model.head, MultiTokenPool):
        raise ValueError(f"{variant} has no groups of tokens to compare; expected 'map', 'ga' or 'cap'")
    return model.lighten() if settings.light else model


def _feature_maps(model: PooledModel, images: Tensor) -> list[Tensor]:
    """Noise in the shapes and memory formats of the maps that the backbone makes of such images."""
    with torch.no_grad():
        maps = model.pyramid(model.backbone, images[:1])
    noise = []
    for x in maps:
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        memory_format = torch.channels_last if last else torch.contiguous_format
        noise.append(torch.randn(len(images), *x.shape[1:]).to(memory_format=memory_format))
    return noise


def _rebuilt(pool: MultiTokenPool, rival: type[nn.Module]) -> nn.Module:
    """The rival's form of a pool. The pool receives its weights, none of which stays at a neutral initial value."""
    from ..weights.released_stvit import load_release

    block: Any = pool.blocks[0]
    mlp, gram, same = block.mlp, pool.gram, ("level", "dim", "groups", "tokens", "mean_token", "light")
    arguments: dict[str, Any] = {name: getattr(pool, name) for name in same}
    arguments |= dict(gram=gram is not None, gram_dim=None, gram_groups=1, attn_dim=block.q.out_features)
    if gram is not None:
        arguments |= dict(gram_dim=gram.gram_dim, gram_groups=gram.embed.shape[0] // pool.groups)
    arguments |= dict(mlp_ratio=mlp.fc1.out_features * mlp.channel_groups / pool.dim, mlp_groups=mlp.channel_groups)
    arguments |= dict(heads=block.heads, head_mixing=block.mix_before is not None, classifier=pool.classifier_kind)
    theirs = rival(pool.channels, pool.num_classes, drop=block.drop.p, fc_drop=pool.fc_drop_rate, **arguments)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    load_release(pool, theirs.state_dict())
    return theirs


@torch.no_grad()
def _check_agreement(
    theirs: nn.Module, ours: nn.Module, inputs: tuple[Tensor, ...], settings: Settings, most: float
) -> None:
    pairs = [(theirs(*inputs), ours(*inputs))]
    if settings.train:
        pairs += zip(theirs(*inputs, groups=True), ours(*inputs, groups=True), strict=True)
    for expected, came in pairs:
        if expected is not None:
            error, largest = (came - expected).abs().max().item(), expected.abs().max().item()
            if not error <= most * largest:  # true for NaN
                off = f"by up to {error:.2g} (the largest is {largest:.2g})"
                raise ValueError(f"outputs differ {off} from {settings.against}")


@contextmanager
def blame(name: str, doing: str) -> Generator[None, None, None]:
    """Whatever goes wrong inside, say in one line for which model."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise RuntimeError(f"{name} failed while {doing}: {type(error).__name__}: {first_line(error)}") from error
