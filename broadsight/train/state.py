"""Checkpoints of a whole run: complete or not there at all."""

import json
import os
import shutil
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..dry_run import first_line

PROGRESS, AVERAGE, MANIFEST = "progress.json", "ema.safetensors", "manifest.json"


class DamagedCheckpoint(RuntimeError):
    """A checkpoint that is not what was written."""


def save(folder: Path, accelerator: Accelerator, progress: dict[str, Any], average: nn.Module | None = None) -> Path:
    """Write model, optimiser, scaler and every process's generators beside `progress` and averaged weights.

    All processes call it. The checkpoint is written under another name, flushed to the disk and renamed; the one before
    is removed last, so at every moment one is whole.
    """
    target = folder / f"update-{progress['updates']:09d}{'-evaluated' if progress['evaluated'] else ''}"
    if target.is_dir():  # this moment of the run has been saved already
        return target
    unfinished = folder / f".{target.name}.part"
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            if average is not None:
                save_file(tensors_of(average), unfinished / AVERAGE)
            (unfinished / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
            written = {file.name: _checksum(file) for file in sorted(unfinished.iterdir())}
            (unfinished / MANIFEST).write_text(json.dumps(written, indent=1), encoding="utf-8")
            for file in unfinished.iterdir():
                flush(file)
            flush(unfinished)
            unfinished.rename(target)
            flush(folder)
            for other in folder.glob("*update-*"):
                if other != target:
                    shutil.rmtree(other, ignore_errors=True)
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    return target


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint."""
    return max(folder.glob("update-*"), default=None)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of the run, after a check that every file is as it was written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            if _checksum(checkpoint / name) != expected:
                raise DamagedCheckpoint(
                    f"{checkpoint / name} is damaged: its content is not what was written; {_advice}"
                )
        if PROGRESS not in manifest:
            raise ValueError(f"its manifest does not name {PROGRESS}")
        return json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"checkpoint {checkpoint} is damaged ({error}); {_advice}") from None


def restore(checkpoint: Path, accelerator: Accelerator, average: nn.Module | None = None) -> None:
    """Put everything back as it was when the checkpoint was written."""
    try:
        accelerator.load_state(str(checkpoint))
        if average is not None:
            average.load_state_dict(load_file(checkpoint / AVERAGE))
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise DamagedCheckpoint(
            f"checkpoint {checkpoint} does not fit this run: {first_line(error)}; {_advice}"
        ) from None


def write_weights(model: nn.Module, path: Path) -> None:
    """A network's weights as safetensors: all of them, or the file stays as it was."""
    with replacing(path) as unfinished:
        save_file(tensors_of(model), unfinished, metadata={"format": "pt"})
        unfinished.chmod(0o666 & ~_umask())  # safetensors lets the owner alone read
    flush(path.parent)


def write_text(text: str, path: Path) -> None:
    """A text file, whole or as it was. Names of files that are not Unicode keep their bytes."""
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="surrogateescape")


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Another name to write to; what is there takes the file's place once it is on the disk.

    It is always the same name: what a killed process leaves under it does not pile up in the folder.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        yield unfinished
        flush(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some file systems cannot do that for folders
        if path.is_file():
            raise
    finally:
        os.close(handle)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict for safetensors, which takes no tensors that share memory."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in module.state_dict().items()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _checksum(path: Path) -> list[int]:
    value, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value, size = zlib.crc32(chunk, value), size + len(chunk)
    return [size, value]


_advice = "remove the folder `last` to train from the beginning"
