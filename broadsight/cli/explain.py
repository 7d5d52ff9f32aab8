"""The command that looks inside: explain."""

import sys

from .. import api
from ..errors import printable
from ..explanation.request import Request
from ..visual.terminal import show
from .parser import DONE, INTERRUPTED, WRONG_USAGE
from .tables import NUMBER, PATH, columns, table

FEW = 20  # lines that the terminal shows


def explain(request: Request) -> int:
    """Look at images, write a sheet for each, and show what was found."""
    found = api.explain(request, progress=True, keep=True)
    if request.json != "-" and found.entries:
        rows = []
        for entry in found.entries[:FEW]:
            best = entry["predictions"][0]
            cells = [entry["file"], best["class"], f"{100 * best['probability']:.1f}"]
            rows.append(map(printable, [*cells, entry["explained"]["class"], entry["sheet"]]))
        show(table({**columns(PATH, "file", "class"), "%": NUMBER, **columns(PATH, "explained", "sheet")}, rows))
        more = f"the first {FEW} of {len(found.entries):,} images; " if len(found.entries) > FEW else ""
        print(f"{more}sheets: {found.folder} (with explanation.json)")
    for name, reason in [*found.errors.items()][:FEW]:
        print(f"broadsight: {printable(name)} cannot be read: {printable(reason)}", file=sys.stderr)
    if len(found.errors) > FEW:
        print(f"broadsight: and {len(found.errors) - FEW:,} more cannot be read", file=sys.stderr)
    for reason in [*found.unasked.values()][:FEW]:
        print(f"broadsight: {reason}", file=sys.stderr)
    if found.interrupted:
        return INTERRUPTED
    return DONE if found.entries else WRONG_USAGE  # nothing that was named is an image
