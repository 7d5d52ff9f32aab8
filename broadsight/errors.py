"""What an error says, in one line; which errors are the user's to mend; options that would be ignored."""

import errno
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from itertools import dropwhile
from numbers import Real
from typing import Any

# Errors of the system that a name causes, which the user can change; others, such as a full disk, come while working.
OF_NAMES = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EACCES, errno.ELOOP, errno.ENXIO)
# Types that say nothing beside their text; any other is named.
PLAIN = ("ValueError", "RuntimeError", "UsageError", "OSError", "FileNotFoundError", "UnreadableImage", "Exception")
# What is left out of an error, or said in other words.
UNSAID = (
    (r"(?s)\s*(Exception raised from \S+ at |C\+\+ CapturedTraceback:|frame #\d+: ).*", ""),
    (r"Exception from \S+:\d+:\s*|Check '[^\n]*' failed at \S+:\d+:\s*", ""),  # OpenVINO's frames
    (r"\[enforce fail at [^\]]*\] *(?:[^\n.]*\. )?", ""),
    (r"^\[Errno -?\d+\] ", ""),
    (r"\S+\(\) got an unexpected keyword argument ('\w+')", r"there is no argument \1"),
    (r"(\w)\(\)", r"\1"),
    (r"Exceeds the limit .* value has (\d+) digits; use .* the limit", r"a number of \1 digits"),
)


class UsageError(ValueError):
    """The command line cannot be understood."""


def said(error: BaseException) -> str:
    """What an error says, or its type, without what only its programmers read: frames, tracebacks, advice of torch."""
    text = _refused(_cause(str(error)))
    for pattern, instead in UNSAID:
        text = re.sub(pattern, instead, text.strip())
    kind = type(error).__name__
    if isinstance(error, (LookupError, AssertionError)) and text and not text.startswith(kind):
        return f"{kind}: {text}"
    if isinstance(error, MemoryError) and not text:
        return "there is not enough memory"
    return text or kind


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return next(line.strip() for line in said(error).splitlines() if line.strip())


def one_line(error: BaseException) -> str:
    """All that an error says, in one line that a terminal can show; what is very long is cut."""
    line = re.sub(r"\S{300,}", lambda word: _cut(word[0], 300), " ".join(said(error).split()))
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return printable(_cut(line, 2000)) + ("; give a shorter one" if too_long else "")


def is_usage(error: BaseException) -> bool:
    """Whether the user can mend it by asking for something else."""
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError) or error.errno in OF_NAMES
    if isinstance(error, ImportError):
        return "pip install" in str(error)  # an extra that is not there
    return isinstance(error, ValueError)


def printable(text: str) -> str:
    """For a terminal: what is no letter, such as a line break or bytes that are not Unicode, as an escape."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def refuse_idle(given: Mapping[str, str], needs: Mapping[str, Iterable[str]], facts: Mapping[str, str | None]) -> None:
    """Refuse what was `given`, by name, if none of what it `needs` holds; `facts` say why not, None if it does."""
    for name, words in given.items():
        wanted = list(needs.get(name, ()))
        if wanted and all(facts.get(one, "") is not None for one in wanted):
            why = next((reason for one in wanted if (reason := facts.get(one))), "which is not so here")
            raise UsageError(f"{words} is for {' or '.join(wanted)}; {why}; leave it out")


def check_arguments(function: Callable[..., Any], given: Iterable[str], what: str, own: Iterable[str] = ()) -> None:
    """Refuse arguments, called `what`, that a function does not have, or has as its `own`, with the nearest it has."""
    parameters = inspect.signature(function).parameters.values()
    known = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD and one.name not in set(own)]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
            raise UsageError(f"{what} {name}: there is no such argument; {hint.strip()}")


def nearest(name: object, known: Iterable[str], count: int = 1, alike: float = 0.5) -> list[str]:
    """The known names that are most like a given one, for errors; `alike` is from 0, which always finds one, to 1."""
    spelled = {one.lower(): one for one in known}
    return [spelled[one] for one in get_close_matches(str(name).lower(), spelled, count, alike)]


def did_you_mean(name: object, known: Iterable[str], alike: float = 0.5) -> str:
    """A question for the middle of an error, with a space behind; nothing if no known name is like the given one."""
    return "".join(f"did you mean {one!r}? " for one in nearest(name, known, alike=alike))


def unknown(what: str, name: object, known: Collection[str]) -> UsageError:
    """The error that says that a name is not known, which one may be meant, and all that are known."""
    return UsageError(f"unknown {what} {name!r}; {did_you_mean(name, known)}expected one of {', '.join(known)}")


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Refuse a value that is none of those known."""
    if value not in known:
        raise unknown(name, value, known)


def check_number(name: str, value: object) -> None:
    """Refuse what is no finite number."""
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is no finite number; give one, e.g. 0.5")


def _refused(text: str) -> str:
    """Of the page on which torch says that it will not unpickle something, what that is; any other text as it is."""
    if "Weights only load failed" not in text and "WeightsUnpickler error" not in text:
        return text
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"it holds a {found[1]}, which could run code"
    found = re.search(r"WeightsUnpickler error:\s*(.+)", text)
    return found[1].strip() if found else "it does not hold tensors alone"


def _cause(text: str) -> str:
    """Of a text with a traceback in it, as workers send one, what the traceback ends in."""
    _, mark, rest = text.rpartition("Traceback (most recent call last):\n")
    if not mark:
        return text
    ending = "\n".join(dropwhile(lambda line: line[:1] in ("", " "), rest.splitlines())).strip()
    kind, colon, words = ending.partition(": ")
    plain = colon and kind.rpartition(".")[2] in PLAIN and words.strip()
    return words if plain else ending or text.partition("\n")[0]


def _cut(text: str, longest: int) -> str:
    kept = longest // 3
    return text if len(text) < longest else f"{text[:kept]}...({len(text):,} characters)...{text[-kept:]}"
