"""Progress of a run: a live line in a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from ..errors import printable


class Display:
    """Progress of a run of `total` images; only the first process shows a live line, unless it is `plain`."""

    def __init__(self, rank: int, total: float, plain: bool = False, quiet: bool = False):
        from rich.console import Console

        self.rank, self.total, self.quiet = rank, max(total, 1.0), quiet
        self.console = Console(stderr=True)
        self.live = rank == 0 and self.console.is_terminal and not plain and not quiet
        self._bar: Any = None
        self.begin(0.0)

    def __enter__(self) -> "Display":
        if self.live:
            from rich import progress as parts

            columns = ("{task.fields[epoch]}", parts.BarColumn(), "{task.percentage:>3.0f}%", "{task.fields[state]}")
            self._bar = parts.Progress(*columns, console=self.console, transient=True, refresh_per_second=2)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total, epoch="", state="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, done: float) -> None:
        """Start the clock; an earlier part of the run has `done` images already."""
        self.done = self.begun_at = done
        self.started = self.spoke = time.monotonic()

    def speed(self) -> float:
        """Images a second since `begin`."""
        return (self.done - self.begun_at) / max(time.monotonic() - self.started, 1e-9)

    def advance(self, images: float, epoch: str, state: str) -> None:
        """Count images that are done; `state` says how it goes, such as the loss."""
        self.done += images
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, epoch=epoch, state=f"{state}  {self.left()}")
        elif self.rank == 0 and time.monotonic() - self.spoke >= 30:  # seconds
            self.line(f"{epoch}  {state}  {self.left()}")

    def left(self) -> str:
        """The time that is left, in words."""
        begun = self.done > self.begun_at
        return f"ETA {duration((self.total - self.done) / max(self.speed(), 1e-9))}" if begun else ""

    def line(self, text: str) -> None:
        """A line that stays."""
        self.spoke, text = time.monotonic(), "\n".join(map(printable, text.split("\n")))
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self.quiet:
            prefix = f"[rank {self.rank}] " if self.rank else ""
            print(prefix + text, file=sys.stderr, flush=True)


def figure(value: float | None, digits: int) -> str:
    """A number with some decimals; a dash for None."""
    return "\u2013" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """1:23:45, 12:34 or 45 s."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}" if minutes else f"{left} s"
