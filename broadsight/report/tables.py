"""Tables that scroll inside their own box, with headers that are told apart from data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..visual.words import NOTHING, SPACE, escape, known


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: HTML.
        kind: Names of classes: "n" for numbers, "h0" to "h10" for heat.
        bar: Length of the bar below the text, 0 to 100; None for no bar.
    """

    text: str
    kind: str = ""
    bar: float | None = None

    def html(self) -> str:
        kind = " ".join(part for part in (self.kind, "bar" if self.bar is not None else "") if part)
        length = f' style="--v:{min(max(self.bar, 0.0), 100.0):.4g}"' if self.bar is not None else ""
        return f"<td{_class(kind)}{length}>{self.text}</td>"


@dataclass(frozen=True)
class Column:
    """The head of a column: its text, and whether it holds numbers."""

    title: str
    numeric: bool = False


def numeric(text: str) -> Cell:
    return Cell(text, "n")


def share(value: object) -> Cell:
    """A percentage with a bar."""
    if not isinstance(value, (int, float)) or not known(value):
        return Cell(NOTHING, "n")
    return Cell(f"{value:.1f}{SPACE}%", "n", float(value))


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell | str]],
    *,
    caption: str,
    kind: str = "",
    marked: int | None = None,
) -> str:
    """A table whose first cell of every row is that row's header.

    Args:
        rows: Cells; texts are HTML.
        caption: What the table holds, plain text; for those who do not see it.
        kind: Names of classes of the table: "sortable", "heat".
        marked: The row that stands out.
    """
    head = "".join(
        f'<th scope="col"{_class("n" if c.numeric else "")}><span>{escape(c.title)}</span></th>' for c in columns
    )
    lines = []
    for index, (first, *others) in enumerate(rows):
        title = first.text if isinstance(first, Cell) else first
        cells = "".join(cell.html() if isinstance(cell, Cell) else f"<td>{cell}</td>" for cell in others)
        mark = ' class="marked"' if index == marked else ""
        lines.append(f'<tr{mark}><th scope="row">{title}</th>{cells}</tr>\n')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{_class(kind)}>'
        f'<caption class="unseen">{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table></div>\n"
    )


def folded(summary: str, body: str) -> str:
    """What is shown on demand; the summary is plain text."""
    return f"<details><summary>{escape(summary)}</summary>\n{body}</details>\n"


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""
