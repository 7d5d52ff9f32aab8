"""The command that recomputes the papers' figures: verify."""

import json
from dataclasses import asdict

from ..errors import UsageError
from ..papers.request import VerifyRequest
from ..visual.terminal import progress_bar, show
from .parser import DONE, FAILED


def verify(request: VerifyRequest) -> int:
    """Recompute the figures and show each beside the paper's; a miss is a failure."""
    if request.all and request.families:
        raise UsageError(f"--all together with {' '.join(request.families)}; expected one of the two")
    from ..papers.verify import render
    from ..papers.verify import verify as run

    with progress_bar() as progress:
        checks = run(list(request.families), progress)
    found = {
        status: sum(check.status == status for check in checks) for status in ("match", "explained", "not run", "miss")
    }
    if request.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        show(render(checks))
        print(f"{len(checks)} figures: " + ", ".join(f"{number} {status}" for status, number in found.items()))
    return FAILED if found["miss"] else DONE
