"""PT2: torch's own archive of an exported program, run by torch."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from ..description import KEY, Description
from ..session import Session
from .pt2_inside import clean

DESCRIPTION = f"{KEY}.json"  # its name inside the archive


def write(program: ExportedProgram, description: Description, path: Path) -> None:
    """A program and its description as one archive, which holds no pickle and nothing of this machine."""
    archive = io.BytesIO()
    torch.export.save(program, archive, extra_files={DESCRIPTION: description.to_json()})
    archive.seek(0)
    try:
        whole, _ = clean(archive, own=True)
    except ValueError as error:
        raise ValueError(f"torch {torch.__version__} writes what cannot be opened safely: {error}") from None
    path.write_bytes(whole.getbuffer())


def open(path: Path, threads: int | None = None) -> Session:
    """An archive of ours in torch, on the CPU. What is inside is looked at first; see `pt2_inside`.

    Args:
        threads: Of torch's operators, in the whole process; None leaves them.

    Raises:
        ValueError: It holds something that could be executed, or is not an archive of ours.
    """
    try:
        archive, beside = clean(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be opened: {error}") from None
    if DESCRIPTION not in beside:
        raise ValueError(f"{path} does not say what it is; expected a file that `broadsight export` wrote")
    description = Description.from_json(beside[DESCRIPTION])
    try:
        program: Any = torch.export.load(archive)
        # Stored without an example, which would be pickled; with one, torch keeps checking sizes as it was captured.
        program.example_inputs = ((torch.empty(1, *description.shape, device="meta"),), {})
        module = program.module()
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path} cannot be opened by torch.export: {lines[0]}") from None
    if threads is not None:
        torch.set_num_threads(threads)

    def run(images: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            found = module(torch.from_numpy(images))
        return [one.numpy() for one in (found if isinstance(found, tuple | list) else (found,))]

    return Session(description, run)
