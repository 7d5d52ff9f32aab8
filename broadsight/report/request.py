"""What a user asks of `report`."""

from dataclasses import dataclass

from ..options import Machine, option

SEVERAL_RUNS = "several runs (RUN RUN ...)"


@dataclass(frozen=True)
class Request(Machine):
    """Write a run's report.html again, from its folder and its data; or one page of the curves of several runs."""

    verb = "report"

    runs: tuple[str, ...] = option(
        ...,
        "folder of a run; of several on the same data, the curves are drawn together",
        positional=True,
        metavar="RUN",
    )
    out: str | None = option(
        None, "folder for that page and its plot; without it a new one in reports/", metavar="DIR", of=(SEVERAL_RUNS,)
    )
