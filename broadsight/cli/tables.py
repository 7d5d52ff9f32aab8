"""Tables that commands show: what each column holds says how it stands there."""

from collections.abc import Iterable, Mapping
from typing import Any

NAME, NUMBER, TEXT = dict(no_wrap=True), dict(justify="right", no_wrap=True), dict[str, Any]()
FIGURE = dict(justify="right")  # whose heading may be broken
PATH = dict(overflow="fold")  # shown whole, in several lines if it is long


def table(columns: Mapping[str, Mapping[str, Any]], rows: Iterable[Iterable[Any]], title: str | None = None) -> Any:
    """A rich table of columns by name, and how they are shown."""
    from rich.table import Table

    found = Table(title=title, title_justify="left")
    for name, how in columns.items():
        found.add_column(name, **how)
    for row in rows:
        found.add_row(*row)
    return found


def columns(how: Mapping[str, Any], *names: str) -> dict[str, Mapping[str, Any]]:
    """Several columns that are shown alike."""
    return dict.fromkeys(names, how)
