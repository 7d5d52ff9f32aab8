"""Reads checkpoints without executing anything that a pickle may hold: tensors, and a few plain types beside them."""

import argparse
import hashlib
import pickle
import struct
import warnings
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ..errors import first_line

# Where training scripts put the weights in what they save, the usual place first.
WEIGHTS = ("state_dict", "model", "state_dict_ema")
NUMERIC = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NUMERIC += (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHARED = 8  # names for one memory, on average: layers that share weights have a few, a file made to explode has many
# Tensors of these names are numbers to compute with, whatever the layer.
FLOATING = ("weight", "bias", "running_mean", "running_var", "gamma", "scale", "pos_embed", "cls_token")
DIGEST = "weights_sha256"  # in what a safetensors file says of itself


def read_file(path: Path) -> Any:
    """All that a file holds: a .safetensors one, or one of torch's, of which only plain types are read."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give the path of a released checkpoint")
    if path.suffix == ".safetensors":
        try:
            weights, about = load_file(path), metadata_of(path)
        except SafetensorError as error:
            raise RuntimeError(f"{path} is not a readable safetensors file: {first_line(error)}") from None
        if DIGEST in about and about[DIGEST] != weights_digest(weights):
            raise RuntimeError(f"{path} is damaged: its weights are not those that were written; restore the file")
        return weights
    try:  # compressed entries, which torch never writes: a few bytes could become any number
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.file_size != entry.compress_size]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError):
        packed = []  # not such an archive, or one that torch will complain of
    if packed:
        fault = f"its entry {packed[0]} is compressed, as torch saves none"
        raise RuntimeError(f"{path} cannot be loaded as a file of tensors only ({fault})")
    try:
        with torch.serialization.safe_globals(PLAIN_TYPES), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on the format, beside which what is wrong is an error
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RuntimeError(f"{path} cannot be loaded as a file of tensors only ({first_line(error)})") from None


def metadata_of(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of tensors in the order of their names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


def inside(folder: str | Path, name: str) -> Path:
    """A file of a folder; refused if it is missing, no plain file, or a link that leads out of the folder."""
    file = Path(folder) / name
    if not file.is_file():
        raise FileNotFoundError(f"there is no {name} in {folder}; give a run folder")
    home, real = Path(folder).resolve(), file.resolve()
    # The cache of the hub keeps files beside its folders, under their digests.
    cached = home.parent.name == "snapshots" and home.parent.parent / "blobs" in real.parents
    if home not in real.parents and not cached:
        raise ValueError(f"{file} is a link to {real}, outside of its folder; copy that file there to use it")
    return file


def weights_in(content: Any) -> Any:
    """The weights among all that a training script may have saved."""
    if isinstance(content, Mapping):
        return next((content[place] for place in WEIGHTS if isinstance(content.get(place), Mapping)), content)
    return content


def read_weights(path: Path) -> Mapping[str, torch.Tensor]:
    """Tensors by name, from a file: safetensors or one of torch's, with the weights alone or among other things."""
    return check_tensors(weights_in(read_file(path)), path, path.stat().st_size)


def check_tensors(weights: Any, origin: str | Path, size: int | None = None) -> Mapping[str, torch.Tensor]:
    """The same weights, if they are tensors by name, each with plain numbers in memory of its own; else a ValueError.

    Without copies of one memory they take no more than the bytes of their file, its `size`.
    """
    if not isinstance(weights, Mapping):
        raise ValueError(f"{origin} holds no weights; expected tensors by name, not a {type(weights).__name__}")
    total = 0
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ValueError(f"{origin} holds no weights; expected tensors by name, but {name!r} is a {kind}")
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            kind = "quantised" if value.is_quantized else str(value.layout)
            raise ValueError(f"{name!r} in {origin} is a {kind} tensor; expected a dense one, so save it as such")
        if value.dtype not in NUMERIC:
            raise ValueError(f"{name!r} in {origin} is {_kind(value)}; expected real numbers of 16 to 64 bits")
        if value.is_meta:
            raise ValueError(f"{name!r} in {origin} is on the device meta, without content; expected a tensor with it")
        wanted, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        if wanted > stored:
            what = f"{name!r} in {origin} is {tuple(value.shape)}, {wanted:,} bytes, of which {stored:,} are stored"
            raise ValueError(f"{what}; expected a tensor that is stored whole")
        total += wanted
    if size is not None and total > SHARED * size:
        what = f"the tensors in {origin} would take {total:,} bytes, the file has {size:,}"
        raise ValueError(f"{what}; expected each stored by itself")
    return weights


@contextmanager
def as_runtime_error() -> Generator[None, None, None]:
    """What is wrong with the tensors of a file is a RuntimeError, as is a file that cannot be read."""
    try:
        yield
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def check_values(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], origin: str | Path) -> None:
    """Refuse weights that a model's own tensors of these names, if it has any, cannot hold as they are; a ValueError.

    Numbers have to be finite, unless the model's own are not, as in an attention mask.
    """
    for name, value in weights.items():
        if (like := own.get(name)) is None:
            continue
        real = like.is_floating_point() == value.is_floating_point() and not value.is_complex()
        if not real or (like.dtype == torch.bool) != (value.dtype == torch.bool):
            expected = "floating-point numbers" if like.is_floating_point() else _kind(like)
            raise ValueError(f"{name!r} in {origin} is {_kind(value)}; expected {expected}, as the model has there")
        came = value.detach().to(like.dtype)
        if not like.is_floating_point():
            if not torch.equal(came.to(value.dtype), value.detach()):
                raise ValueError(f"{name!r} in {origin} holds numbers that are too large for the model's {_kind(like)}")
            continue
        wrong = ~torch.isfinite(came)
        if bool(wrong.any()) and not like.is_meta:
            wrong = wrong & torch.isfinite(like.detach()).to(wrong.device)
        _refuse_infinite(name, wrong, origin)


def check_alone(weights: Mapping[str, torch.Tensor], origin: str | Path) -> None:
    """Refuse weights that no model could hold, by name: not finite, or integers where there are always fractions."""
    for name, value in weights.items():
        if value.is_floating_point():
            _refuse_infinite(name, ~torch.isfinite(value.detach()), origin)
        elif name.rpartition(".")[2] in FLOATING:
            raise ValueError(f"{name!r} in {origin} is {_kind(value)}; expected floating-point numbers")


def _refuse_infinite(name: str, wrong: torch.Tensor, origin: str | Path) -> None:
    if count := int(wrong.sum()):
        what = f"{name!r} in {origin} has {count} of {wrong.numel()} numbers that are not finite"
        raise ValueError(f"{what}; expected finite ones: the file is damaged or the training has diverged")


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
PLAIN_TYPES: list[Any] = [argparse.Namespace, (_NumberType, "numpy.dtype")]
PLAIN_TYPES += [(_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
