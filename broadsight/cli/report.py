"""The command that writes the report of a run, or of several together: report."""

from pathlib import Path

from ..files import check_new_folder, next_folder
from ..report.request import SEVERAL_RUNS, Request
from .parser import DONE

REPORTS = "reports"  # where pages of several runs are put


def report(request: Request) -> int:
    """Write the page, and say where."""
    import torch

    from ..report.run import report_run
    from ..report.together import report_together
    from ..training.run_folder import is_run

    several = len(request.runs) > 1
    request.refuse_ignored({SEVERAL_RUNS: None if several else "this is one"})
    paths = [Path(run) for run in request.runs]
    for path in paths:
        if not is_run(path):
            raise FileNotFoundError(f"there is no run in {path}; give the folder that train wrote")
    if several:
        request.refuse_all(("runs", "out"), "several runs are drawn from what they recorded, without their models")
        folder = check_new_folder(request.out, REPORTS) or next_folder(
            REPORTS, paths[0].name, f"and-{len(paths) - 1}-more"
        )
        print(f"report: {report_together(paths, folder, request.command)}")
        return DONE
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    print(f"report: {report_run(paths[0], workers=request.workers, device=request.device)}")
    return DONE
