"""PT2: torch's own archive of an exported program, run by torch."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from ..agreement import listed
from ..session import KEY, Description, Session
from . import Format, described, register
from .pt2_inside import clean

DESCRIPTION = f"{KEY}.json"  # its name inside the archive


@register
class PT2(Format):
    name, files, runtime = "pt2", (".pt2",), "torch.export"
    guarded = True

    def write(self, program: ExportedProgram, description: Description, path: Path) -> None:
        """One archive, which holds no pickle and nothing about this machine."""
        archive = io.BytesIO()
        torch.export.save(program, archive, extra_files={DESCRIPTION: description.to_json()})
        archive.seek(0)
        try:
            whole, _ = clean(archive, own=True)
        except ValueError as error:
            raise ValueError(f"torch {torch.__version__} writes what cannot be opened safely: {error}") from None
        path.write_bytes(whole.getbuffer())

    def load(self, path: Path, threads: int | None) -> Session:
        archive, beside = clean(path)
        description = described(beside, DESCRIPTION)
        program: Any = torch.export.load(archive)
        # Stored without an example, which would be pickled; with one, torch keeps checking sizes as it was captured.
        program.example_inputs = ((torch.empty(1, *description.shape, device="meta"),), {})
        module = program.module()
        if threads is not None:
            torch.set_num_threads(threads)  # in the whole process

        def run(images: np.ndarray) -> list[np.ndarray]:
            with torch.no_grad():
                return [one.numpy() for one in listed(module(torch.from_numpy(images)))]

        return Session(description, run)
