"""The command that looks inside: explain."""

import sys
from typing import TYPE_CHECKING, Any

from .. import api
from ..errors import printable
from ..explanation.request import Request
from ..visual.terminal import show
from .parser import DONE, INTERRUPTED, WRONG_USAGE

if TYPE_CHECKING:
    from rich.table import Table

FEW = 20  # lines that the terminal shows


def explain(request: Request) -> int:
    """Look at images, write a sheet for each, and show what was found."""
    found = api.explain(request, progress=True, keep=True)
    if request.json != "-" and found.entries:
        show(_table(found.entries[:FEW]))
        more = f"the first {FEW} of {len(found.entries):,} images; " if len(found.entries) > FEW else ""
        print(f"{more}sheets: {found.folder} (with explanation.json)")
    for name, reason in [*found.errors.items()][:FEW]:
        print(f"broadsight: {printable(name)} cannot be read: {printable(reason)}", file=sys.stderr)
    if len(found.errors) > FEW:
        print(f"broadsight: and {len(found.errors) - FEW:,} more cannot be read", file=sys.stderr)
    if found.interrupted:
        return INTERRUPTED
    return DONE if found.entries else WRONG_USAGE  # nothing that was named is an image


def _table(entries: list[dict[str, Any]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("file", "class"):
        table.add_column(name, overflow="fold")
    table.add_column("%", justify="right", no_wrap=True)
    for name in ("explained", "sheet"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        best = entry["predictions"][0]
        cells = [entry["file"], best["class"], f"{100 * best['probability']:.1f}"]
        cells += [entry["explained"]["class"], entry["sheet"]]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
