"""Command lines that nobody should type: each is answered by one line and an exit code, and starts no work.

`seeds()` gives command lines as bytes, their words joined by SEPARATOR; `one(data)` runs such a line in this process
and raises AssertionError where the answer is not as promised.
"""

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Generator
from typing import Any
from unittest import mock

SEPARATOR = "\x1f"
NUMBERS = ("0", "-1", "nan", "inf", "1e309", "abc", "", "9" * 30, "9" * 5000, "1.5", "true", "[1]", "{}", "null", "--")
TEXTS = ("", "missing", ".", "a" * 300, "a" * 5000, "a/" * 3000, "a\0b", "\udcff", "\n", "-", "/dev/null/x", "\u2603")
TEXTS += ("a,b", ",,", "=", "a=b", "a=b=c", "[", "{", "!!python/object:x", "\x1b[31m", "--", "*", "hf-hub:a/b", "a@b")
# What follows a command so that it would fail by itself, for want of what is named.
NAMES = {"predict": ["zzz", "a.png"], "analyze": ["entropy", "zzz"], "convert": ["a.pth", "b.safetensors"]}
# Where work begins: a command line that gets there is well formed, and ends.
WORK = (
    "training.run:prepare",
    "benchmark.run:measure",
    "benchmark.scaling:measure",
    "evaluation.run:evaluate_classifiers",
    "evaluation.dense:evaluate_dense",
    "runs.dense_model:open_dense",
    "runs.classifier:open_classifier",
    "analysis.run:analyze_models",
    "analysis.run:analyze_front",
    "data.sources.unlabelled:find_images",
    "app.candidates:open_candidates",
    "deployment.run:_classifier",
    "papers.verify:verify",
    "papers.verify:catalogue",
    "report.run:report_run",
    "weights.released_stvit:convert_release",
    "files:write_text",
    "training.run:check_twin",
)


class Started(BaseException):
    """Work would begin here."""


def lines(command: str) -> Generator[list[str], None, None]:
    """Wrong command lines of a command: every option with every value that it may not have."""
    from broadsight.cli.main import COMMANDS
    from broadsight.cli.parser import request_of

    names = NAMES.get(command, ["zzz"])
    for name, one in request_of(COMMANDS[command]).settings().items():
        for value in dict.fromkeys((*NUMBERS, *TEXTS)):
            if one.how.positional:
                place = 0 if name in ("run", "measure", "source", "models", "pattern", "families", "runs") else 1
                yield [command, *names[:place], value, *names[place + 1 :]]
            elif one.pairs:
                yield [command, *names, one.flag, f"groups={value}"]
            elif one.kind is bool:
                yield [command, *names, f"{one.flag}={value}"]
            else:
                yield [command, *names, one.flag, value]


def seeds() -> list[bytes]:
    """Some of each kind, and lines that were answered badly before."""
    from broadsight.cli.main import COMMANDS

    found = [line for command in COMMANDS for line in list(lines(command))[:: len(NUMBERS)]]
    found += [
        [],
        ["--help"],
        ["benhc"],
        ["report", "zzz", "--threads=0"],
        ["train", "scenes:8", "--model", "test_vit", "--broadcast", "cb", "--broadcast-args", "foo=1"],
        ["train", "scenes:8", "--out", "o" * 300],
        ["train", "--set", "epochs=1", "epochs=2"],
        ["train", "--set", "foo=1"],
        ["train", "--data", "x"],
        ["train", "scenes:8", "--task", "detect", "--set", "mixup=0.5"],
        ["models", "x" * 10_000],
        ["eval", "test_vit", "--epsilons", "1"],
    ]
    return [to_bytes(line) for line in found]


def to_bytes(argv: list[str]) -> bytes:
    return SEPARATOR.join(argv).encode("utf-8", "surrogateescape")


def to_words(data: bytes) -> list[str]:
    """A command line from any bytes. --debug is left out: it asks for a traceback."""
    words = data.decode("utf-8", "surrogateescape").split(SEPARATOR) if data else []
    return [word for word in words if word != "--debug"]


@contextlib.contextmanager
def without_work() -> Generator[None, None, None]:
    """In a folder of its own, and where work would begin, it ends."""

    stopped: list[tuple[Any, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_undo, stopped)
        for place in WORK:
            name = place.partition(":")[2]
            module, stop = importlib.import_module(f"broadsight.{place.partition(':')[0]}"), _stop()
            stopped.append((stop, getattr(module, name)))
            stack.enter_context(mock.patch.object(module, name, stop))
        stack.enter_context(mock.patch.object(importlib.import_module("broadsight.app.server"), "need_gradio"))
        before = os.getcwd()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.chdir(folder)
        try:
            yield
            assert os.listdir(folder) == [], f"left behind: {os.listdir(folder)}"
        finally:
            os.chdir(before)


def _stop() -> Any:
    def stop(*arguments: Any, **options: Any) -> None:
        raise Started

    return stop


def _undo(stopped: list[tuple[Any, Any]]) -> None:
    """Give modules that were imported meanwhile what they would have found otherwise."""
    originals = {id(stop): original for stop, original in stopped}
    for module in [module for name, module in sys.modules.items() if name.startswith("broadsight.")]:
        for name in [name for name, value in vars(module).items() if id(value) in originals]:
            setattr(module, name, originals[id(vars(module)[name])])


def run(argv: list[str]) -> tuple[int | None, str, str]:
    """Exit code, or None where work would have begun; what was printed; and the complaints."""
    from broadsight.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(argv))
        except Started:
            code = None
    return code, out.getvalue(), err.getvalue()


def judge(argv: list[str], code: int | None, err: str) -> None:
    """Raise an AssertionError if a command line is not answered as promised."""
    shown = f"{[word[:60] for word in argv]}: exit code {code}: {err[:500]!r}"
    assert code in (None, 0, 1, 2), shown
    for sign in ("Traceback", "frame #", "weights_only", "()", "\x1b"):
        assert sign not in err or not argv, shown
    complaints = [line for line in err.splitlines() if line.startswith("broadsight: ")]
    assert not argv or len(complaints) == (1 if code else 0), shown
    if complaints:
        assert err.endswith(complaints[-1] + "\n") and len(complaints[-1]) < 2500, shown
        assert re.search(r"\w", complaints[-1].removeprefix("broadsight: ")), shown


def one(data: bytes) -> None:
    """Run a command line, without its work."""
    argv = to_words(data)
    with without_work():
        code, _, err = run(argv)
        judge(argv, code, err)
