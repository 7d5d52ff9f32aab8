"""What a user asks of `report`."""

from dataclasses import dataclass

from ..options import Machine, option


@dataclass(frozen=True)
class Request(Machine):
    """Write a run's report.html again, from its folder and its data."""

    verb = "report"

    run: str = option(..., "folder of a run", positional=True, metavar="RUN")
