"""The command that times models side by side: bench."""

from .. import api
from ..benchmark.request import Request
from ..visual.terminal import print_json, show
from .parser import DONE


def bench(request: Request) -> int:
    """Measure, write what is asked for, and show a table."""
    found = api.bench(request, progress=True)
    from ..benchmark.bench import record_of, render

    if request.json == "-":
        print_json(record_of(found, request), "-")
    else:
        show(render(found), whole=True)
    return DONE
