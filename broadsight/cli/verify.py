"""The command that recomputes the papers' figures: verify."""

import json as json_
from dataclasses import asdict
from typing import Annotated

from ..errors import UsageError
from .parser import DONE, FAILED, Arg, register_models
from .terminal import progress_bar, show


def verify(
    families: Annotated[list[str] | None, Arg("papers to check; all if none is named", True, "FAMILY")] = None,
    json: Annotated[bool, Arg("print JSON")] = False,
    all: Annotated[bool, Arg("check every paper; the same as naming none")] = False,
) -> int:
    """Recompute every static figure of the papers' tables: paper, ours, match."""
    if all and families:
        raise UsageError(f"--all together with {' '.join(families)}; expected one of the two")
    register_models()
    from ..papers.verify import render
    from ..papers.verify import verify as run

    with progress_bar() as progress:
        checks = run(families or [], progress)
    found = {
        status: sum(check.status == status for check in checks) for status in ("match", "explained", "not run", "miss")
    }
    if json:
        print(json_.dumps([asdict(check) for check in checks], indent=2))
    else:
        show(render(checks))
        print(f"{len(checks)} figures: " + ", ".join(f"{number} {status}" for status, number in found.items()))
    return FAILED if found["miss"] else DONE
