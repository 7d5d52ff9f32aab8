"""The command that times models side by side: bench."""

from .. import api
from ..benchmark.request import Request
from ..visual.terminal import show
from .parser import DONE


def bench(request: Request) -> int:
    """Measure, write what is asked for, and show a table."""
    found = api.bench(request, progress=True)
    from ..benchmark.bench import render

    if request.json != "-":
        show(render(found), whole=True)
    return DONE
