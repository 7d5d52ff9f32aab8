"""The command that writes the report of a run: report."""

from pathlib import Path
from typing import Annotated

from .parser import DONE, Arg, Device, Threads, Workers, register_models


def report(
    run: Annotated[str, Arg("folder of a run", True, "RUN")],
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "auto",
) -> int:
    """Write a run's report.html again, from its folder and its data."""
    register_models()
    import torch

    from ..report.run import report_run
    from ..training.run_folder import is_run

    if not is_run(Path(run)):
        raise FileNotFoundError(f"there is no run in {run}; give the folder that train wrote")
    if threads is not None:
        torch.set_num_threads(threads)
    print(f"report: {report_run(Path(run), workers=workers, device=device)}")
    return DONE
