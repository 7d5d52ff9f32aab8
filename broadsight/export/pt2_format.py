"""PT2: torch's own archive of an exported program, run by torch."""

from pathlib import Path

import numpy as np
import torch
from torch.export import ExportedProgram

from .description import KEY, Description
from .session import Session

DESCRIPTION = f"{KEY}.json"  # its name inside the archive


def write(program: ExportedProgram, description: Description, path: Path) -> None:
    """A program and its description as one archive."""
    torch.export.save(program, path, extra_files={DESCRIPTION: description.to_json()})


def open(path: Path, threads: int | None = None) -> Session:
    """An archive of ours in torch, on the CPU.

    Args:
        threads: Of torch's operators, in the whole process; None leaves them.
    """
    extra = {DESCRIPTION: ""}
    try:
        program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path} cannot be opened by torch.export: {lines[0]}") from None
    if not extra[DESCRIPTION]:
        raise ValueError(f"{path} does not say what it is; expected a file that `broadsight export` wrote")
    description = Description.from_json(extra[DESCRIPTION])
    module = program.module()
    if threads is not None:
        torch.set_num_threads(threads)

    def run(images: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            found = module(torch.from_numpy(images))
        return [one.numpy() for one in (found if isinstance(found, tuple | list) else (found,))]

    return Session(description, run)
