"""From the signatures of commands to a command line: every parameter says in its annotation how it appears there."""

import inspect
import json
import re
import shlex
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser

from ..errors import UsageError, nearest, refuse_idle
from ..files import odd_kind

Command = Callable[..., int]
DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
LARGEST = 2**63 - 1  # whole number that torch and numpy take


@dataclass(frozen=True)
class Arg:
    """How a parameter appears on the command line.

    Args:
        help: One line.
        positional: Comes without a name, as often as wanted if the parameter is a list.
        bare: Value of an option that is named without one.
        pairs: Takes any number of key=value, and may be named several times.
        of: What the option is for, such as "classifiers"; without one of these it would be ignored, so it is refused,
            see `refuse_ignored`. Nothing means that it always counts.
        least, most: Bounds of a number; all numbers are finite.
    """

    help: str
    positional: bool = False
    metavar: str | None = None
    bare: str | None = None
    pairs: bool = False
    of: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None


AllowOutside = Annotated[bool, Arg("let lists and COCO files name files outside of their own folder")]


class ConfigFile(ActionConfigFile):
    """A file of options; a pipe or a device might never end. One that the shell opens, as <(command), does."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        name = values if isinstance(values, str) else ""
        kind = None if name.startswith("/dev/fd/") else odd_kind(name)
        if kind is not None:
            parser.error(f"--config {name} is {kind}, not a file; expected a YAML file")
        if "\0" in name:
            parser.error(f"--config {name!r} has a zero byte in it, which no name has; leave that out")
        super().__call__(parser, cfg, values, option_string)


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
            r"Does not validate against any of the Union.*?\[([\w\[\]]+), NoneType\].*?Given value: ",
            r"expected \1, got ",
            message,
            flags=re.DOTALL,
        )
        message = re.sub(r"^Unexpected config: ", "--config: expected lines such as `batch: 4`, got ", message)
        missing = re.search(r"arguments are required: (\w+)\.(\w+)", message)
        if missing:
            command, name = missing.groups()
            arg = arguments_of(self.known[command])[name]
            message = f"{command} needs {arg.metavar}: {arg.help}"
        unknown = re.search(r"unrecognized arguments: .*?(--[\w-]+)|'(\w+)' does not accept option '(\w+)'", message)
        if unknown:
            command = unknown[2] or command
            message += self._hint(command, unknown[1] or flag(unknown[3]))
        raise UsageError(f"{message}; see `broadsight {command + ' ' if command else ''}--help`")

    def _hint(self, command: str | None, unknown: str) -> str:
        """What may have been meant by an unknown option."""
        arguments = arguments_of(self.known[command]) if command else {}
        options = [flag(name) for name, arg in arguments.items() if not arg.positional]
        names = {flag(name): arg.metavar for name, arg in arguments.items() if arg.positional}
        near = nearest(unknown, [*names, *options] if command else ["--version", "--help"])
        if not near:
            return ""
        return f" ({names[near[0]]} comes without --)" if near[0] in names else f" (did you mean {near[0]}?)"


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
            "--config", action=ConfigFile, help="YAML file with these options; --print_config shows one"
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
        value = float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeError, RecursionError):
        return text
    if isinstance(value, int) and abs(value) >= 2**31:
        raise UsageError(f"{_short(value)} is too large a number; expected less than {2**31}")
    return value


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


def check_values(function: Command, values: Mapping[str, Any]) -> None:
    """Refuse numbers that no option can mean, by the bounds of each, and names that no file can have."""
    for name, arg in arguments_of(function).items():
        given = values.get(name)
        words = _called(name, arg)
        for one in given if isinstance(given, list) else [given]:
            if isinstance(one, str) and "\0" in one:
                raise UsageError(f"{words} {one!r} has a zero byte in it, which no name has; leave that out")
            if isinstance(one, str) and not one.strip():
                raise UsageError(f"{words} is empty; expected {arg.help}")
            if isinstance(one, (int, float)) and not isinstance(one, bool):
                _check_number(words, one, arg)


def _called(name: str, arg: Arg) -> str:
    return (arg.metavar or name.upper()) if arg.positional else flag(name)


def _check_number(words: str, value: float, arg: Arg) -> None:
    if not abs(value) <= (LARGEST if isinstance(value, int) else sys.float_info.max):  # false for nan
        raise UsageError(f"{words} {_short(value)}; expected a number that is not so large, and not nan")
    if arg.least is not None and value < arg.least:
        raise UsageError(f"{words} {value}; expected {arg.least} or more")
    if arg.most is not None and value > arg.most:
        raise UsageError(f"{words} {value}; expected {arg.least or 0} to {arg.most}")


def _short(value: float) -> str:
    text = str(value) if isinstance(value, float) or value.bit_length() < 200 else "with hundreds of digits"
    return text if len(text) <= 40 else f"{text[:20]}..."


def refuse_ignored(function: Command, values: Mapping[str, Any], facts: Mapping[str, str | None]) -> None:
    """Refuse options that would have no effect.

    Args:
        values: All that the command was called with.
        facts: See `refuse_idle`; their names are those in the `of` of options.
    """
    parameters = inspect.signature(function).parameters
    given = [name for name in parameters if name in values]
    given = [name for name in given if name in _explicit or values[name] not in (parameters[name].default, [])]
    options = arguments_of(function)
    refuse_idle({name: flag(name) for name in given}, {name: options[name].of for name in given}, facts)


def refuse_all(function: Command, values: Mapping[str, Any], but: Sequence[str], why: str) -> None:
    """Refuse every option that is given but these."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in but and (name in _explicit or values.get(name, []) not in (parameter.default, [])):
            raise UsageError(f"{_called(name, arguments_of(function)[name])}: {why}; leave it out")


