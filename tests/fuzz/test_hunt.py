"""The hunt itself: it begins with the seeds, mutates them, stops in time and keeps what broke a target."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuzz import hunt


@pytest.fixture
def target(monkeypatch, tmp_path):
    """Hunts in this process with a function instead of a target; gives the inputs that it saw."""
    monkeypatch.setattr(hunt, "_settle_in", lambda: None)
    monkeypatch.setattr(hunt.faulthandler, "dump_traceback_later", lambda *_, **__: None)  # pytest has its own

    def start(one=lambda data: None, seconds=60.0, cases=200, number=0):
        seen = []

        def noting(data):
            seen.append(data)
            one(data)

        toy = SimpleNamespace(seeds=lambda: [b"first seed", b"second"], one=noting)
        monkeypatch.setitem(sys.modules, "fuzz.toy", toy)
        count = SimpleNamespace(value=0)
        try:
            hunt._hunt("toy", seconds, cases, number, tmp_path / "input", count)
        except AssertionError:
            return seen, count.value, (tmp_path / "input").read_bytes()
        return seen, count.value, None

    return start


def test_begins_with_the_seeds_and_mutates_them_while_there_is_time(target):
    seen, count, _ = target()
    assert seen[:2] == [b"first seed", b"second"] and count == len(seen) == 200
    assert len(set(seen)) > 100
    assert target(number=1)[0] != seen == target()[0]  # by the number alone
    assert target(seconds=0)[0] == [b"first seed", b"second"]


def test_keeps_and_reports_what_broke_the_target(target, tmp_path, capsys):
    def one(data):
        assert b"\xff" not in data

    _, _, kept = target(one, cases=5000)
    assert kept is not None and b"\xff" in kept
    # No module of this name: the other process fails as it would for any other reason
    assert not hunt.run("missing", 1, 1, 0, tmp_path / "findings")
    assert "missing: BROKEN (exit 1" in capsys.readouterr().out
    assert len(list(Path(tmp_path, "findings").iterdir())) == 1
