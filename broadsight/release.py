"""Loads the weights that the original authors released into our models, strictly and without unpickling objects."""

import argparse
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .layers import SuperTokenAttention
from .models import STViT

Source = str | os.PathLike | Mapping[str, Tensor]


def load_release(module: nn.Module, source: Source) -> nn.Module:
    """Load released weights into one of our modules, in place, and return it.

    Args:
        module: An STViT, or a bare SuperTokenAttention.
        source: A checkpoint file (.safetensors, or torch's format with tensors only), or a dict of tensors, under the
            released key names.

    Raises:
        ValueError: The module has no release.
        RuntimeError: A key is missing, unexpected or has another shape, or a constant that the release stores is not
            the constant it should be. Nothing is loaded then.
    """
    released_name = _released_name_of(module)
    given = dict(_read(source))
    target = module.state_dict()
    names = {key: released_name(key) for key in target}
    unexpected = []
    for name in given.keys() - set(names.values()):
        if re.search(r"(^|\.)(un)?fold\.weights$", name):
            _check_fold_constant(name, given[name])
        else:
            unexpected.append(name)
    _refuse("is missing", [name for name in names.values() if name not in given], "the source is not this variant")
    _refuse("is unexpected", sorted(unexpected), "build the variant that the checkpoint was saved from")
    loaded = {key: _reshape(given[name], target[key].shape, name) for key, name in names.items()}
    module.load_state_dict(loaded)
    return module


def _released_name_of(module: nn.Module) -> Callable[[str], str]:
    if isinstance(module, STViT):
        return STViT.released_name
    if isinstance(module, SuperTokenAttention):
        return lambda key: f"stoken_refine.{key}"
    raise ValueError(
        f"no released weights are known for {type(module).__name__}; expected STViT or SuperTokenAttention"
    )


def _read(source: Source) -> Mapping[str, Tensor]:
    origin = "the source"
    if not isinstance(source, Mapping):
        origin = str(source)
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file; give the path of a released checkpoint")
        source = _read_file(path)
    if not isinstance(source, Mapping):
        raise RuntimeError(f"{origin} holds a {type(source).__name__}; expected a dict of tensors by released name")
    for key, value in source.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise RuntimeError(f"{key!r} in {origin} is a {kind}; expected tensors under the released key names")
    return source


def _read_file(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise RuntimeError(f"{path} is not a readable safetensors file: {error}") from None
    try:
        # The authors stored their command line beside the weights: a plain record of values, nothing that runs.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RuntimeError(f"{path} cannot be loaded as a file of tensors only ({reason})") from None
    return content["model"] if isinstance(content, dict) and isinstance(content.get("model"), Mapping) else content


def _reshape(value: Tensor, shape: torch.Size, name: str) -> Tensor:
    """Our linear layers are the release's 1x1 convolutions, and our scales its (1, C, 1, 1) maps: same numbers."""
    convolution = len(shape) == 2 and value.shape == (*shape, 1, 1)
    scale = "gamma" in name and value.shape == (1, *shape, 1, 1)
    if value.shape == shape or convolution or scale:
        return value.reshape(shape)
    raise RuntimeError(
        f"{name!r} has shape {tuple(value.shape)}; expected the values of {tuple(shape)}: another variant?"
    )


def _check_fold_constant(name: str, value: Tensor) -> None:
    if value.shape != (9, 1, 3, 3) or not torch.equal(value.reshape(9, 9).float().cpu(), torch.eye(9)):
        raise RuntimeError(f"{name!r} is not the constant one-hot kernel of the release; the checkpoint was changed")


def _refuse(what: str, names: list[str], remedy: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RuntimeError(f"{names[0]!r}{more} {what}; {remedy}; nothing was loaded")