_explicit: frozenset[str] = frozenset()


def named_in(argv: Sequence[str], function: Command) -> set[str]:
    """The options that a command line names, whatever their value; a --config file may hold all of them."""
    words = {word.partition("=")[0] for word in argv}
    flags = {name: flag(name) for name, arg in arguments_of(function).items() if not arg.positional}
    return {name for name, option in flags.items() if words & {option, option.replace("--", "--no-", 1)}}


def explicit(names: Set[str] | None = None) -> Set[str]:
    """The options that the user has named; sets them if given some."""
    global _explicit
    if names is not None:
        _explicit = frozenset(names)
    return _explicit


def register_models() -> Sequence[str]:
    """Make timm know our models; the names of their families."""
    return import_module("broadsight.models").FAMILIES


MOST = 4096  # threads or processes of one command

# What options are for; see `Arg.of`.
CLASSIFIERS, DENSE_RUNS = "classifiers", "dense runs (--task detect and others)"
SEGMENTERS, WHOLE_IMAGES = "runs of --task segment", "dense runs that look at whole images"
SCORED = "runs that score what they find"
TIMM_NAMES, PARTS = "timm names", "DATA that is named"

# Options that several commands share.
Run = Annotated[str, Arg("folder of a run, or a timm name", True, "RUN|MODEL")]
Checkpoint = Annotated[
    str | None,
    Arg(
        "weights for a timm name: a file, a run, or package (of an installed one)", metavar="RUN|FILE", of=(TIMM_NAMES,)
    ),
]
Pretrained = Annotated[
    bool, Arg("timm's own weights for a timm name; without them random ones, for a trial", of=(TIMM_NAMES,))
]
ModelArgs = Annotated[
    list[str] | None,
    Arg("arguments of a timm name, such as in_chans=1", metavar="KEY=VALUE", pairs=True, of=(TIMM_NAMES,)),
]
Size = Annotated[int | None, Arg("image side in pixels; without it what the model was trained for", least=1)]
Light = Annotated[bool, Arg("let a 'map' pool classify with its averaged tokens alone", of=(CLASSIFIERS,))]
Batch = Annotated[int, Arg("images per call", of=(CLASSIFIERS,), least=1)]
Workers = Annotated[int | None, Arg("processes that prepare images", least=0, most=MOST)]
Threads = Annotated[int | None, Arg("threads of torch's operators", least=1, most=MOST)]
Flip = Annotated[bool, Arg("of a dense run: look at every image mirrored too", of=(DENSE_RUNS,))]
Scales = Annotated[
    str | None, Arg("of a dense run: look at images in several sizes, such as 0.75,1,1.25", of=(WHOLE_IMAGES,))
]
Slide = Annotated[
    bool,
    Arg("of a run that segments: look through overlapping windows instead of at the whole image", of=(SEGMENTERS,)),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], Arg("where to compute")]


def facts_of(run: str, *others: str) -> dict[str, str | None]:
    """What options are for, of a run or a timm name and others beside it: None, or why that does not hold."""
    from ..runs import is_dense, task_of
    from ..training.run_folder import RunFolder

    task, dense = task_of(run), is_dense(run)
    here = f"this run is of --task {task}" if dense else "this is a classifier"
    head = RunFolder(Path(run)).config().get("broadsight", {}).get("settings", {}).get("head") if dense else None
    whole, crops = head != "simple_baseline", f"{head} looks at crops of single objects"
    named = not all(Path(name).is_dir() for name in (run, *others))
    return {
        CLASSIFIERS: here if dense else None,
        DENSE_RUNS: None if dense else here,
        SEGMENTERS: None if task == "segment" else here,
        WHOLE_IMAGES: None if dense and whole else crops if dense else here,
        SCORED: None if dense and whole and task != "segment" else here if whole else crops,
        TIMM_NAMES: here if dense else None if named else f"{run} is a run with weights and arguments of its own",
    }


def check_options(function: Command, given: dict[str, Any], facts: dict[str, str | None]) -> None:
    """Refuse options that would be ignored; see `refuse_ignored`."""
    refuse_ignored(function, given, facts)
    if given.get("checkpoint") and given.get("pretrained") and "pretrained" in explicit():
        raise UsageError("--pretrained together with --checkpoint; expected one of the two, they are both weights")
