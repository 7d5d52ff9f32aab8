"""What a user asks of `predict`."""

from dataclasses import dataclass
from typing import Any

from .. import options
from ..errors import UsageError
from ..options import ALLOW_OUTSIDE, CLASSIFIERS, DENSE_RUNS, MOST, RUN, SCORED, Machine, ModelOptions, Views, option


@dataclass(frozen=True)
class Request(ModelOptions, Views, options.Precise, Machine):
    """Say what images show, as a table, CSV or JSON; a dense run draws what it finds and writes COCO results."""

    verb = "predict"

    run: Any = option(..., **RUN | dict(help="folder of a run, an exported file, or a timm name"))
    images: tuple[str, ...] = option(
        (), "files, folders, or quoted patterns such as 'photos/**/*.jpg'", positional=True, metavar="IMAGE"
    )
    list: str | None = option(None, "text file with the path of an image on every line", metavar="FILE")
    allow_outside: bool = option(False, ALLOW_OUTSIDE)
    top: int = option(5, "classes of each image, the most probable first", of=(CLASSIFIERS,), least=1)
    csv: str | None = option(None, "print CSV, not a table, or write it to FILE; comes last", metavar="FILE", bare="-")
    json: str | None = option(
        None, "print JSON, not a table, or write it to FILE; .jsonl has a line for each image", metavar="FILE", bare="-"
    )
    light: bool = option(False, "let a 'map' pool classify with its averaged tokens alone", of=(CLASSIFIERS,))
    out: str | None = option(
        None, "of a dense run: folder for images with what was found drawn onto them", metavar="DIR", of=(DENSE_RUNS,)
    )
    threshold: float = option(0.5, "of a dense run: the lowest score that is drawn", of=(SCORED,), least=0, most=1)
    boxes: str | None = option(
        None,
        "of a pose model: where the objects are, a COCO .json or a detector's results.json",
        metavar="FILE",
        of=(DENSE_RUNS,),
    )
    batch: int = option(64, "images per call", of=(CLASSIFIERS,), least=1)
    workers: int | None = option(None, "processes that prepare images", of=(CLASSIFIERS,), least=0, most=MOST)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.csv is not None and self.csv == self.json:
            where = "the terminal" if self.csv == "-" else self.csv
            raise UsageError(f"--csv and --json both to {where}; expected different files")

    @property
    def outputs(self) -> dict[str, str]:
        """Files to write, "-" for the standard output, by their format."""
        return {form: path for form, path in (("csv", self.csv), ("json", self.json)) if path is not None}
