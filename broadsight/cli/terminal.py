"""What a command shows: tables, a progress bar, numbers; and where it may write."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Progress = Callable[[int, int | None, str], None]


def check_writable(path: str | None) -> None:
    """Refuse an output file before the work, not after it."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"cannot write {path!r}: there is no folder {str(folder)!r}; create it first")
    if Path(path).is_dir():
        raise ValueError(f"cannot write {path!r}: it is a folder; give the name of a file in it")
    if not os.access(path if Path(path).exists() else folder, os.W_OK) or not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {path!r}: permission denied; choose another folder")


def check_creatable(folder: Path) -> None:
    """Likewise a folder that will be made."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "permission denied" if there.is_dir() else f"{there} is a file"
        raise ValueError(f"cannot write to {folder}: {what}; choose another --out")


def number(value: float | None, unit: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _console() -> "Console":
    from rich.console import Console
    from rich.text import Text

    class Pipe(Console):
        def on_broken_pipe(self) -> None:  # rich would leave with code 1; `main` knows better
            raise BrokenPipeError

        def render_str(self, text: str, **options: Any) -> Text:
            # what stands in a table may be the name of a class or file: [red] and escape sequences are letters there
            options |= {"markup": False, "emoji": False}
            return super().render_str(printable_lines(text), **options)

    return Pipe(markup=False, emoji=False)


def printable_lines(text: str) -> str:
    """Text for a terminal with its line breaks, and without anything else that is no letter."""
    return "\n".join(map(printable, text.split("\n")))


def show(table: "Table", whole: bool = False) -> None:
    """Print a table; if `whole`, then rather wider than the terminal than with figures cut off."""
    from rich.measure import Measurement

    console = _console()
    if whole or not console.is_terminal:  # a file or a pipe has no width
        natural = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        console.width = max(natural, console.width if console.is_terminal else 0)
    console.print(table)


@contextmanager
def progress_bar() -> Generator[Progress, None, None]:
    """A progress bar with the time left, on stderr and only if somebody watches; a total of None is unknown."""
    from rich import progress as parts
    from rich.console import Console

    console = Console(stderr=True)
    # auto_refresh would draw from another thread, and its CPU time would be charged to what is being measured
    bar = parts.Progress(
        parts.BarColumn(),
        parts.MofNCompleteColumn(),
        parts.TimeElapsedColumn(),
        parts.TimeRemainingColumn(),
        parts.TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("")

        def update(done: int, total: int | None, doing: str) -> None:
            bar.update(task, completed=done, total=total, description=printable(doing), refresh=True)

        yield update
