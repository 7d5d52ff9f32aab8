"""A run's folder: its description, metrics, best weights, and the state to continue from."""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from ..files import flush, remove_unfinished, whole_file, write_text
from ..models.from_run import read_config
from ..visual.metrics import GOALS, label
from ..visual.plots import PALETTE
from ..weights.reading import metadata_of
from ..weights.writing import write_weights
from .history import LABELS, RUN, check_history, check_there, identity, is_sealed, sealed

CONFIG, METRICS, WEIGHTS, LAST, PREVIOUS = "config.json", "metrics.jsonl", "model.safetensors", "last", "previous"
CURVES, SKIPPED, REPORT = "curves.png", "skipped.json", "report.html"
BEST = "best.safetensors"  # in a checkpoint: the best weights, where they are not the checkpoint's own
CLASSES_JUDGED = "val_classes"  # metric: how many classes the means of an epoch are over


def over_classes(occurring: int | None, classes: int) -> str:
    """How many classes a mean is over, in words; empty if that is all of them or unknown."""
    return "" if occurring is None or occurring == classes else f" over {occurring} of {classes} classes"


class RunFolder:
    """The files of one run, in a folder made by `create`. Only the first process is `writing`."""

    def __init__(self, path: str | Path, writing: bool = True):
        self.path, self.writing = Path(path), writing
        self.last, self.previous = self.path / LAST, self.path / PREVIOUS  # checkpoint, and the one before
        self._events: Any = None
        self._logs = ExitStack()
        self._drawn = -math.inf

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the folder and describe the run; raises OSError."""
        if self.writing:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(json.dumps(sealed(config), indent=2, allow_nan=False) + "\n", self.path / CONFIG, durable=True)
            self.last.mkdir(exist_ok=True)

    def config(self) -> dict[str, Any]:
        """The run's description; a ValueError if it is damaged."""
        config = read_config(self.path, "it cannot be continued")
        check_history(config, self.path / CONFIG)
        return config

    def dense_config(self) -> dict[str, Any]:
        """The description of a dense run, with all that its model is built from."""
        config = self.config()
        needed = {"settings": ("head", "neck"), "recipe": (), "parameters": (), "labels": LABELS}
        check_there(config.get("broadsight", {}), needed, self.path / CONFIG)
        return config

    @cached_property
    def identity(self) -> str:
        """Which run it is; see `history.identity`."""
        return identity(self.config())

    def owns(self, run: str | None) -> bool:
        """Whether a checkpoint's run is this one; False only if that is certain."""
        return run in (None, self.identity) or not is_sealed(self.config())

    def open_logs(self, size: int, updates: int) -> None:
        """Continue the metrics after their first `size` bytes; the part of the run that wrote the rest is repeated."""
        if not self.writing:
            return
        remove_unfinished(self.path)
        with (self.path / METRICS).open("ab") as file:
            file.truncate(min(size, file.tell()))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # an extra
            return
        self._logs.enter_context(quiet_tensorboard())
        # What was recorded at this update stays
        self._events = SummaryWriter(str(self.path / "events"), purge_step=updates + 1)

    def record(self, values: Mapping[str, Any]) -> None:
        """Add a line to the metrics, and its numbers to TensorBoard's events."""
        if not self.writing:
            return
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")
        self.scalars({k: v for k, v in values.items() if k not in ("kind", "updates", "epoch")}, values["updates"])

    def scalars(self, values: Mapping[str, Any], updates: int) -> None:
        """Add numbers to TensorBoard alone, such as times, which differ between equal runs."""
        for name, value in values.items() if self._events is not None else ():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._events.add_scalar(name.replace("_", "/", 1), value, updates)

    def close(self) -> None:
        """End the events; a disk that is full may refuse that."""
        events, self._events = self._events, None
        with self._logs:
            if events is not None:
                events.close()

    def metrics_size(self) -> int:
        """Bytes of the metrics so far, after they are flushed to the disk."""
        metrics = self.path / METRICS
        if self.writing and metrics.is_file():
            flush(metrics)
        return metrics.stat().st_size if metrics.is_file() else 0

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of the metrics."""
        return self._parsed(METRICS, lambda text: [json.loads(line) for line in text.splitlines()]) or []

    def skipped(self) -> dict[str, str]:
        """The images that could not be read, and why."""
        return self._parsed(SKIPPED, json.loads) or {}

    def _parsed(self, name: str, parse: Callable[[str], Any]) -> Any:
        """What a text file holds; None if it is missing."""
        path = self.path / name
        try:
            return parse(path.read_text(encoding="utf-8")) if path.is_file() else None
        except ValueError as error:
            advice = f"broadsight train --resume --out {self.path} makes it again"
            raise ValueError(f"{path} is damaged ({error}); {advice}") from None

    def report_skipped(self, skipped: Mapping[str, str]) -> None:
        """Name the images that could not be read."""
        if self.writing and skipped:
            write_text(skipped_text(skipped), self.path / SKIPPED, durable=True)

    def keep_best(self, model: nn.Module) -> str | None:
        """Write the weights that `timm.create_model("local-dir:...", pretrained=True)` loads; returns their digest."""
        return write_weights(model, self.path / WEIGHTS, {RUN: self.identity}) if self.writing else None

    def check_weights(self, config: Mapping[str, Any]) -> None:
        """Refuse weights of another run than the description beside them."""
        path = self.path / WEIGHTS
        with suppress(OSError, SafetensorError):  # loading them will say what is wrong
            if is_sealed(config) and metadata_of(path).get(RUN) != identity(config):
                what = f"{path} holds weights of another run than the config.json beside it"
                raise ValueError(f"{what}; restore what was there")

    def draw(self, at_most_every: float = 0.0) -> None:
        """Draw the curves, unless that was done less than `at_most_every` seconds ago or matplotlib is missing."""
        if not self.writing or time.monotonic() - self._drawn < at_most_every:
            return
        try:
            draw_curves(self.metrics(), self.path / CURVES)
        except ImportError:  # an extra
            return
        self._drawn = time.monotonic()


def skipped_text(skipped: Mapping[str, str]) -> str:
    """The content of skipped.json."""
    return json.dumps(dict(sorted(skipped.items())), indent=1) + "\n"


@contextmanager
def quiet_tensorboard() -> Generator[None, None, None]:
    """Print no traceback of TensorBoard's thread: the next call of its writer raises the same error."""
    hook = threading.excepthook

    def quiet(arguments: Any) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard"):
            hook(arguments)

    threading.excepthook = quiet
    try:
        yield
    finally:
        threading.excepthook = hook


