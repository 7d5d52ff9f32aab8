"""Tables as plain data; `templates/table.html` writes them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..visual.words import NOTHING, known, number, percent


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


Column = tuple[str, Callable[[Any], Cell | str]]  # title, and what makes a row's cell


@dataclass(frozen=True)
class Table:
    """A table of at least one row, whose first cell is that row's header.

    Args:
        caption: Text for readers who do not see the table.
        kind: CSS classes: "sortable", "heat", "narrow".
        marked: The row that stands out.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    kind: str = ""
    marked: int | None = None

    @property
    def heads(self) -> Iterator[tuple[str, bool]]:
        """Titles of the columns, and whether a column holds numbers: its first row shows it."""
        return zip(self.columns, (cell.kind.startswith("n") for cell in self.rows[0]), strict=True)


def table(
    caption: str, rows: Iterable[Any], columns: Sequence[Column], kind: str = "", marked: int | None = None
) -> Table | None:
    """Make a table with a cell of every row in every column; None without rows."""
    lines = [
        [cell if isinstance(cell, Cell) else Cell(cell) for cell in (of(row) for _, of in columns)] for row in rows
    ]
    return Table(caption, [title for title, _ in columns], lines, kind, marked) if lines else None


def words(key: str) -> Callable[[Any], Cell | str]:
    """Make cells of the text under a key."""
    return lambda row: row.get(key, "")


def numbers(key: str, say: Callable[[Any], str] = number) -> Callable[[Any], Cell | str]:
    """Make cells of the number under a key, written by `say`."""
    return lambda row: numeric(say(row.get(key)))


def shares(key: str) -> Callable[[Any], Cell | str]:
    """Make cells of the percentage under a key, with a bar."""
    return lambda row: share(row.get(key))


def numeric(text: str) -> Cell:
    return Cell(text, "n")


def share(value: Any) -> Cell:
    return Cell(percent(value), "n", float(value)) if known(value) else numeric(NOTHING)
