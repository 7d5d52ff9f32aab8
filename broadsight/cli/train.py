"""The command that trains: train."""

import os
import sys
from typing import Any

from ..training.request import Request
from ..visual.terminal import note, number, show
from .parser import DONE
from .tables import NAME, NUMBER, TEXT, columns, table


def train(request: Request) -> int:
    """Train, and say how well it went and what can be done next."""
    from ..report.run import report_run
    from ..training.engine import Interrupted
    from ..training.run import train as run

    try:
        outcome = run(request, reporter=report_run)
    except Interrupted as stop:
        print(f"broadsight: {stop}", file=sys.stderr)
        return stop.code
    if int(os.environ.get("RANK", 0)) == 0:
        _conclude([outcome, outcome.twin] if outcome.twin else [outcome])
    return DONE


def _conclude(outcomes: list[Any]) -> None:
    """Say how well a run went, beside its twin if there is one, and what to do next."""
    if len(outcomes) > 1:
        rows = []
        for outcome in outcomes:
            progress = outcome.progress
            epoch = str(progress.best_epoch) if progress.best is not None else "-"
            figures = [number(progress.best), epoch, number(outcome.parameters, 1e6), number(outcome.seconds, 60, 1)]
            rows.append([outcome.title, *figures, str(outcome.folder)])
        figures = columns(NUMBER, f"{outcomes[0].goal} %", "best epoch", "parameters M", "minutes")
        show(table({"model": TEXT, **figures, "run": NAME}, rows), whole=True)
    first, progress = outcomes[0], outcomes[0].progress
    skipped = f"; {len(progress.skipped)} images could not be read, see skipped.json" if progress.skipped else ""
    if progress.best is None:
        print(f"no epoch has a {first.goal} to be compared by: the weights are those of the last one{skipped}")
    else:
        print(f"best {first.goal} {number(progress.best)} %{first.over} in epoch {progress.best_epoch}{skipped}")
    print(f"run: {first.folder} (model.safetensors, metrics.jsonl, curves.png)")
    print(f'load it: import broadsight, timm; timm.create_model("local-dir:{first.folder}", pretrained=True)')
    if first.goal == "top-1":
        print("next: broadsight train PATH/TO/YOUR/IMAGES    # one folder per class; --help lists what can be changed")
    else:
        print(f"next: broadsight predict {first.folder} PATH/TO/YOUR/IMAGES --out DIR    # draws what it finds")
    for one in (one for one in first.notes if one.startswith("no report")):
        note(one)
    if first.report:
        print(f"report: {first.report}    # open it in a browser")
