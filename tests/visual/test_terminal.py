"""What a terminal shows of names that others have chosen: letters, no orders."""

import io
import re
from contextlib import redirect_stdout

from rich.table import Table
from rich.text import Text

from broadsight.visual.terminal import progress_bar, show
from tests.data.nasty_names import NASTY


def test_table_and_progress__names_are_letters(monkeypatch):
    table = Table(title="[bold]title[/bold] \x1b[31m")
    table.add_column("[red]column")
    for name in NASTY:
        table.add_row(name)
    table.add_row(Text("two\nlines"))
    with redirect_stdout(io.StringIO()) as out:
        show(table)
    shown = out.getvalue()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
    for text in ("[bold]title[/bold] \\x1b[31m", "[red]column", "[red]x[/red]", "[/]", ":warning:", "[link=http"):
        assert text in shown
    # A file called [/red] must not end what is being done.
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda console: True))
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stdout(io.StringIO()), progress_bar() as progress:
        for place, name in enumerate(NASTY):
            progress(place, len(NASTY), name)
