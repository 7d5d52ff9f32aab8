"""Writing weights: safetensors files with a digest, whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ..files import file_digest, whole_file
from .reading import DIGEST, weights_digest


def write_weights(model: nn.Module, path: Path, about: Mapping[str, str] | None = None) -> str:
    """Write a model's weights as safetensors, with their digest and `about` as metadata; returns the file's digest."""
    tensors = tensors_of(model)
    with whole_file(path, durable=True) as unfinished:
        metadata = {"format": "pt", DIGEST: weights_digest(tensors), **(about or {})}
        save_file(tensors, unfinished, metadata=metadata)
        _in_order(unfinished)
        mask = os.umask(0)
        os.umask(mask)
        unfinished.chmod(0o666 & ~mask)  # safetensors lets the owner alone read
        return file_digest(unfinished)


def _in_order(path: Path) -> None:
    """Sort the metadata of a safetensors file, which the library does not: equal weights are to give equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # as it is, unless somebody's names are escaped otherwise
            file.seek(8)
            file.write(text.ljust(size))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict for safetensors, which takes no tensors that share memory."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in module.state_dict().items()}
