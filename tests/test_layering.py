"""Which room may import which: the arrows point one way. Read from the source, so that imports in functions count."""

import ast
import subprocess
import sys
from pathlib import Path

import broadsight

ARROWS = """layers → inspection → surgery → models, weights → losses → data → dense, training → runs → evaluation,
prediction, analysis, explanation, deployment, benchmark, papers → report, app → api → cli"""
RANK = {room.strip(): rank for rank, rooms in enumerate(ARROWS.split("→")) for room in rooms.split(",")}
# Imported by all, they import none of the rooms.
EVERYBODYS = {"errors": -4, "options": -3, "files": -3, "provenance": -3, "visual": -2}
ROOT = Path(broadsight.__file__).parent
FILES = sorted({*ROOT.rglob("*.py")} - {ROOT / "__init__.py", ROOT / "__main__.py"})


def imported(path: Path) -> list[str]:
    """Dotted names of all that a file imports."""
    package, found = ["broadsight", *path.relative_to(ROOT).parts[:-1]], []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found += [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
    return found


def test_imports__point_one_way():
    rank = {**RANK, **EVERYBODYS, "__version__": -9, "lazy": -9}
    wrong = []
    for path in FILES:
        mine = path.relative_to(ROOT).with_suffix("").parts[0]
        theirs = {name.split(".")[1] for name in imported(path) if name.startswith("broadsight.")} - {mine}
        wrong += [f"{path.relative_to(ROOT)}: {one}" for one in sorted(theirs) if rank[one] > rank[mine]]
    assert wrong == []


def test_timm__layers_know_no_registry_and_one_file_alone_private_modules():
    for path in (ROOT / "layers").rglob("*.py"):
        assert all(name.startswith("timm.layers.") for name in imported(path) if name.startswith("timm")), path
    private = {p.name for p in FILES for name in imported(p) if name.startswith("timm.") and "._" in name}
    assert private == {"_backbone.py"}


def test_command_line__is_parsed_without_torch():
    code = "import sys, broadsight.cli.main; print(sorted({'torch', 'timm', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
