"""Options: what can be asked of a command, declared once as fields of its Request; imports nothing that is slow."""

import json
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from .errors import UsageError, did_you_mean, refuse_idle

LARGEST = 2**63 - 1  # the largest whole number that torch and numpy take
MOST = 4096  # threads or processes of one command
Asked = TypeVar("Asked", bound="Options")

# What an option is for, see `Option.of`.
CLASSIFIERS, DENSE_RUNS = "classifiers", "dense runs (--task detect and others)"
SEGMENTERS, WHOLE_IMAGES = "runs of --task segment", "dense runs that look at whole images"
SCORED = "runs that score what they find"
TIMM_NAMES = "timm names"


@dataclass(frozen=True)
class Option:
    """How a field of a Request is read, checked and explained."""

    help: str  # one line
    positional: bool = False  # given without a name; several values if the field holds a tuple
    metavar: str | None = None
    bare: str | None = None  # value of an option that is named without one
    read: Callable[[Any], Any] | None = None  # converts each value of key=value pairs, or all of several values
    join: str | None = None  # what joins the values of an option that is named more than once
    # What it is for, such as "classifiers". Where none of these holds it would be ignored, so it is refused, see
    # `Options.refuse_ignored`. Empty means that it always counts.
    of: tuple[str, ...] = ()
    least: float | None = None  # bounds of a number, which is always finite
    most: float | None = None


def option(default: Any, help: str, **how: Any) -> Any:
    """A field of a Request, as Option says. The default `...` makes it required, `dict` gives each an empty one."""
    named: dict[str, Any] = dict(metadata={"option": Option(help, **how)}, kw_only=not how.get("positional"))
    if default is dict:
        return field(default_factory=dict, **named)
    return field(default=MISSING if default is ... else default, **named)


@dataclass(frozen=True)
class Setting:
    """A field of a Request with its name, type, default and Option."""

    name: str
    kind: Any
    default: Any
    how: Option

    flag = property(lambda self: flag(self.name))  # on the command line
    required = property(lambda self: self.default is MISSING)
    plural = property(lambda self: get_origin(self.kind) is tuple)
    pairs = property(lambda self: get_origin(self.kind) is Mapping)

    @property
    def called(self) -> str:
        """What messages call it: DATA, or --size."""
        return (self.how.metavar or self.name.upper()) if self.how.positional else self.flag

    def read(self, given: Any) -> Any:
        """The value that was meant by a text, a value from YAML or a Python object; a UsageError if it cannot be."""
        if given is None and (self.default is None or self.pairs or self.plural) and not self.required:
            return self.default
        value = self._converted(os.fspath(given) if isinstance(given, os.PathLike) else given)
        for one in value if isinstance(value, tuple) else [value]:
            self._check(one)
        return value

    def _converted(self, given: Any) -> Any:
        if self.pairs or not self.plural:
            return self._pairs(given) if self.pairs else self._one(self.kind, given)
        kind, given = get_args(self.kind)[0], self.how.read(given) if self.how.read else given
        words = [given]
        if not isinstance(given, str) and isinstance(given, Iterable):
            words = list(given)
        elif isinstance(given, str) and not self.how.positional:
            words = [word.strip() for word in given.split(",") if word.strip()]
            if not words:
                nothing = f"{given!r} names nothing; expected names joined by commas"
                raise UsageError(f"{self.called} {nothing if given.strip() else f'is empty; expected {self.how.help}'}")
        return tuple(self._one(kind, os.fspath(one) if isinstance(one, os.PathLike) else one) for one in words)

    def _one(self, kind: Any, given: Any) -> Any:
        if kind is Any:
            return given
        if get_origin(kind) is Literal:
            return given if given in get_args(kind) else self._refuse(given)
        if kind is str and self.plural and not self.how.positional and isinstance(given, int):
            return str(given)  # a size, say, among others that are words
        either = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        if len(either) > 1 or kind in (bool, str):  # as it came
            return given if isinstance(given, either) else self._refuse(given)
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            self._refuse(given)
        try:
            value = kind(given)
        except (ValueError, OverflowError):
            return self._refuse(given)
        same = isinstance(given, str) or value == given or kind is float
        return value if same else self._refuse(given)

    def _refuse(self, given: Any) -> Any:
        kind = get_args(self.kind)[0] if self.plural else self.kind
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        wanted = words.get(kind, "a text or a number")
        if get_origin(kind) is Literal:
            wanted = f"{'some' if self.plural else 'one'} of " + ", ".join(map(repr, get_args(kind)))
            wanted += ", joined by commas" * self.plural
        elif self.plural:
            wanted = wanted.removeprefix("a ") + ("s" if self.how.positional else "s joined by commas")
        raise UsageError(f"{self.called}: expected {wanted}, got {given if isinstance(given, str) else repr(given)}")

    def _pairs(self, given: Any) -> Mapping[str, Any]:
        if isinstance(given, str) and given.startswith("["):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                raise UsageError(f"{self.flag} {_cut(given)} is no list; expected key=value") from None
        if not isinstance(given, Mapping):
            given = assignments([given] if isinstance(given, str) else given, self.flag)
        read = self.how.read or (lambda value: value)
        return {key: read(value) for key, value in given.items()}

    def _check(self, value: Any) -> None:
        if isinstance(value, str) and "\0" in value:
            raise UsageError(f"{self.called} {value!r} has a zero byte in it, which no name has; leave that out")
        if isinstance(value, str) and not value.strip():
            raise UsageError(f"{self.called} is empty; expected {self.how.help}")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return
        least, most = self.how.least, self.how.most
        if (isinstance(value, int) and abs(value) > LARGEST) or (isinstance(value, float) and not math.isfinite(value)):
            raise UsageError(f"{self.called} {_short(value)}; expected a number that is not so large, and not nan")
        if least is not None and value < least:
            raise UsageError(f"{self.called} {value}; expected {least} or more")
        if most is not None and value > most:
            raise UsageError(f"{self.called} {value}; expected {least or 0} to {most}")


