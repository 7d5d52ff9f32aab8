"""Loads the weights that the original authors released into our models, strictly and without unpickling objects."""

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import first_line
from ..files import whole_file
from ..layers import MultiTokenPool, SuperTokenAttention
from ..models import STViT
from ..surgery.description import EDITED
from . import released_map as pools
from .reading import as_runtime_error, check_alone, check_tensors, check_values, metadata_of, read_file, weights_in
from .released_map import Source, Translation, without_module_prefix

Given = str | os.PathLike | Mapping[str, Tensor]
ONE_HOT = torch.eye(9).view(9, 1, 3, 3)  # what the release folds and unfolds with


def load_release(module: nn.Module, source: Given) -> nn.Module:
    """Load released weights into one of our modules, in place, and return it.

    Args:
        module: An STViT or SuperTokenAttention; a released map_* model or a MultiTokenPool, which may be light.
        source: A checkpoint file, .safetensors or torch's with tensors only, or a dict, under the released names.

    Raises:
        ValueError: The module has no release.
        RuntimeError: A tensor is missing, unexpected, or not what it should be. Nothing is loaded then.
    """
    if isinstance(module, STViT):
        translate = partial(_renamed_state, module, STViT.released_name)
    elif isinstance(module, SuperTokenAttention):
        translate = partial(_renamed_state, module, lambda key: f"stoken_refine.{key}")
    elif isinstance(module, MultiTokenPool):
        translate = partial(pools.pool_from_release, module)
    elif _is_pooled(module):
        translate = partial(pools.model_from_release, _architecture(module), module)
    else:
        expected = "expected STViT, SuperTokenAttention, MultiTokenPool or a map_* model"
        raise ValueError(f"no released weights are known for {type(module).__name__}; {expected}")
    origin = "the source" if isinstance(source, Mapping) else str(source)
    with as_runtime_error():
        given = without_module_prefix(_read(source)[1])
    translated = translate(given)
    with as_runtime_error():
        check_alone(given, origin)  # by the released names first
        check_values(translated, module.state_dict(), origin)
    module.load_state_dict(translated)
    return module


def released_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some tensors of a MultiTokenPool or a released map_* model under the released names and in released shapes."""
    if isinstance(module, MultiTokenPool):
        return pools.pool_to_release(module, tensors)
    if _is_pooled(module):
        return pools.model_to_release(_architecture(module), module, tensors)
    kind = type(module).__name__
    raise ValueError(f"{kind} has no released names; expected a MultiTokenPool or a model that has one")


def convert_release(source: str | os.PathLike, target: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Rewrite a pickled checkpoint as a safetensors file; nothing in the pickle is executed.

    The weights keep the released names. Plain values beside them (the architecture, the epoch, the metric) become the
    file's metadata; the rest (optimizer, arguments) is left out, and named there. A RuntimeError where the source
    holds no weights that can be read so.
    """
    source, target = Path(source), Path(target)
    if source.suffix == ".safetensors":
        raise ValueError(f"{source} is a safetensors file already; load_release reads it as it is")
    if target.suffix != ".safetensors":
        raise ValueError(f"cannot convert to {target}; expected a name ending in .safetensors")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; choose another name or give overwrite=True")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: there is no folder {target.parent}; create it first")
    with as_runtime_error():
        content, found = _read(source)
        if not found:
            raise ValueError(f"{source} holds no tensors; expected a checkpoint")
        weights = without_module_prefix(found)
        check_alone(weights, source)
    beside = {} if found is content else {str(name): value for name, value in content.items() if value is not found}
    about = {name: str(value) for name, value in beside.items() if isinstance(value, str | int | float)}
    if left_out := [name for name in beside if name not in about]:
        about["left_out"] = ", ".join(left_out)
    # Copies, since safetensors refuses tensors that share memory.
    tensors = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    try:
        with whole_file(target) as unfinished:
            save_file(tensors, unfinished, metadata=about | {"format": "pt"})
    except (ValueError, KeyError, NotImplementedError, SafetensorError) as error:
        raise RuntimeError(f"{source} cannot be stored as safetensors ({first_line(error)})") from None
    return target


def contents(path: str | os.PathLike) -> tuple[list[str], dict[str, str]]:
    """Names of the tensors in a safetensors file, and its metadata."""
    with safe_open(path, "pt") as file:
        return list(file.keys()), metadata_of(Path(path))


def _is_pooled(module: nn.Module) -> bool:
    return isinstance(getattr(module, "head", None), MultiTokenPool) and hasattr(module, "backbone")


def _architecture(module: nn.Module) -> str:
    """The registered name; of a model that was put together by hand the one of its backbone, which has no release."""
    for place in (module, getattr(module, "backbone", None)):
        name = (getattr(place, "pretrained_cfg", None) or {}).get("architecture")
        if name and name != EDITED:
            return name
    return type(module).__name__


def _renamed_state(
    module: nn.Module, released_name: Callable[[str], str], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Our linear layers are the release's 1x1 convolutions, and our scales its (1, C, 1, 1) maps: same numbers."""
    sources = {}
    for key, value in module.state_dict().items():
        name, shape = released_name(key), tuple(value.shape)
        more = [(*shape, 1, 1)] if len(shape) == 2 else [(1, *shape, 1, 1)] if "gamma" in name else []
        sources[key] = Source((name,), (shape, *more))
    folds = {name: ONE_HOT for name in given if re.search(r"(^|\.)(un)?fold\.weights$", name)}
    return Translation(module.state_dict(), sources, folds, "constant one-hot kernel", counts=True).to_ours(given)


def _read(source: Given) -> tuple[Any, Mapping[str, Tensor]]:
    """All that the source holds, and its weights."""
    if isinstance(source, Mapping):
        return source, check_tensors(source, "the source")
    path = Path(source)
    content = read_file(path)
    return content, check_tensors(weights_in(content), path, path.stat().st_size)
