"""Checkpoints of a whole run: complete or not there at all."""

import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..errors import first_line
from ..files import flush
from ..weights.writing import tensors_of

PROGRESS, AVERAGE, MANIFEST = "progress.json", "ema.safetensors", "manifest.json"
ADVICE = "remove the folders `last` and `previous` to train from the beginning"


class DamagedCheckpoint(RuntimeError):
    """A checkpoint that is not what was written."""


def save(
    folder: Path,
    accelerator: Accelerator,
    progress: dict[str, Any],
    average: nn.Module | None = None,
    beside: Mapping[str, Path] | None = None,
    previous: Path | None = None,
) -> Path:
    """Write the state of all processes and files `beside` it; once it is whole, the one before goes to `previous`."""
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
            for name, file in (beside or {}).items():
                shutil.copyfile(file, unfinished / name)
            (unfinished / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
            written = {file.name: _checksum(file) for file in sorted(unfinished.iterdir())}
            (unfinished / MANIFEST).write_text(json.dumps(written, indent=1), encoding="utf-8")
            for file in unfinished.iterdir():
                flush(file)
            flush(unfinished)
            unfinished.rename(target)
            flush(folder)
            _retire([other for other in sorted(folder.glob("*update-*")) if other != target], previous)
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    return target


def _retire(others: Sequence[Path], previous: Path | None) -> None:
    """Keep the newest of the checkpoints that were in place, and remove all else that is left of any."""
    whole = max((other for other in others if other.name.startswith("update-")), default=None)
    if previous is not None and whole is not None:
        with suppress(OSError):  # the new one is in place already
            previous.mkdir(exist_ok=True)
            kept = previous / whole.name
            shutil.rmtree(kept, ignore_errors=True)
            whole.rename(kept)
            flush(previous)
            others = [*others, *(other for other in previous.iterdir() if other != kept)]
    for other in others:
        if other.exists():
            shutil.rmtree(other, ignore_errors=True)


def checkpoints(*folders: Path) -> list[Path]:
    """All complete checkpoints of some folders, the newest first."""
    return sorted((path for folder in folders for path in folder.glob("update-*")), key=lambda p: p.name, reverse=True)


def newest(*folders: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next(iter(checkpoints(*folders)), None)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's progress, after a check that every file is as it was written."""
    try:
        manifest = _read_json(checkpoint / MANIFEST)
        for name, expected in manifest.items():
            if _checksum(checkpoint / name) != expected:
                what = f"{checkpoint / name} is damaged: its content is not what was written"
                raise DamagedCheckpoint(f"{what}; {ADVICE}")
        if PROGRESS not in manifest:
            raise ValueError(f"its manifest does not name {PROGRESS}")
        return _read_json(checkpoint / PROGRESS)
    except (OSError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"checkpoint {checkpoint} is damaged ({first_line(error)}); {ADVICE}") from None


def vouched(checkpoint: Path, name: str) -> bytes | None:
    """One file of a checkpoint, if it is there as it was written."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        if _checksum(checkpoint / name) == _read_json(checkpoint / MANIFEST)[name]:
            return (checkpoint / name).read_bytes()
    return None


def restore(checkpoint: Path, accelerator: Accelerator, average: nn.Module | None = None) -> None:
    """Put everything back as it was when the checkpoint was written."""
    try:
        accelerator.load_state(str(checkpoint))
        if average is not None:
            average.load_state_dict(load_file(checkpoint / AVERAGE))
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        what = f"checkpoint {checkpoint} does not fit this run: {first_line(error)}"
        raise DamagedCheckpoint(f"{what}; {ADVICE}") from None


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _checksum(path: Path) -> list[int]:
    value, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value, size = zlib.crc32(chunk, value), size + len(chunk)
    return [size, value]
