"""What a run shows: lines where nobody watches, a live one in a terminal."""

import io
import os
import pty
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
from rich.console import Console

from broadsight.training import display
from broadsight.training.display import Display, duration
from broadsight.training.engine import Interrupted
from broadsight.training.objectives.classification import Classification
from broadsight.training.run import train

from .runs import small


@pytest.fixture
def clock(monkeypatch):
    """The time, which passes when it is set."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(display, "time", clock)
    return clock


def test_duration_and_time_left(clock):
    words = {0: "0 s", 59.4: "59 s", 59.6: "1:00", 754: "12:34", 5025: "1:23:45", 360000: "100:00:00", -3: "0 s"}
    assert {seconds: duration(seconds) for seconds in words} == words
    shown = Display(0, 1000)
    assert shown.left() == ""
    shown.begin(0)
    clock.now += 10
    shown.advance(100, "epoch 1/2", "")
    assert shown.speed() == pytest.approx(10)
    assert shown.left() == "ETA 1:30"
    clock.now += 10
    shown.advance(300, "epoch 1/2", "")
    assert shown.left() == "ETA 30 s"
    # What an earlier part of the run did took none of this one's time
    shown = Display(0, 1000)
    clock.now += 50  # loading
    shown.begin(900)
    assert shown.left() == ""
    clock.now += 10
    shown.advance(20, "epoch 2/2", "")
    assert shown.speed() == pytest.approx(2)
    assert shown.left() == "ETA 40 s"
    clock.now += 10
    shown.advance(100, "epoch 2/2", "")  # more than was foreseen
    assert shown.left() == "ETA 0 s"


def test_no_terminal__a_line_every_half_minute(clock, capsys):
    with Display(0, 1000) as shown:
        shown.begin(0)
        for _ in range(7):
            clock.now += 10
            shown.advance(10, "epoch 1/2", "loss 1.5")
        shown.line("done [bold]")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["epoch 1/2  loss 1.5  ETA 16:10", "epoch 1/2  loss 1.5  ETA 15:40", "done [bold]"]
    with Display(2, 1000) as shown:  # other processes: only what they say
        shown.begin(0)
        clock.now += 500
        shown.advance(10, "epoch 1/2", "loss 1.5")
        shown.line("epoch 1/2  train loss 1.0")
    said = capsys.readouterr()
    assert said.err == "[rank 2] epoch 1/2  train loss 1.0\n" and said.out == ""


def test_terminal__a_whole_run(images, tmp_path, monkeypatch, capfd):
    """And one that is asked to stop, which says so at once."""
    written = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=written, force_terminal=True, width=200))
    train(small(images, tmp_path / "run"))
    text = written.getvalue()
    assert "test_vit: 0.30 M parameters; 24 images of 4 classes, 8 to validate, at 32 px" in text
    assert "epoch 1/2  train loss" in text and "epoch 2/2  train loss" in text and "ETA 0 s" in text
    step = Classification.step
    monkeypatch.setattr(Classification, "step", lambda *args: (os.kill(os.getpid(), signal.SIGINT), step(*args))[1])
    with pytest.raises(Interrupted):
        train(small(images, tmp_path / "stopped"))
    assert "stopping after this step" in capfd.readouterr().err
    assert written.getvalue().count("\x1b[?25l") == written.getvalue().count("\x1b[?25h") == 2


def test_terminal__a_real_one(monkeypatch):
    """Through a pseudo-terminal, as a shell has it; it is left as it was found, after an error too."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    read = bytearray()

    def reader():
        with suppress(OSError):
            while chunk := os.read(ours, 4096):
                read.extend(chunk)

    thread = threading.Thread(target=reader)
    thread.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        shown = Display(0, 10)
        assert shown.live
        with pytest.raises(RuntimeError), shown:
            shown.begin(0)
            shown.advance(5, "epoch 1/1", "loss 0.5")
            shown.line("a line that stays: [red]brackets[/red]")
            shown.advance(5, "epoch 2/2", "evaluating")
            raise RuntimeError
        shown.line("after it")
        assert not Display(0, 1, plain=True).live and not Display(1, 1).live
    thread.join()
    os.close(ours)
    said = (b"a line that stays: [red]brackets[/red]", b"epoch 2/2", b"100%", b"evaluating", b"ETA 0 s", b"after it")
    assert all(text in read for text in said), read
    assert read.count(b"\x1b[?25l") == read.count(b"\x1b[?25h") > 0  # the cursor is back
