"""What a terminal shows: tables, a progress bar, numbers, JSON."""

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ..errors import printable
from ..files import write_text

Progress = Callable[[int, int | None, str], None]


def number(value: float | None, unit: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _console() -> Any:
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
    """Text with its line breaks, and without anything else that is no letter."""
    return "\n".join(map(printable, text.split("\n")))


def show(table: Any, whole: bool = False) -> None:
    """Print a table of rich's; if `whole`, then rather wider than the terminal than with figures cut off."""
    from rich.measure import Measurement

    console = _console()
    if whole or not console.is_terminal:  # a file or a pipe has no width
        natural = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        console.width = max(natural, console.width if console.is_terminal else 0)
    console.print(table)


def print_json(record: Any, path: str) -> None:
    """JSON to the standard output, where the path is "-", or into a file."""
    text = json.dumps(record, indent=1, allow_nan=False)
    print(text) if path == "-" else write_text(text + "\n", path)


def note(text: str) -> None:
    print(f"note: {printable(text)}", file=sys.stderr)


@contextmanager
def progress_bar() -> Generator[Progress, None, None]:
    """A progress bar with the time left, on stderr and only if somebody watches; a total of None is unknown."""
    from rich import progress as parts
    from rich.console import Console

    console = Console(stderr=True)
    columns = parts.BarColumn(), parts.MofNCompleteColumn(), parts.TimeElapsedColumn(), parts.TimeRemainingColumn()
    doing_what = parts.TextColumn("{task.description}", markup=False)
    # auto_refresh would draw from a thread, whose time would be charged to what is measured; stdout goes to its reader
    options: Any = dict(transient=True, auto_refresh=False, redirect_stdout=False, disable=not console.is_terminal)
    with parts.Progress(*columns, doing_what, console=console, **options) as bar:
        task = bar.add_task("")

        def update(done: int, total: int | None, doing: str) -> None:
            bar.update(task, completed=done, total=total, description=printable(doing), refresh=True)

        yield update
