"""The `broadsight` command: every command is a function here, and its signature is its interface.

Nothing heavy is imported until a command runs, so that help and mistakes are answered at once.
"""

import os
import sys
import traceback
from contextvars import copy_context
from io import TextIOWrapper

from .. import __version__
from ..errors import first_line, is_usage, one_line, unknown
from .analyze import analyze
from .app import app
from .bench import bench
from .convert import convert
from .evaluate import eval
from .explain import explain
from .export import export
from .gallery import gallery
from .models import models
from .parser import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG_USAGE,
    Command,
    UsageError,
    build_parser,
    check_values,
    explicit,
    named_in,
    names_first,
    remember,
    together,
)
from .predict import predict
from .recipes import recipes
from .report import report
from .terminal import printable
from .train import train
from .verify import verify

COMMANDS: dict[str, Command] = {
    "models": models,
    "verify": verify,
    "bench": bench,
    "export": export,
    "train": train,
    "eval": eval,
    "predict": predict,
    "report": report,
    "analyze": analyze,
    "explain": explain,
    "gallery": gallery,
    "recipes": recipes,
    "convert": convert,
    "app": app,
}
CONFIGURED = {bench, train, eval, analyze}  # take their options from a YAML file as well


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: What follows `broadsight` on the command line; taken from the process if None.

    Returns:
        The exit code: 0 done, 1 failed while working, 2 wrong usage, 130 interrupted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None and isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no Unicode
    remember(given)
    debug = "--debug" in given
    try:
        code = _run([argument for argument in given if argument != "--debug"])
        sys.stdout.flush()  # here, so that a reader who has left is noticed before the interpreter shuts down
        return code
    except BrokenPipeError:
        # Whoever read us has seen enough. What is still buffered must go somewhere at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED, debug)
    except Exception as error:
        if is_usage(error):
            return _complain(one_line(error), WRONG_USAGE, debug)
        where = "" if debug else "; --debug shows where"
        return _complain(one_line(error) + where, FAILED, debug)


def _run(argv: list[str]) -> int:
    argv = names_first(together(argv, COMMANDS), COMMANDS)
    known = {argv[0]: COMMANDS[argv[0]]} if argv and argv[0] in COMMANDS else COMMANDS  # others are not asked for
    parser = build_parser(known, CONFIGURED, __version__)
    if not argv:
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise unknown("command", argv[0], COMMANDS)
    try:
        given = parser.parse_args(argv)
    except SystemExit as leave:  # how argparse ends after --help, --version and --print_config
        return leave.code if isinstance(leave.code, int) else DONE
    except (UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config: {first_line(error)}; expected a text file in YAML") from None
    command = COMMANDS[given.command]
    values = {name: value for name, value in given[given.command].as_dict().items() if name != "config"}
    explicit(named_in(argv, command))
    check_values(command, values)
    return copy_context().run(command, **values)  # what a command allows ends with it


def _complain(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"broadsight: {printable(message)}", file=sys.stderr)
    return code
