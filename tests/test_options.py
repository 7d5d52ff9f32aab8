"""Options: what a field of a Request takes from texts, YAML and Python, and what it refuses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from broadsight.cli.main import COMMANDS
from broadsight.cli.parser import request_of
from broadsight.errors import UsageError
from broadsight.options import Options, option, value_of
from tests.refusals import refused


@dataclass(frozen=True, kw_only=True)
class Shared(Options):
    threads: int | None = option(None, "threads", least=1, most=8)


@dataclass(frozen=True)
class Request(Shared):
    """Bake a cake."""

    verb = "bake"

    recipe: str = option(..., "name of a recipe", positional=True, metavar="RECIPE")
    guests: tuple[str, ...] = option((), "who comes", positional=True, metavar="GUEST")
    eggs: int = option(3, "how many", least=0)
    sugar: float = option(0.5, "in kilos")
    layers: tuple[int, ...] = option((), "their heights", of=("cakes of several layers",))
    kind: Literal["cake", "tart"] = option("cake", "what it is")
    cold: bool = option(False, "whether it is served cold")
    extra: Mapping[str, Any] = option(dict, "anything else", read=value_of)


def test_values__from_texts_as_from_python():
    typed = Request("apple", "Ann", eggs="4", sugar="1e-1", layers="3, 4", extra=["a=1", "b=x"], threads="2")
    given = Request("apple", ["Ann"], eggs=4, sugar=0.1, layers=[3, 4], extra={"a": 1, "b": "x"}, threads=2)
    assert typed == given and given.guests == ("Ann",) and given.layers == (3, 4)
    assert Request(Path("apple"), (Path("a,b"),)).guests == ("a,b",)  # no commas are looked for in names
    assert Request("apple", sugar=1).sugar == 1 and Request("apple", layers=5).layers == (5,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(eggs="many"), "--eggs: expected a whole number, got many"),
        (dict(eggs=1.5), "--eggs: expected a whole number, got 1.5"),
        (dict(eggs=True), "--eggs: expected a whole number, got True"),
        (dict(eggs=None), "--eggs: expected a whole number, got None"),
        (dict(eggs=-1), "--eggs -1; expected 0 or more"),
        (dict(eggs=2**70), "expected a number that is not so large, and not nan"),
        (dict(sugar="nan"), "--sugar nan; expected a number that is not so large, and not nan"),
        (dict(sugar=[]), "--sugar: expected a number, got []"),
        (dict(threads=9), "--threads 9; expected 1 to 8"),
        (dict(kind="pie"), "--kind: expected one of 'cake', 'tart', got pie"),
        (dict(cold="yes"), "--cold: expected true or false, got yes"),
        (dict(layers="1,x"), "--layers: expected whole numbers joined by commas, got x"),
        (dict(layers=","), "--layers ',' names nothing; expected names joined by commas"),
        (dict(layers=" "), "--layers is empty; expected their heights"),
        (dict(extra=["a"]), "--extra 'a'; expected key=value"),
        (dict(extra="[a"), "--extra [a is no list; expected key=value"),
        (dict(extra=["a=1", "a=2"]), "--extra a given twice, as 1 and 2"),
        (dict(guests="a\0b"), "GUEST 'a\\x00b' has a zero byte in it"),
        (dict(guests=[3]), "GUEST: expected texts, got 3"),
        (dict(guests=""), "GUEST is empty; expected who comes"),
    ],
)
def test_values__refused_in_one_line(options, words):
    assert words in refused("", Request, "apple", error=UsageError, **options)


def test_asked__names_what_is_wrong_with_a_call():
    assert Request.asked("apple", "Ann", eggs=1) == Request("apple", ("Ann",), eggs=1)
    for values, options, words in (
        (("apple",), dict(egs=1), r"there is no option 'egs'; did you mean 'eggs'\?"),
        ((), {}, "recipe is missing: name of a recipe"),
        (("apple", "Ann", 3), {}, "3 arguments without a name; expected recipe, guests"),
        (("apple",), dict(recipe="pear"), "recipe is given twice"),
    ):
        refused(words, Request.asked, *values, error=UsageError, **options)


def test_given_and_command__are_what_was_named_or_differs():
    assert Request("apple").given == {"recipe"}
    assert Request("apple", eggs=3).given == {"recipe"} and Request("apple", eggs=4).given == {"recipe", "eggs"}
    assert Request.asked("apple", eggs=3).given == {"recipe", "eggs"}  # named, though it is so anyway
    assert replace(Request.asked("apple", eggs=3), sugar=2).given == {"recipe", "eggs", "sugar"}
    assert Request("apple", ["Ann"], eggs=1).command == "broadsight.bake('apple', ['Ann'], eggs=1)"
    assert Request("apple", command="cake apple").command == "cake apple"
    assert Request("apple", ["Ann"]).as_json()["guests"] == ["Ann"]


def test_ignored__is_refused_with_the_reason():
    facts = {"cakes of several layers": "this one is flat"}
    Request("apple").refuse_ignored(facts)
    words = "--layers is for cakes of several layers; this one is flat; leave it out"
    refused(words, Request("apple", layers=3).refuse_ignored, facts, error=UsageError)
    Request("apple", layers=3).refuse_ignored({"cakes of several layers": None})
    words = "--eggs: nothing is baked; leave it out"
    refused(words, Request("apple", eggs=1).refuse_all, ("recipe",), "nothing is baked", error=UsageError)


@pytest.mark.parametrize("command", COMMANDS)
def test_requests__of_all_commands_are_explained(command):
    kind = request_of(COMMANDS[command])
    assert kind.verb and (kind.__doc__ or "").strip()
    for one in kind.settings().values():
        assert one.how.help and "\n" not in one.how.help and one.how.help[0] != " "
        assert one.required or one.read(one.default) == one.default  # a default is a value that can be given
