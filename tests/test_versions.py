"""Declared versions: every dependency has an oldest one, and the lists in requirements/ follow pyproject.toml."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings this one
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"([a-z0-9][a-z0-9.-]*)==([^\s;]+)(?: ; (.+?))?(?: \\)?")

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="the package without its repository")


def declared(*extras: str) -> dict[str, Requirement]:
    """The requirements of the package by name, with those of the extras, "every" for all, and of those they name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = tuple(project["optional-dependencies"]) if extras == ("every",) else extras
    found: dict[str, Requirement] = {}
    waiting = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    while waiting:
        for requirement in map(Requirement, waiting.pop()):
            if requirement.name == project["name"]:
                waiting += [project["optional-dependencies"][extra] for extra in requirement.extras]
            else:
                found[canonicalize_name(requirement.name)] = requirement
    return found


def oldest_allowed(requirement: Requirement) -> Version | None:
    """The lowest version that a requirement allows, None if it does not say."""
    named = [Version(part.version) for part in requirement.specifier if part.operator in (">=", "==", "~=")]
    return max(named, default=None)


def pins(name: str) -> dict[str, list[Version]]:
    """The versions by name that a list pins: one, or one for each range of Pythons."""
    found: dict[str, list[Version]] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line.startswith((" ", "#")):
            continue
        match = PIN.fullmatch(line)
        assert match, f"{name}: {line!r} pins no version"
        found.setdefault(match[1], []).append(Version(match[2]))
    return found


def test_every_dependency_says_how_old_it_may_be_and_the_oldest_are_pinned():
    """Newer Pythons may need newer ones, so the lowest of several pins counts."""
    assert [name for name, requirement in declared("every").items() if oldest_allowed(requirement) is None] == []
    pinned = pins("oldest.txt")
    wanted = {name: oldest_allowed(requirement) for name, requirement in declared("test", "data").items()}
    assert {name: min(pinned.get(name, []), default=None) for name in wanted} == wanted


def test_lock_covers_what_development_needs_with_hashes_and_without_addresses():
    pinned = pins("dev.lock")
    for name, requirement in declared("all", "dev").items():
        assert pinned.get(name), f"{name} is not locked; `make lock`"
        for version in pinned[name]:
            assert requirement.specifier.contains(version), f"{name} is locked at {version}; `make lock`"
    entries = re.split(r"^(?=\S)", (ROOT / "requirements" / "dev.lock").read_text(), flags=re.MULTILINE)
    entries = [entry for entry in entries if entry and not entry.startswith("#")]
    assert len(entries) == sum(map(len, pins("dev.lock").values()))
    for entry in entries:
        first, *rest = entry.rstrip("\n").split(" \\\n")
        assert rest and all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in rest), first
    for name in ("oldest.txt", "dev.lock"):
        text = (ROOT / "requirements" / name).read_text()
        assert not re.search(r"://| @ |--(?!hash=)\w|file:|(?<!\w)/\w", text)
