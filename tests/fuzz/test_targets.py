"""Every target keeps its promises for its own seeds, among which are all findings."""

import importlib
import pkgutil

import pytest

import fuzz
from fuzz.__main__ import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_seeds__are_read_or_refused_as_promised(name):
    target = importlib.import_module(f"fuzz.{name}")
    found = target.seeds()
    assert len(found) > 20 and all(isinstance(data, bytes) for data in found)
    for data in found:
        target.one(data)


def test_targets__are_all_that_have_one():
    modules = [
        importlib.import_module(f"fuzz.{m.name}") for m in pkgutil.iter_modules(fuzz.__path__) if m.name[0] != "_"
    ]
    assert sorted(module.__name__.removeprefix("fuzz.") for module in modules if hasattr(module, "one")) == list(
        TARGETS
    )
