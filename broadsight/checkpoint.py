"""Reads checkpoints without executing anything that a pickle may hold: tensors, and a few plain types beside them."""

import argparse
import pickle
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

# Where training scripts put the weights in what they save, the usual place first.
WEIGHTS = ("state_dict", "model", "state_dict_ema")


def read_file(path: Path) -> Any:
    """All that a file holds: a .safetensors one, or one of torch's, read with plain types alone."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give the path of a released checkpoint")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise RuntimeError(f"{path} is not a readable safetensors file: {error}") from None
    try:
        with torch.serialization.safe_globals(PLAIN_TYPES):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be loaded as a file of tensors only ({reason_of(error)})") from None


def weights_in(content: Any) -> Any:
    """The weights among all that a training script may have saved."""
    if isinstance(content, Mapping):
        for place in WEIGHTS:
            if isinstance(content.get(place), Mapping):
                return content[place]
    return content


def reason_of(error: Exception) -> str:
    """Torch explains a refusal on a page, with what it refused in the middle."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return f"it holds a {refused[1]}, which could run code"
    inner = re.search(r"WeightsUnpickler error: *(.+)", str(error))
    return inner[1].strip() if inner else first_line(error)


def first_line(error: Exception) -> str:
    """What an error says, for errors of one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# What numpy calls numbers, as `struct` does.
NUMBERS = dict(b1="?", i1="b", u1="B", i2="h", u2="H", i4="i", u4="I", i8="q", u8="Q", f2="e", f4="f", f8="d")


class _NumberType:
    """Stands in for numpy's dtype while a file is read: of all that a dtype can be, a number alone."""

    def __init__(self, code: str, *_: Any):
        if code not in NUMBERS:
            raise pickle.UnpicklingError(f"it holds a numpy {code}, which is no number")
        self.format = NUMBERS[code]

    def __setstate__(self, state: tuple) -> None:
        self.format = (">" if state[1] == ">" else "<") + self.format[-1]


def _number(kind: _NumberType, data: bytes) -> float:
    """Stands in for the function that makes numpy's numbers; makes plain ones."""
    return struct.unpack(kind.format, data)[0]


# What training scripts store beside the weights and what cannot run anything: their command line, and numbers.
PLAIN_TYPES: list[Any] = [
    argparse.Namespace,
    (_NumberType, "numpy.dtype"),
    (_number, "numpy.core.multiarray.scalar"),
    (_number, "numpy._core.multiarray.scalar"),
]