@dataclass(frozen=True)
class Options:
    """What a user asks of a command: the fields of a subclass, Request, converted and checked when it is made."""

    verb: ClassVar[str] = ""  # the function of `broadsight` that takes it, or the command where there is none
    # Names of the options that the user has named; by default those that differ from their defaults.
    given: frozenset[str] = field(default=frozenset(), kw_only=True, repr=False, compare=False)
    # What records say of how they were made: the command line, or else the call in Python.
    command: str = field(default="", kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = set(self.given)
        for name, setting in self.settings().items():
            value = setting.read(getattr(self, name))
            object.__setattr__(self, name, value)
            comparable = isinstance(value, (str, int, float, tuple, dict, type(None)))
            if not comparable or value != ({} if setting.pairs else setting.default):
                given.add(name)
        object.__setattr__(self, "given", frozenset(given))
        if not self.command:
            named = {name: "" if one.how.positional else f"{name}=" for name, one in self.settings().items()}
            shown = [f"{before}{_plain(getattr(self, name))!r}" for name, before in named.items() if name in given]
            object.__setattr__(self, "command", f"broadsight.{self.verb}({', '.join(shown)})")

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        """All options by name: positional ones first, then those of the class itself, then those that it shares."""
        found = [one for one in fields(cls) if "option" in one.metadata]
        found.sort(key=lambda one: (not one.metadata["option"].positional, one.name not in cls.__annotations__))
        settings = {}
        for one in found:
            default = one.default if one.default_factory is MISSING else one.default_factory()
            kind: Any = one.type
            if get_origin(kind) in (Union, types.UnionType):  # without its None
                kind = Union[tuple(arg for arg in get_args(kind) if arg is not type(None))]  # noqa: UP007
            settings[one.name] = Setting(one.name, kind, default, one.metadata["option"])
        return settings

    @classmethod
    def asked(cls: type[Asked], *values: Any, **options: Any) -> Asked:
        """A Request from the arguments of a call in Python; a UsageError names the nearest option to an unknown one."""
        known = cls.settings()
        for name in options.keys() - known.keys():
            hint = did_you_mean(name, known) or f"expected {', '.join(known)}"
            raise UsageError(f"there is no option {name!r}; {hint.strip()}")
        names = [one for one in known if known[one].how.positional]
        if len(values) > len(names):
            raise UsageError(f"{len(values)} arguments without a name; expected {', '.join(names)}")
        named = dict(zip(names, values, strict=False))
        if twice := named.keys() & options.keys():
            raise UsageError(f"{twice.pop()} is given twice; give it once")
        if missing := [one for one in known.values() if one.required and one.name not in {**named, **options}]:
            raise UsageError(f"{missing[0].name} is missing: {missing[0].how.help}")
        return cls(**named, **options, given=frozenset({*named, *options}))

    def refuse_ignored(self, facts: Mapping[str, str | None]) -> None:
        """Refuse options that would have no effect: `facts` say of what they are for why it does not hold, or None."""
        given = [one for one in self.settings().values() if one.name in self.given]
        refuse_idle({one.name: one.flag for one in given}, {one.name: one.how.of for one in given}, facts)

    def refuse_all(self, but: Iterable[str], why: str) -> None:
        """Refuse every option that is given, except those named in `but`."""
        if idle := [one.called for name, one in self.settings().items() if name in self.given and name not in but]:
            raise UsageError(f"{idle[0]}: {why}; leave it out")

    def as_json(self) -> dict[str, Any]:
        """All options by name, as JSON can hold them: a run that is open by its name."""
        return {name: _plain(getattr(self, name)) for name in self.settings()}


def flag(name: str) -> str:
    """The option of a field on the command line; of `class_` --class, a word that Python keeps for itself."""
    return "--" + name.removesuffix("_").replace("_", "-")


def assignments(texts: Iterable[Any], flag: str = "--set") -> dict[str, str]:
    """Pairs from texts such as lr=1e-3; a UsageError for other texts, and for a name that comes twice."""
    found: dict[str, str] = {}
    for text in texts if isinstance(texts, Iterable) else [texts]:
        name, equals, value = (part.strip() for part in str(text).partition("="))
        if not equals or not name:
            raise UsageError(f"{flag} {text!r}; expected key=value, such as {flag} epochs=10")
        if name in found:
            raise UsageError(f"{flag} {name} given twice, as {found[name]} and {value}")
        found[name] = value
    return found


def value_of(text: Any) -> Any:
    """What a text means in YAML, which knows numbers, truth values and lists; 1e-3 is a number too."""
    import yaml

    if not isinstance(text, str):
        return text
    try:
        value = float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeError, RecursionError):
        return text
    if isinstance(value, int) and abs(value) >= 2**31:
        raise UsageError(f"{_short(value)} is too large a number; expected less than {2**31}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    known = isinstance(value, (str, int, float, dict, type(None)))
    return value if known else str(getattr(value, "source", value))


def _short(value: float) -> str:
    return _cut(str(value) if isinstance(value, float) or value.bit_length() < 200 else "with hundreds of digits")


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:20]}..."


