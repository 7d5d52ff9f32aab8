"""Documents are executed: every Python block, every command of the README, and the generated tables are current."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from broadsight.benchmark import run as benchmark
from broadsight.cli.main import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text("utf-8"), re.DOTALL | re.MULTILINE)


WITH_PYTHON = [name for name in DOCUMENTS if blocks(name, "python")]

# A process of its own for each document, since an example that registers a model must not leave it to others. They
# share the import of what is not ours; our package each imports itself.
RUN_EACH = """
import os, runpy, sys, traceback
import timm, torch
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    child = os.fork()
    if child:
        with open(folder + "/code", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        continue
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
    code = 1
    try:
        assert "broadsight" not in sys.modules
        runpy.run_path("blocks.py", run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Where each document's blocks were run: its exit code and what it wrote to stderr."""
    folders = {name: tmp_path_factory.mktemp("blocks") for name in WITH_PYTHON}
    for name, folder in folders.items():
        folder.joinpath("blocks.py").write_text("\n".join(blocks(name, "python")), "utf-8")
    subprocess.run([sys.executable, "-c", RUN_EACH, *map(str, folders.values())], check=True, stdout=subprocess.DEVNULL)
    return folders


@pytest.mark.parametrize("document", WITH_PYTHON)
def test_python_blocks_run(document, folders):
    folder = folders[document]
    assert folder.joinpath("code").read_text() == "0", folder.joinpath("stderr").read_text()


def test_commands_of_the_readme_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "GEMM_SIZES", (64,))
    lines = "\n".join(blocks("README.md", "bash")).splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("broadsight")]
    assert {command[0] for command in commands} == {"models", "verify", "bench", "train", "recipes", "eval", "export"}
    for command in commands:
        if command[0] == "verify":
            command = [*command, "partialformer"]  # all families: tests/papers/test_verify.py
        if command[0] == "bench":
            command = [*command, "--batch", "1", "--rounds", "1", "--warmup", "0"]
        assert main(command) == 0, capsys.readouterr().err
    assert (tmp_path / "speed.png").stat().st_size > 1000


def test_make_targets_of_the_readme_and_links_between_documents_lead_somewhere():
    named = re.findall(r"^make (\S+)", "\n".join(blocks("README.md", "bash")), re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert named and set(named) <= set(targets)
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text("utf-8")):
            assert (ROOT / document).parent.joinpath(target).exists(), f"{document} links to {target}"


# The sizes are counted anew in test_verify, against the papers; that the tables say the same can wait.
@pytest.mark.parametrize("options", [["--fast"], pytest.param([], marks=pytest.mark.slow)])
def test_generated_tables_are_current(monkeypatch, capsys, options):
    monkeypatch.setattr(sys, "argv", ["docs/generate.py", "--check", *options])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "docs" / "generate.py"), run_name="__main__")
    assert done.value.code == 0, capsys.readouterr().out
