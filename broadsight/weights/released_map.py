"""Between our names and those of the authors' MAP checkpoints, with a tensor for each group; ours is the stack."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from ..layers import MultiTokenPool

Shape = tuple[int, ...]
_NAMES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


def pool_from_release(pool: MultiTokenPool, released: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict for the pool from tensors under the released names, which begin below the head's own prefix."""
    # The pool of the CAP models is a group alone, and has names of its own
    cap = pool.groups == 1 and pool.merge is None and any(name.startswith("pool.") for name in released)
    return _pool_translation(pool, cap).to_ours(released)


def pool_to_release(pool: MultiTokenPool, tensors: Mapping[str, Tensor], cap: bool = False) -> dict[str, Tensor]:
    """Copies of some or all tensors of the pool (weights, gradients) under the released names, or those of CAP."""
    return _pool_translation(pool, cap).to_released(tensors)


def model_from_release(architecture: str, model: nn.Module, released: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`pool_from_release` for a model by its registered name: a backbone of timm's, and a MultiTokenPool as `head`."""
    return _model_translation(architecture, model).to_ours(without_module_prefix(released))


def model_to_release(architecture: str, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`pool_to_release` for a whole model."""
    return _model_translation(architecture, model).to_released(tensors)


def without_module_prefix(released: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Names as they were before a wrapper for distributed training put `module.` in front of each."""
    if released and all(name.startswith("module.") for name in released):
        return {name.removeprefix("module."): value for name, value in released.items()}
    return released


def refuse(what: str, names: list[str], remedy: str) -> None:
    """Raise if there are names to complain about."""
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        raise RuntimeError(f"{names[0]!r}{more} {what}; {remedy}; nothing was loaded")


class Source(NamedTuple):
    """Where the release keeps one of our tensors: names of equal parts, and the shapes that each part may have."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    same: bool = False  # whether the names are all of the whole tensor


@dataclass(frozen=True)
class Translation:
    """Between our names and released ones."""

    own: Mapping[str, Tensor]  # the state dict of our module
    sources: dict[str, Source]  # of our names; others have no counterpart in the release
    constants: Mapping[str, Tensor]  # of the release, which hold no weights and may be absent
    constant: str = "list of upper-triangle positions"  # what each of them is
    own_constants: frozenset[str] = frozenset()  # our names of such tensors; they keep their values
    counts: bool = False  # whether a norm has to say how many batches it has seen
    unused: str | None = None  # pattern of further released names that nothing here needs

    def to_ours(self, released: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict with the released values, in new tensors or views of the released ones; or a RuntimeError."""
        without_source = [key for key in self.own if key not in self.sources and key not in self.own_constants]
        refuse("has no counterpart in the release", without_source, "build the module as the authors did")
        expected = {name: key for key, source in self.sources.items() for name in source.names}
        # Some tools do not store how many batches a norm has seen, which says nothing about the weights
        needed = [name for name, key in expected.items() if self.counts or not _is_count(key)]
        missing = [name for name in needed if name not in released]
        refuse("is missing", missing, "the source is not this variant")
        unexpected = released.keys() - expected.keys() - self.constants.keys()
        unexpected = sorted(name for name in unexpected if not (self.unused and re.match(self.unused, name)))
        refuse("is unexpected", unexpected, "build the variant that the checkpoint was saved from")
        translated = {key: self._read(key, released) for key in self.own}
        for name in self.constants.keys() & released.keys():
            value, constant = released[name], self.constants[name]
            same = value.is_floating_point() == constant.is_floating_point() and value.shape == constant.shape
            if not same or not torch.equal(value.cpu().to(constant.dtype), constant):
                what = f"{name!r} is not the {self.constant} that the release stores"
                raise RuntimeError(f"{what}; the checkpoint was changed; nothing was loaded")
        return translated

    def _read(self, key: str, released: Mapping[str, Tensor]) -> Tensor:
        names, shapes, same = self.sources.get(key, Source((), ()))
        parts = [name for name in names if name in released]
        for name in parts:
            if tuple(released[name].shape) not in shapes:
                came, expected = tuple(released[name].shape), " or ".join(map(str, dict.fromkeys(shapes)))
                fault = f"{name!r} has shape {came}; expected {expected}"
                raise RuntimeError(f"{fault}: another variant? nothing was loaded")
        if not parts:
            return self.own[key]
        if same or _is_count(key):  # all groups have seen the same batches
            return released[parts[0]]
        return torch.stack([released[name] for name in parts]).reshape(self.own[key].shape)

    def to_released(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of some tensors of the module under the released names."""
        translated = {}
        for key, value in tensors.items():
            if key not in self.own:
                raise ValueError(f"{key!r} is not a tensor of this module; expected names of its state dict")
            if value.shape != self.own[key].shape:
                raise ValueError(f"{key!r} has shape {tuple(value.shape)}; expected {tuple(self.own[key].shape)}")
            if key in self.own_constants:
                continue
            if key not in self.sources:
                raise ValueError(f"{key!r} has no counterpart in the release; leave it out")
            names, (shape, *_), same = self.sources[key]
            parts = [value] * len(names) if same or _is_count(key) else value.reshape(len(names), *shape).unbind()
            translated |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
        return translated


def _vector(shape: Shape, groups: int) -> Shape:
    return (shape[0] // groups,) if shape else ()


def _linear(shape: Shape, groups: int) -> Shape:
    return shape[1:] if len(shape) == 3 else _vector(shape, groups)


def _convolution(shape: Shape, groups: int) -> Shape:
    """The release has 1x1 convolutions, some with channel groups, where we have products."""
    return (math.prod(shape[:-1]) // groups, shape[-1], 1, 1) if len(shape) > 1 else _vector(shape, groups)


# What a tensor of ours becomes in the release, by the names of `released_map.yaml`.
_FORMS: dict[str, Callable[[Shape, int], Shape]] = {"vector": _vector, "linear": _linear, "convolution": _convolution}
_FORMS["tokens"] = lambda shape, groups: (1, *shape[1:])


def _pool_translation(pool: MultiTokenPool, cap: bool = False, prefix: str = "") -> Translation:
    """Released names get the prefix."""

    merge = "multi_scale.concat_conv" if pool.level > 0 else "channel_convertor"
    linear = "head." if pool.classifier_kind == "norm" else ""

    def full(name: str, group: int = 0) -> str:
        name = name.format(g=group, merge=merge, linear=linear)
        if cap:
            name = name.replace("mmcap.mmcap.0.", "pool.").replace("heads.0.", "fc.")
        return prefix + name

    own, sources = pool.state_dict(), {}
    for (key, value), (pattern, template, form) in itertools.product(own.items(), _NAMES["pool"]):
        if match := re.fullmatch(pattern, key):
            template = match.expand(template)
            groups = pool.groups if "{g}" in template else 1
            names = tuple(full(template, group) for group in range(groups))
            sources[key] = Source(names, (_FORMS[form](tuple(value.shape), groups),))
    constants = {}
    if pool.gram is not None:
        rows, columns = torch.triu_indices(pool.gram.gram_dim, pool.gram.gram_dim, device="cpu")
        triangle = rows * pool.gram.gram_dim + columns
        place = "mmcap.mmcap.{g}.gram_token_extraction.bp_index"
        constants = {full(place, group): triangle for group in range(pool.groups)}
    return Translation(own, sources, constants, unused=re.escape(prefix) + r"heads\." if pool.light else None)


def _is_count(key: str) -> bool:
    return key.endswith("num_batches_tracked")


def _renamed(rules: Sequence[tuple[str, str]], name: str) -> str:
    """The first rule whose pattern begins the name replaces that beginning; other names stay."""
    for pattern, replacement in rules:
        changed, count = re.subn(f"^(?:{pattern})", replacement, name)
        if count:
            return changed
    return name


class Model(NamedTuple):
    """What the release calls the parts of one model."""

    backbone: Callable[[str], str]  # from timm's name to the released one
    head: str = "head."  # prefix of the pool
    recomputed: str | None = None  # pattern of buffers that follow from the rest of the model
    twin: tuple[str, str] | None = None  # parts of names, of which the second replaces the first where a tensor has two


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
MODELS: dict[str, Model] = {}
for _name, _own in _NAMES["models"].items():
    MODELS[_name] = Model(partial(_renamed, _NAMES["backbones"].get(_own.pop("backbone", None), ())), **_own)


def _model_translation(architecture: str, model: nn.Module) -> Translation:
    inner = MODELS.get(architecture)
    if inner is None:
        raise ValueError(f"no released weights are known for {architecture!r}; expected one of {', '.join(MODELS)}")
    pool: Any = model.get_submodule("head")
    head = _pool_translation(pool, prefix=inner.head)
    own, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    sources, own_constants, unused = {}, set(), [head.unused, inner.recomputed]
    for key, value in own.items():
        part, _, name = key.partition(".")
        released = inner.backbone(name)
        if part == "head" and name in head.sources:
            sources[key] = head.sources[name]
        elif part == "backbone" and (key in parameters or key.endswith(STATISTICS)):
            names = (released, released.replace(*inner.twin)) if inner.twin else (released,)
            sources[key] = Source(tuple(dict.fromkeys(names)), (tuple(value.shape),), same=True)
        elif part == "backbone":
            own_constants.add(key)
            unused.append(re.escape(released) + "$")
    unused = "|".join(f"(?:{pattern})" for pattern in unused if pattern)
    kept: dict[str, Any] = dict(own_constants=frozenset(own_constants), unused=unused or None)
    return Translation(own, sources, head.constants, **kept)