def draw_curves(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw loss, goal and learning rate over the epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    epochs, steps = ([line for line in lines if line["kind"] == kind] for kind in ("epoch", "updates"))
    per_epoch = epochs[0]["updates"] / epochs[0]["epoch"] if epochs else 1
    places = [line["updates"] / per_epoch for line in steps]
    goals = [f"val_{name}" for name in GOALS.values() if any(f"val_{name}" in line for line in epochs)] or ["val_top1"]
    curves = {name: (PALETTE[1 + place], label(name)) for place, name in enumerate(goals)}
    halves = [(name.replace("_ap", "_ap50"), f"{label(name)}50") for name in goals if name.endswith("_ap")]
    curves |= {name: (colour, said) for (name, said), colour in zip(halves, PALETTE[3:], strict=False)}
    words = ", ".join(map(label, goals))
    if goals == ["val_top1"]:
        words = "top-1 accuracy"
        curves = {"val_top1": (PALETTE[1], "validation"), "train_top1": (PALETTE[0], "training")}
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, quality, rate = figure.subplots(1, 3)
    loss.plot(places, [line["loss"] for line in steps], color="0.8", lw=1)
    _plot(loss, epochs, {"train_loss": (PALETTE[0], "training"), "val_loss": (PALETTE[1], "validation")})
    loss.set(xlabel="epoch", ylabel="loss")
    _plot(quality, epochs, curves)
    quality.set(xlabel="epoch", ylabel=f"{words}, %", ylim=(0, 100))
    rate.plot(places, [line["lr"] for line in steps], color=PALETTE[2])
    rate.set(xlabel="epoch", ylabel="learning rate", ylim=(0, None))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    with whole_file(path, durable=True) as unfinished:
        figure.savefig(unfinished, format="png", dpi=110)


def _plot(axes: Any, epochs: list[dict[str, Any]], curves: Mapping[str, tuple[str, str]]) -> None:
    """Plot metrics, by name with colour and label, over the epochs that have them."""
    for name, (colour, words) in curves.items():
        known = [(line["epoch"], line[name]) for line in epochs if line.get(name) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=colour, marker=".", label=words)
            axes.legend(frameon=False)


def write_page(text: str, path: Path) -> None:
    """Write a run's report, with its digest at the end."""
    write_text(marked(text), path, durable=True)


def whole_page(path: Path) -> bool:
    """Whether a report is there as it was written."""
    if not path.is_file():
        return False
    content = path.read_bytes().decode("utf-8", "surrogateescape")
    return content == marked(content.rpartition("<!-- ")[0])


def marked(text: str) -> str:
    """A page with its digest at the end."""
    return f"{text}<!-- {hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()} -->\n"


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return (path / CONFIG).is_file()
