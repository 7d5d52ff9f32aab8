"""From the fields of a Request to a command line, and back: what was typed becomes a Request."""

import inspect
import json
import os
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser

from ..errors import UsageError, first_line, nearest
from ..files import odd_kind
from ..options import Options, Setting, flag

Command = Callable[[Any], int]
Asked = TypeVar("Asked", bound=Options)
DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


class Wrong(Exception):
    """A value that an option cannot have; no ValueError, whose words argparse would replace by its own."""


class ConfigFile(ActionConfigFile):
    """A YAML file of options, checked before jsonargparse reads it."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        name = values if isinstance(values, str) else ""
        kind = None if name.startswith("/dev/fd/") else odd_kind(name)  # the shell opens those, as <(command)
        kind = "a folder" if os.path.isdir(name) else kind
        if kind is not None:  # a pipe or a device might never end
            parser.error(f"--config {name} is {kind}, not a file; expected a YAML file")
        if "\0" in name:
            parser.error(f"--config {name!r} has a zero byte in it, which no name has; leave that out")
        if not os.path.exists(name):
            parser.error(f"--config {name}: there is no such file; expected a YAML file")
        import yaml

        try:
            content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            parser.error(f"--config {name}: {first_line(error)}; expected a text file in YAML")
        if not isinstance(content, Mapping):
            parser.error(f"--config: expected lines such as `batch: 4`, got {content!r}")
        for key in content:
            if key not in parser.settings:
                hint = f" (did you mean {flag(near[0])}?)" if (near := nearest(key, parser.settings)) else ""
                parser.error(f"--config {name}: there is no option {key!r}{hint}")
        super().__call__(parser, cfg, values, option_string)


class Parser(ArgumentParser):
    """A parser that answers a mistake with one line instead of a page."""

    settings: Mapping[str, Setting] = {}

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        mark = "unrecognized arguments: "
        if message.startswith(mark):
            unknown = message.removeprefix(mark).strip().partition(" ")[0].partition("=")[0]
            message = message if unknown else f"{mark}an empty one, ''"
            known = {one.flag: one for one in self.settings.values()}
            for near in nearest(unknown, known or ("--version", "--help"))[:1]:
                one = known.get(near)
                named = one is not None and one.how.positional
                message += f" ({one.called} comes without --)" if named else f" (did you mean {near}?)"
        message = message.removeprefix('Parser key "config": ')
        raise UsageError(f"{message}; see `{self.prog} --help`")


def request_of(command: Command) -> type[Options]:
    """The class of the Request that a command takes."""
    return inspect.signature(command, eval_str=True).parameters["request"].annotation


def _add(parser: Parser, setting: Setting) -> None:
    how = setting.how
    options: dict[str, Any] = {"help": how.help, "type": _Reader(setting)}
    options |= {"metavar": how.metavar} if how.metavar else {}
    if not setting.required:
        plain: Any = None if setting.pairs else setting.default
        options["default"] = (",".join(map(str, plain)) or None) if setting.plural else plain
    if how.positional:  # what is missing is noticed later; a default would override what a --config file says
        options |= {"nargs": "*" if setting.plural else "?", "default": SUPPRESS}
        if setting.plural:
            options["type"] = str
        parser.add_argument(setting.name, **options)
    elif setting.kind is bool:
        del options["type"]
        parser.add_argument(setting.flag, action=ActionYesNo(no_prefix="no-"), **options)
    elif how.bare is not None:
        parser.add_argument(setting.flag, nargs="?", const=how.bare, **options)
    else:
        parser.add_argument(setting.flag, dest=setting.name, **options)


class _Reader:
    """Converts and checks a value; several values stay the text that they came as, for --print_config."""

    def __init__(self, setting: Setting):
        self.setting = setting

    def __call__(self, given: Any) -> Any:
        try:
            value = self.setting.read(given)
        except UsageError as error:
            raise Wrong(str(error)) from None
        return given if self.setting.plural or self.setting.pairs else value

    def __repr__(self) -> str:  # in --help
        kind = self.setting.kind
        if get_origin(kind) is Literal:
            return "{" + ",".join(map(str, get_args(kind))) + "}"
        text = self.setting.plural or self.setting.pairs or kind in (str, Any)
        return "text" if text else getattr(kind, "__name__", "text")


def description(kind: type[Options]) -> str:
    """What a command does, in a line."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def overview(commands: Mapping[str, type[Options]], version: str) -> Parser:
    """The parser of `broadsight` without a command: --help lists them, --version says which it is."""
    about = "Efficient vision models that see the whole picture."
    parser = Parser(prog="broadsight", description=about, version=version, allow_abbrev=False)
    words = "show the traceback of an error; works after a command too"
    parser.add_argument("--debug", action="store_true", help=words)
    listed = parser.add_subcommands(dest="command", metavar="COMMAND", required=True)
    for name, kind in commands.items():
        listed.add_subcommand(name, Parser(), help=description(kind))
    return parser


