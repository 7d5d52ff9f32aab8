"""Images for small runs, and runs without what takes their time: drawing."""

import pytest

from broadsight.training import run_folder

from .runs import draw_images


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture
def drawn(monkeypatch):
    """Let curves be drawn after all."""
    monkeypatch.setattr(run_folder, "draw_curves", DRAW)


DRAW = run_folder.draw_curves


@pytest.fixture(scope="session", autouse=True)
def _undrawn():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "draw_curves", lambda lines, path: None)
        yield
