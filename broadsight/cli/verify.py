"""The command that recomputes the papers' figures: verify."""

import json
from collections import Counter
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
    count = Counter(check.status for check in checks)
    if request.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        show(render(checks))
        kinds = ("match", "explained", "not run", "miss")
        print(f"{len(checks)} figures: " + ", ".join(f"{count[status]} {status}" for status in kinds))
    return FAILED if count["miss"] else DONE