def parse(name: str, kind: type[Asked], argv: Sequence[str], configured: bool, typed: str) -> Asked:
    """The Request that `argv`, behind the command, makes; if `configured` with --config. `typed` is for records."""
    settings = kind.settings()
    argv = names_first(together(list(argv), settings), settings)
    parser = Parser(prog=f"broadsight {name}", description=description(kind), allow_abbrev=False)
    parser.settings = settings
    if configured:
        words = "YAML file with these options; --print_config shows one"
        parser.add_argument("--config", action=ConfigFile, help=words)
    for setting in settings.values():
        _add(parser, setting)
    try:
        found = parser.parse_args(argv).as_dict()
        found.pop("config", None)
        missing = next((one for one in settings.values() if one.required and found.get(one.name) in (None, [])), None)
        if missing is not None:
            parser.error(f"{name} needs {missing.called}: {missing.how.help}")
        words = {word.partition("=")[0] for word in argv}  # whatever the value
        flags = {one.name: one.flag for one in settings.values() if not one.how.positional}
        named = [name for name, option in flags.items() if words & {option, option.replace("--", "--no-", 1)}]
        return kind(**found, given=frozenset(named), command=typed)
    except Wrong as error:
        parser.error(str(error))


def together(argv: list[str], settings: Mapping[str, Setting]) -> list[str]:
    """Pairs of key=value as one JSON list at the end, however often and wherever an option named some.

    Likewise the values of an option that can be named more than once, as one word.
    """
    flags = {one.flag for one in settings.values() if one.pairs}
    joins = {one.flag: one.how.join for one in settings.values() if one.how.join}
    rest, pairs, left = [], {}, list(argv)
    several: dict[str, list[str]] = {}
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        if option in joins and (equals or (left and not left[0].startswith("--"))):
            several.setdefault(option, []).append(value if equals else left.pop(0))
            continue
        if option not in flags:
            rest.append(word)
            continue
        named = [value] if equals else [*takewhile(lambda one: "=" in one and not one.startswith("--"), left)]
        if not named:
            came = repr(left[0]) if left else "nothing"
            raise UsageError(f"{option} is followed by {came}; expected key=value, such as {option} epochs=10")
        pairs.setdefault(option, []).extend(named)
        left = left if equals else left[len(named) :]
    rest += [f"{option}={joins[option].join(given)}" for option, given in several.items()]
    return rest + [text for option, given in pairs.items() for text in (option, json.dumps(given))]


def names_first(argv: list[str], settings: Mapping[str, Setting]) -> list[str]:
    """Names before options, for commands that take names of two kinds: argparse, up to Python 3.11, takes what comes
    behind an option for too many, as in RUN --top 3 IMAGE."""
    if "--" in argv or sum(one.how.positional for one in settings.values()) < 2:
        return argv
    valued = {"--config": False}  # options that take a value, and whether they can do without
    valued |= {one.flag: one.how.bare is not None for one in settings.values() if one.kind is not bool}
    names, options, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        (options if word.startswith("-") else names).append(word)
        if word in valued and rest and not (valued[word] and rest[0].startswith("--")):
            options.append(rest.pop(0))
    return [*names, *options]
