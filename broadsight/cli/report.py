"""The command that writes the report of a run: report."""

from pathlib import Path

from ..report.request import Request
from .parser import DONE


def report(request: Request) -> int:
    """Write the page, and say where."""
    import torch

    from ..report.run import report_run
    from ..training.run_folder import is_run

    if not is_run(path := Path(request.run)):
        raise FileNotFoundError(f"there is no run in {path}; give the folder that train wrote")
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    print(f"report: {report_run(path, workers=request.workers, device=request.device)}")
    return DONE
