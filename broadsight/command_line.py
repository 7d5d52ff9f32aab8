"""From the signatures of commands to a command line: every parameter says in its annotation how it appears there."""

import inspect
import json
import re
import shlex
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn, get_args

from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser

Command = Callable[..., int]
DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Arg:
    """How a parameter appears on the command line.

    Args:
        help: One line.
        positional: Comes without a name, as often as wanted if the parameter is a list.
        bare: Value of an option that is named without one.
        pairs: Takes any number of key=value, and may be named several times.
    """

    help: str
    positional: bool = False
    metavar: str | None = None
    bare: str | None = None
    pairs: bool = False


class UsageError(ValueError):
    """The command line cannot be understood."""


class Parser(ArgumentParser):
    """A parser that answers a mistake with one line instead of a page."""

    known: Mapping[str, Command] = {}  # all commands, for hints

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        command = getattr(self, "subcommand", None)
        message = re.sub(r'Parser key "([\w.]+)":\s*', lambda key: flag(key[1]) + ": ", message)
        message = re.sub(r"(?:an? )?<class '(\w+)'>", r"\1", message)
        message = re.sub(r"an? typing\.Literal\[(.*?)\]", r"one of \1", message)
        message = re.sub(r"Expected (.*?)\. Got value: ", r"expected \1, got ", message)
        message = re.sub(
            r"Does not validate against any of the Union.*?\[(\w+), NoneType\].*?Given value: ",
            r"expected \1, got ",
            message,
            flags=re.DOTALL,
        )
        missing = re.search(r"arguments are required: (\w+)\.(\w+)", message)
        if missing:
            command, name = missing.groups()
            arg = arguments_of(self.known[command])[name]
            message = f"{command} needs {arg.metavar}: {arg.help}"
        unknown = re.search(r"unrecognized arguments: .*?(--[\w-]+)|'(\w+)' does not accept option '(\w+)'", message)
        if unknown:
            command = unknown[2] or command
            options = [flag(name) for name in arguments_of(self.known[command])] if command else ["--version", "--help"]
            near = get_close_matches(unknown[1] or flag(unknown[3]), options, n=1)
            message += f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"{message}; see `broadsight {command + ' ' if command else ''}--help`")


def build_parser(known: Mapping[str, Command], configured: Set[Command], version: str) -> Parser:
    """A parser with a sub-command for each function.

    Args:
        configured: Those that take their options from a YAML file as well.
    """
    parser = Parser(
        prog="broadsight",
        description="Efficient vision models that see the whole picture.",
        version=version,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error; works after a command too"
    )
    commands = parser.add_subcommands(dest="command", metavar="COMMAND", required=True)
    for name, function in known.items():
        options = _subparser(function, function in configured)
        subparser = commands.add_subcommand(name, options, help=inspect.getdoc(function))
        subparser.prog, options.known = f"broadsight {name}", known
    parser.known = known
    return parser


def _subparser(function: Command, configured: bool) -> Parser:
    """Options from a signature.

    jsonargparse could read the signature alone, but would spell a flag `--channels_last true`, take no list of
    positional names, and find no help without another dependency.
    """
    parser = Parser(description=inspect.getdoc(function))
    if configured:
        parser.add_argument(
            "--config", action=ActionConfigFile, help="YAML file with these options; --print_config shows one"
        )
    for name, parameter in inspect.signature(function).parameters.items():
        kind, arg = get_args(parameter.annotation)
        required = parameter.default is inspect.Parameter.empty
        options: dict[str, Any] = {"help": arg.help}
        if not required:
            options["default"] = parameter.default
        if arg.metavar:
            options["metavar"] = arg.metavar
        if arg.positional:
            many = list[str] in (kind, *get_args(kind))
            if many or not required:
                options["nargs"] = ("+" if required else "*") if many else "?"
            if not many and not required:  # or its absence would override what a --config file says
                options["default"] = SUPPRESS
            parser.add_argument(name, type=str if many else kind, **options)
        elif kind is bool:
            parser.add_argument(flag(name), action=ActionYesNo(no_prefix="no-"), **options)
        elif arg.bare is not None:
            parser.add_argument(flag(name), type=kind, nargs="?", const=arg.bare, **options)
        else:
            parser.add_argument(flag(name), dest=name, type=kind, **options)
    return parser


def together(argv: list[str], known: Mapping[str, Command]) -> list[str]:
    """Pairs of key=value as one JSON list at the end, however often and wherever an option named some."""
    if not argv or argv[0] not in known:
        return argv
    flags = {flag(name) for name, arg in arguments_of(known[argv[0]]).items() if arg.pairs}
    rest, pairs = [], {}
    position = 0
    while position < len(argv):
        option, equals, value = argv[position].partition("=")
        position += 1
        if option not in flags:
            rest.append(argv[position - 1])
            continue
        given = pairs.setdefault(option, [])
        if equals:
            given.append(value)
            continue
        start = position
        while position < len(argv) and "=" in argv[position] and not argv[position].startswith("--"):
            position += 1
        given += argv[start:position]
        if start == position:
            came = f"{argv[position]!r}" if position < len(argv) else "nothing"
            raise UsageError(f"{option} is followed by {came}; expected key=value, such as {option} epochs=10")
    return rest + [text for option, given in pairs.items() for text in (option, json.dumps(given))]


def names_first(argv: list[str], known: Mapping[str, Command]) -> list[str]:
    """Names before options, for commands that take names of two kinds.

    Else argparse, up to Python 3.11, takes what comes behind an option for too many: RUN --top 3 IMAGE.
    """
    if not argv or argv[0] not in known or "--" in argv:
        return argv
    parameters = inspect.signature(known[argv[0]]).parameters
    kinds = {flag(name): get_args(parameter.annotation) for name, parameter in parameters.items()}
    if sum(arg.positional for _, arg in kinds.values()) < 2:
        return argv
    valued = {"--config": False}  # options that take a value, and whether they can do without
    valued |= {option: arg.bare is not None for option, (kind, arg) in kinds.items() if kind is not bool}
    names, options, rest = [], [], argv[1:]
    while rest:
        word = rest.pop(0)
        (options if word.startswith("-") else names).append(word)
        if word in valued and rest and not (valued[word] and rest[0].startswith("--")):
            options.append(rest.pop(0))
    return [argv[0], *names, *options]


def value_of(text: str) -> Any:
    """What a text means in YAML, which knows numbers, truth values and lists; 1e-3 is a number too."""
    import yaml

    try:
        return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def arguments_of(function: Command) -> dict[str, Arg]:
    return {name: get_args(p.annotation)[1] for name, p in inspect.signature(function).parameters.items()}


def flag(name: str) -> str:
    """The option of a parameter; `class_` is --class, which Python keeps for itself."""
    return "--" + name.removesuffix("_").replace("_", "-")


_typed = "broadsight"


def remember(argv: Sequence[str]) -> None:
    """Keep what was typed, for the records of commands."""
    global _typed
    _typed = shlex.join(["broadsight", *argv])


def typed() -> str:
    """The command line that is being run."""
    return _typed


def register_models() -> Sequence[str]:
    """Make timm know our models; the names of their families."""
    return import_module(".models", __package__).FAMILIES
