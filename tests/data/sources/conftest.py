"""Where tars are unpacked and indexed."""

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BROADSIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