# ---- options that several commands share


def arguments(what: str, **how: Any) -> Any:
    """A field that takes arguments of something, by name."""
    return option(dict, f"arguments of the {what}", metavar="KEY=VALUE", read=value_of, **how)


Precision = Literal["auto", "fp32", "bf16", "fp16"]
PRECISION = "fp32, bf16, fp16, or auto: bf16 where the hardware multiplies it, else fp32"


@dataclass(frozen=True, kw_only=True)
class Precise(Options):
    """In which numbers it is computed."""

    precision: Precision = option("fp32", f"{PRECISION}; exported files have their own")


@dataclass(frozen=True, kw_only=True)
class Computing(Options):
    """What it is computed with."""

    threads: int | None = option(None, "threads of torch's operators", least=1, most=MOST)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to compute")

    @property
    def used_threads(self) -> int:
        """As many as are asked for, or else as the environment says, or as there are cores."""
        return self.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Machine(Computing):
    """The same, where images are prepared by processes of their own."""

    workers: int | None = option(None, "processes that prepare images", least=0, most=MOST)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """What becomes of a timm name: its weights, arguments and image size."""

    checkpoint: str | None = option(
        None,
        "weights for a timm name: a file, a run, or package (of an installed one)",
        metavar="RUN|FILE",
        of=(TIMM_NAMES,),
    )
    pretrained: bool = option(
        True, "timm's own weights for a timm name; without them random ones, for a trial", of=(TIMM_NAMES,)
    )
    model_args: Mapping[str, Any] = arguments("timm name, such as in_chans=1", of=(TIMM_NAMES,))
    size: int | None = option(None, "image side in pixels; without it what the model was trained for", least=1)

    def refuse_ignored(self, facts: Mapping[str, str | None]) -> None:
        super().refuse_ignored(facts)
        if self.checkpoint and self.pretrained and "pretrained" in self.given:
            raise UsageError("--pretrained together with --checkpoint; expected one of the two, they are both weights")


@dataclass(frozen=True, kw_only=True)
class Views(Options):
    """What a dense run is shown of an image."""

    flip: bool = option(False, "of a dense run: look at every image mirrored too", of=(DENSE_RUNS,))
    scales: tuple[float, ...] = option(
        (1.0,), "of a dense run: look at images in several sizes, such as 0.75,1,1.25", of=(WHOLE_IMAGES,)
    )
    slide: bool = option(
        False, "of a run that segments: look through overlapping windows, not at the whole image", of=(SEGMENTERS,)
    )


HEADS = "retinanet, fcos, ssdlite, faster_rcnn, rtdetr (detect); mask_rcnn, cascade_mask_rcnn (instances); "
HEADS += "semantic_fpn, upernet (segment); keypoint_rcnn, simple_baseline (keypoints)"
NECKS = "fpn, the maps as they are; map, tokens of the model's pool fed back to them; tokens, of the neck's own"
ALLOW_OUTSIDE = "let lists and COCO files name files outside of their own folder"
DATASET_ROOT, DOWNLOAD = "where a timm dataset lies or is put", "let a timm dataset be fetched"
STRICT = "stop at an image that cannot be read instead of skipping it"
Part = Literal["auto", "train", "val", "test", "all"]
RECORD = dict(help="print the record as JSON, not tables, or write it to FILE; comes last", metavar="FILE", bare="-")
RUN: dict[str, Any] = dict(help="folder of a run, or a timm name", positional=True, metavar="RUN|MODEL")
