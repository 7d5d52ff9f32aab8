"""Solar cells from the package `elpv-dataset`: 2,624 grey images of 300x300 pixels, sound or defective.

Experts called a cell defective with a probability of 0, 1/3, 2/3 or 1; above one half counts here, which are 821.
"""

from importlib.util import find_spec
from pathlib import Path

from .folder import FolderSource
from .registry import Options, register_source
from .sample_table import Part, Parts

CLASSES = ("sound", "defective")


class CellSource(FolderSource):
    """Cells by the name `mono/cell0001.png`, or `poly/...`: which crystal it is, and its file."""

    def file(self, index: int) -> str:
        return f"{self.root}/{self.names[index].partition('/')[2]}"


@register_source("elpv", "elpv", known=["elpv"])
def open_elpv(data: str, options: Options) -> Parts:
    """All cells, read from the package; nothing is set apart for validation."""
    spec = find_spec("elpv_dataset")  # the package's code is not run
    if spec is None or not spec.submodule_search_locations:
        hint = "pip install elpv-dataset (its images are CC-BY-NC-SA-4.0, non-commercial)"
        raise FileNotFoundError(f"elpv is not installed; {hint}")
    table = Path(next(iter(spec.submodule_search_locations))) / "data" / "labels.csv"
    try:
        lines = table.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{table} cannot be read: {error}; install elpv-dataset anew") from None
    names, labels = [], []
    for number, line in enumerate(lines, 1):
        try:
            file, probability, crystal = line.split()
            names.append(f"{crystal}/{Path(file).name}")
            labels.append(int(float(probability) > 0.5))
        except ValueError:
            raise ValueError(f"{table}, line {number}: {line!r} is not a file, a probability and a crystal") from None
    if not names:
        raise ValueError(f"{table} lists no images; install elpv-dataset anew")
    source = CellSource(table.parent / "images", names, labels, CLASSES, options.channels)
    note = "elpv is CC-BY-NC-SA-4.0: not for commercial use; cells above a probability of 0.5 are defective"
    return {"all": Part(source, "elpv", [note])}
