"""Every target keeps its promises for its seeds, among which are all findings, and for some that are mutated."""

import importlib
import pkgutil

import pytest
from hypothesis import HealthCheck, given, seed, settings

import fuzz
from fuzz.__main__ import TARGETS
from fuzz.mutations import mutated

SOON = 120  # seeds of a target that are tried in the usual tests: an even choice of them


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])
def test_seeds__are_read_or_refused_as_promised(name, every):
    """All of them, or an even choice of about SOON; the last first."""
    target = importlib.import_module(f"fuzz.{name}")
    found = target.seeds()
    assert len(found) > 20 and all(isinstance(data, bytes) for data in found)
    for data in found[:: -(1 if every else max(1, len(found) // SOON))]:
        target.one(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_mutated__a_few(name):
    target = importlib.import_module(f"fuzz.{name}")

    @seed(0)
    @settings(max_examples=20, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(mutated([data for data in target.seeds() if len(data) < 50_000]))
    def attempt(data: bytes) -> None:
        target.one(data)

    attempt()


def test_targets__are_all_that_have_one():
    names = [module.name for module in pkgutil.iter_modules(fuzz.__path__) if module.name != "__main__"]
    assert [name for name in names if hasattr(importlib.import_module(f"fuzz.{name}"), "one")] == list(TARGETS)
