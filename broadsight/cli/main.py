"""The `broadsight` command: every command is a function of a Request, whose fields are its options.

Nothing heavy is imported until a command runs, so that help and mistakes are answered at once.
"""

import os
import shlex
import sys
import traceback
from importlib import import_module
from io import TextIOWrapper

from .. import __version__
from ..errors import is_usage, one_line, printable, unknown
from .parser import DONE, FAILED, INTERRUPTED, WRONG_USAGE, Command, overview, parse, request_of

NAMES = ("models", "verify", "bench", "export", "train", "eval", "predict", "report", "analyze", "explain", "gallery")
COMMANDS: dict[str, Command] = {
    name: getattr(import_module(f".{name}", __package__), name) for name in (*NAMES, "recipes", "convert", "app")
}
CONFIGURED = {"bench", "train", "eval", "analyze"}  # take their options from a YAML file as well


def main(argv: list[str] | None = None) -> int:
    """Run one command: what follows `broadsight` on the command line, of this process if None. -> the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None and isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no Unicode
    debug = "--debug" in given
    try:
        code = _run([argument for argument in given if argument != "--debug"], shlex.join(["broadsight", *given]))
        sys.stdout.flush()  # here, so that a reader who has left is noticed before the interpreter shuts down
        return code
    except BrokenPipeError:  # whoever read us has seen enough; what is still buffered must go somewhere at shutdown
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED, debug)
    except Exception as error:
        if is_usage(error):
            return _complain(one_line(error), WRONG_USAGE, debug)
        return _complain(one_line(error) + ("" if debug else "; --debug shows where"), FAILED, debug)


def _run(argv: list[str], typed: str) -> int:
    try:
        if not argv or argv[0].startswith("-"):
            parser = overview({name: request_of(command) for name, command in COMMANDS.items()}, __version__)
            if not argv:
                parser.print_help(sys.stderr)
                return WRONG_USAGE
            parser.parse_args(argv)
            return DONE
        if argv[0] not in COMMANDS:
            raise unknown("command", argv[0], COMMANDS)
        command = COMMANDS[argv[0]]
        request = parse(argv[0], request_of(command), argv[1:], argv[0] in CONFIGURED, typed)
    except SystemExit as leave:  # how argparse ends after --help, --version and --print_config
        return leave.code if isinstance(leave.code, int) else DONE
    return command(request)


def _complain(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"broadsight: {printable(message)}", file=sys.stderr)
    return code
