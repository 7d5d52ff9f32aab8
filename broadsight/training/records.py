"""A run's files compared with its checkpoint: damaged ones are named, and restored from its copies."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from ..files import file_digest, whole_file
from ..weights.reading import read_file
from . import checkpoints as state
from .run_folder import BEST, METRICS, SKIPPED, WEIGHTS, RunFolder, skipped_text


class DamagedRun(Exception):
    """A file of a run is not what was written, and cannot be made again."""


def put_back(folder: RunFolder, checkpoint: Path, progress: Any, model: nn.Module) -> list[str]:
    """Make a run's files those of the moment that a checkpoint was written; returns what was damaged, a line each.

    What a killed part of the run wrote after it is no damage. The model is the one evaluated, with its weights.
    """
    notes = []
    path, copy = folder.path / METRICS, state.vouched(checkpoint, METRICS) or b""
    if not _read(path).startswith(copy) or (progress.finished and _read(path) != copy):
        _replace(path, copy)
        notes.append(f"{METRICS} was damaged: written again from {checkpoint.name}")
    notes += _weights(folder, checkpoint, progress, model)
    path = folder.path / SKIPPED
    if progress.skipped and _read(path) != skipped_text(progress.skipped).encode():
        _clear(path)
        folder.report_skipped(progress.skipped)
        notes += [f"{SKIPPED} was damaged: written again"] if progress.finished else []
    return notes


def history(folder: RunFolder) -> dict[str, Any]:
    """What `train` recorded of a run beside its model; a ValueError where there is nothing of that."""
    run = folder.config().get("broadsight", {})
    if "recipe" not in run or "settings" not in run:
        raise ValueError(f"{folder.path} holds a model without the history of a run; give a folder that train wrote")
    return run


def check_records(folder: RunFolder) -> None:
    """Refuse metrics and skipped images other than those of the run's checkpoint; a ValueError names the file."""
    for checkpoint in state.checkpoints(folder.last, folder.previous):
        copy, progress = state.vouched(checkpoint, METRICS), state.vouched(checkpoint, state.PROGRESS)
        if copy is None or progress is None:
            continue
        about = json.loads(progress)
        skipped = about["finished"] and about["skipped"]
        damaged = [] if _read(folder.path / METRICS).startswith(copy) else [METRICS]
        if skipped and _read(folder.path / SKIPPED) != skipped_text(skipped).encode():
            damaged.append(SKIPPED)
        if damaged:
            advice = f"broadsight train --resume --out {folder.path} makes it again"
            raise ValueError(f"{folder.path / damaged[0]} is damaged: it is not what the run wrote; {advice}")
        return


def _weights(folder: RunFolder, checkpoint: Path, progress: Any, model: nn.Module) -> list[str]:
    path, fault = folder.path / WEIGHTS, None
    if progress.epoch == 0 or (path.is_file() and file_digest(path) == progress.best_weights):
        return []
    try:
        read_file(path)
    except Exception:
        fault = "not what was written" if path.is_file() else "missing"
    if progress.keeps_present:
        folder.keep_best(model)
    elif (best := state.vouched(checkpoint, BEST)) is not None:
        _replace(path, best)
    elif fault or progress.finished:
        raise DamagedRun(f"{path} is damaged, and the checkpoint has no copy of the best weights; {state.ADVICE}")
    if not fault and not progress.finished:  # they were better ones, of a part that is run again
        return []
    return [f"{WEIGHTS} was damaged ({fault or 'other weights'}): written again from {checkpoint.name}"]


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _replace(path: Path, content: bytes) -> None:
    _clear(path)
    with whole_file(path, durable=True) as unfinished:
        unfinished.write_bytes(content)


def _clear(path: Path) -> None:
    """Refuse to put a file where a folder is."""
    if path.is_dir():
        raise DamagedRun(f"{path} is a folder where the run had a file; move it away")
