"""Records what we get for every figure of the papers in `broadsight/papers/ours.yaml`; `--check` only compares.

`broadsight verify` misses a figure where ours differs from its record, whether or not the paper prints the same: so no
model changes without a word. Figures that cannot be run here keep the record that they have.

    python benchmarks/record_figures.py [--check]
"""

import json
import sys
from pathlib import Path

from broadsight.papers.tables import recorded
from broadsight.papers.verify import shown, verify

FILE = Path(__file__).parents[1] / "broadsight" / "papers" / "ours.yaml"
ABOUT = (
    "# Ours of every published figure; written by benchmarks/record_figures.py, held against by `broadsight verify`.\n"
)


def main() -> int:
    rows: dict[str, dict[str, dict[str, str]]] = {}
    for check in verify():
        row = check.row.rpartition(": ")[2]
        ours = shown(check.ours) if check.ours is not None else recorded().get((check.family, row, check.figure))
        if ours is not None:
            rows.setdefault(check.family, {}).setdefault(row, {})[check.figure] = ours
    lines = [ABOUT]
    for family, some in rows.items():
        lines += [f"{family}:\n"]
        for row, found in some.items():
            figures = ", ".join(f"{json.dumps(figure)}: {ours}" for figure, ours in found.items())
            lines += [f"  {json.dumps(row)}: {{{figures}}}\n"]
    text = "".join(lines)
    if "--check" in sys.argv:
        return int(text != FILE.read_text("utf-8"))
    FILE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
