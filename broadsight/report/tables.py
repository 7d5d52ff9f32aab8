"""Tables as plain data; `templates/table.html` writes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..visual.words import NOTHING, known, percent


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        kind: CSS classes: "n" for numbers, "h0" to "h10" for heat.
        bar: Length of the bar below the text, 0 to 100; None for no bar.
        tag: Element around the text, such as "code".
        before, after: A number in front of the text, and small text behind it.
    """

    text: str
    kind: str = ""
    bar: float | None = None
    tag: str = ""
    before: str = ""
    after: str = ""

    @property
    def classes(self) -> str:
        return self.kind if self.bar is None else f"{self.kind} bar"


@dataclass(frozen=True)
class Table:
    """A table whose first cell of every row is that row's header.

    Args:
        caption: Text for readers who do not see the table.
        kind: CSS classes: "sortable", "heat", "narrow".
        marked: The row that stands out.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    kind: str = ""
    marked: int | None = None

    @property
    def heads(self) -> Iterator[tuple[str, bool]]:
        """Titles of the columns, and whether a column holds numbers: its first row shows it."""
        row = self.rows[0] if self.rows else ("", *map(numeric, self.columns[1:]))
        kinds = (isinstance(cell, Cell) and cell.kind.startswith("n") for cell in row)
        return zip(self.columns, kinds, strict=True)

    @property
    def lines(self) -> Iterator[tuple[Cell, list[Cell]]]:
        """Rows, as the header and the other cells of each."""
        for row in self.rows:
            first, *others = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
            yield first, others


def numeric(text: str) -> Cell:
    """Make a cell of a number."""
    return Cell(text, "n")


def share(value: Any) -> Cell:
    """Make a cell of a percentage with a bar."""
    return Cell(percent(value), "n", float(value)) if known(value) else Cell(NOTHING, "n")
