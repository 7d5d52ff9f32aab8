"""Documents are executed: every Python block, every command of the README, and the generated tables are current."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from broadsight import benchmark
from broadsight.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if blocks(name, "python")])
def test_python_blocks_run(document, tmp_path):
    # A process of its own: an example that registers a model must not leave it to the other tests.
    script = tmp_path / "blocks.py"
    script.write_text("import torch\ntorch.set_num_threads(1)\n" + "\n".join(blocks(document, "python")), "utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "GEMM_SIZES", (64,))
    lines = "\n".join(blocks("README.md", "bash")).splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("broadsight")]
    assert {command[0] for command in commands} == {"models", "verify", "bench"}
    for command in commands:
        if command[0] == "verify":
            command = [*command, "mat"]  # all families: tests/test_verify.py
        if command[0] == "bench":
            command = [*command, "--rounds", "1", "--warmup", "0"]
        assert main(command) == 0, capsys.readouterr().err
    assert (tmp_path / "speed.png").stat().st_size > 1000


def test_make_targets_of_the_readme_exist():
    named = re.findall(r"^make (\S+)", "\n".join(blocks("README.md", "bash")), re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert named and set(named) <= set(targets)


def test_generated_tables_are_current():
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text("utf-8")):
            assert (ROOT / document).parent.joinpath(target).exists(), f"{document} links to {target}"
