"""What a classifier sees in images, one after the other: nothing is kept, so there may be any number of them."""

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

import torch
from torch import Tensor

from ..data.loading import Batch, EvalOrder, SourceDataset, close, default_workers, load
from ..data.names import CsvRows
from ..data.sources import Source
from ..data.sources.sample_table import is_image
from ..data.sources.unlabelled import Unlabelled
from ..errors import printable
from ..files import whole_file, write_json
from ..provenance import header
from ..runs.classifier import Classifier

if TYPE_CHECKING:
    from rich.table import Table

LEAST = {"top": 1, "batch": 1, "workers": 0, "threads": 1}
FEW, FIRST = 50, 20  # up to FEW images are all shown; of more, the FIRST
STDOUT = "-"


class Prediction(NamedTuple):
    """What one image shows: K classes, the most probable first; none if it cannot be read.

    Args:
        file: Its path, as it was named.
        classes, indices, probabilities: K names, their places among the model's classes, and 0 to 1.
        error: Why it cannot be read.
    """

    file: str
    classes: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str = ""


def predict_images(
    classifier: Classifier,
    source: Source,
    *,
    top: int = 5,
    batch: int = 64,
    workers: int = 0,
    seen: Callable[[int], None] = lambda count: None,
) -> Generator[Prediction, None, None]:
    """Every image of a source, in its order.

    Args:
        source: Such as `find_images` gives; its images are read in grey where the model takes grey ones.
        top: Classes of each image; all if the model has no more.
        batch: Images of a pass through the model.
        workers: Processes that read images; with none, this one does.
        seen: Told how many more images are done.

    Raises:
        ValueError: At once, not with the first image.
    """
    check_counts(top=top, batch=batch, workers=workers)
    if isinstance(source, Unlabelled):
        source = source.in_channels(classifier.transforms.channels)
    names, top = classifier.classes, min(top, classifier.num_classes)
    images = SourceDataset(source, classifier.transforms.build(training=False))
    order = EvalOrder(source, batch)

    def stream() -> Generator[Prediction, None, None]:
        loader = load(images, order, workers=workers, pin_memory=classifier.device.type == "cuda")
        try:
            for keys, found in zip(order, loader, strict=True):
                yield from _of_batch(classifier, source, [index for _, _, index in keys], found, names, top)
                seen(len(keys))
        finally:
            close(loader)

    return stream()


def _of_batch(
    classifier: Classifier, source: Source, wanted: list[int], batch: Batch, names: tuple[str, ...], top: int
) -> Iterator[Prediction]:
    """In the order that was wanted: a batch holds apart what could be read and what could not."""
    if batch.failure:
        raise RuntimeError(batch.failure)
    rows = {index: row for row, (_, _, index) in enumerate(batch.keys)}
    order, probabilities = _ask(classifier, batch.images, top) if rows else ([], [])
    skipped = iter(batch.skipped)
    for index in wanted:
        if index in rows:
            places = order[rows[index]]
            classes = tuple(names[place] for place in places)
            yield Prediction(source.name(index), classes, tuple(places), tuple(probabilities[rows[index]]))
        else:
            name, reason = next(skipped)
            yield Prediction(name, error=reason)


def _ask(classifier: Classifier, images: Tensor, top: int) -> tuple[list[list[int]], list[list[float]]]:
    """Bytes (B, C, H, W) -> classes and probabilities (B, top). Of equals the first class wins, as in evaluation."""
    with torch.inference_mode():  # ends here: it would last between the images in whoever asks for them
        logits = classifier.logits(classifier.normalise(images))
        order = logits.argsort(dim=1, descending=True, stable=True)[:, :top]
        probabilities = logits.softmax(1).gather(1, order)
    return order.tolist(), probabilities.tolist()


def check_counts(**given: int | None) -> None:
    """Refuse numbers that are too small, by the names of LEAST; None is somebody else's choice."""
    for name, value in given.items():
        if value is not None and value < LEAST[name]:
            raise ValueError(f"--{name} {value}; expected {LEAST[name]} or more")


def useful_workers(images: int, batch: int) -> int:
    """A process for each core but one; fewer for few batches: one process makes a batch, and has to be started."""
    return min(default_workers(), -(-images // batch) - 1)


class CsvWriter:
    """A line for each image: file, class_1, probability_1, class_2, …, error. Bytes of file names are kept."""

    def __init__(self, file: TextIO, top: int):
        self.rows, self.top = CsvRows(file), top
        ranks = [f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability")]
        self.rows.write(["file", *ranks, "error"])

    def write(self, prediction: Prediction) -> None:
        pairs = zip(prediction.classes, map(_short, prediction.probabilities), strict=True)
        cells = [cell for pair in pairs for cell in pair] or [""] * (2 * self.top)
        self.rows.write([prediction.file, *cells, prediction.error])

    def finish(self) -> None:
        pass


class JsonWriter:
    """One object for each image, in an array or each on a line of its own.

    Letters beyond ASCII are escaped, so that names of files which are not Unicode can be written, and read by Python.
    """

    def __init__(self, file: TextIO, lines: bool = False):
        self.file, self.lines = file, lines
        self.before = "" if lines else "[\n"

    def write(self, prediction: Prediction) -> None:
        kept = zip(prediction.classes, prediction.indices, prediction.probabilities, strict=True)
        found = [{"class": name, "index": index, "probability": _short(value)} for name, index, value in kept]
        record = {"file": prediction.file, "predictions": found}
        if prediction.error:
            record["error"] = prediction.error
        self.file.write(self.before + json.dumps(record, allow_nan=False))
        self.before = "\n" if self.lines else ",\n"

    def finish(self) -> None:
        self.file.write("\n" if self.lines else "[]\n" if self.before == "[\n" else "\n]\n")


Writer = CsvWriter | JsonWriter


def _short(probability: float) -> float:
    """In the digits that single precision has."""
    return float(f"{probability:.6g}")


def check_output(option: str, path: str | None) -> None:
    """Refuse to write over an image: `--csv a.jpg` is meant as an option without a value."""
    if path is not None and path != STDOUT and is_image(os.path.basename(path)):
        raise ValueError(f"{option} {path}, which is named like an image; put {option} last, or write {option}=FILE")


@contextmanager
def writing(path: str, top: int, form: str) -> Generator[Writer, None, None]:
    """A writer to a file that appears when all is written, or to the standard output.

    Args:
        path: Where to; "-" is the standard output.
        top: Classes of each image.
        form: "csv" or "json"; the latter in lines if the file is called .jsonl.
    """
    with _text_file(path) as file:
        lines = path.lower().endswith(".jsonl")
        writer = CsvWriter(file, top) if form == "csv" else JsonWriter(file, lines)
        yield writer
        writer.finish()


@contextmanager
def _text_file(path: str) -> Generator[TextIO, None, None]:
    if path == STDOUT:
        with _keeping_bytes(sys.stdout) as file:
            yield file
    elif os.path.exists(path) and not os.path.isfile(path):  # a pipe or /dev/null, which must not be replaced
        with _create(path) as file:
            yield file
    else:
        with whole_file(Path(path)) as unfinished, _create(unfinished) as file:
            yield file


def _create(path: str | Path) -> TextIO:
    return open(path, "w", encoding="utf-8", errors="surrogateescape", newline="")


@contextmanager
def _keeping_bytes(file: TextIO) -> Generator[TextIO, None, None]:
    """The standard output takes names of files that are not Unicode, for as long as this lasts."""
    if not isinstance(file, io.TextIOWrapper):  # somebody has put a text in its place
        yield file
        return
    before = file.encoding, file.errors
    file.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        yield file
    finally:
        file.reconfigure(encoding=before[0], errors=before[1])


class Summary:
    """What is shown of any number of predictions: the first of them, how many of each class, what went wrong.

    Args:
        images: How many there will be.
    """

    def __init__(self, images: int):
        self.most = images if images <= FEW else FIRST
        self.first: list[Prediction] = []
        self.failures: list[Prediction] = []
        self.classes: Counter[tuple[int, str]] = Counter()  # by number too: two may have one name
        self.read, self.failed = 0, 0

    def add(self, prediction: Prediction) -> None:
        if len(self.first) < self.most:
            self.first.append(prediction)
        if prediction.error:
            self.failed += 1
            if len(self.failures) < FIRST:
                self.failures.append(prediction)
        else:
            self.read += 1
            self.classes[prediction.indices[0], prediction.classes[0]] += 1

    def table(self) -> "Table":
        """The first images and their classes."""
        from rich.table import Table
        from rich.text import Text

        table = Table()
        table.add_column("file", overflow="fold")
        table.add_column("class", overflow="fold")
        table.add_column("%", justify="right", no_wrap=True)
        further = any(len(prediction.classes) > 1 for prediction in self.first)
        if further:
            table.add_column("then", overflow="fold")
        for file, classes, _, probabilities, _ in self.first:
            cells = [
                f"{printable(name)} {100 * value:.1f} %" for name, value in zip(classes, probabilities, strict=True)
            ]
            best = [printable(classes[0]), f"{100 * probabilities[0]:.1f}"] if classes else ["-", "-"]
            table.add_row(*map(Text, [printable(file), *best, *([", ".join(cells[1:])] if further else [])]))
        return table

    def class_table(self) -> "Table":
        """How many images show what: the most frequent classes."""
        from rich.table import Table
        from rich.text import Text

        table = Table()
        table.add_column("class", overflow="fold")
        table.add_column("images", justify="right", no_wrap=True)
        table.add_column("%", justify="right", no_wrap=True)
        rows = [(name, count) for (_, name), count in self.classes.most_common(FIRST)]
        if rest := self.read - sum(count for _, count in rows):
            rows.append((f"{len(self.classes) - FIRST:,} further classes", rest))
        for name, count in rows:
            table.add_row(Text(printable(name)), f"{count:,}", f"{100 * count / self.read:.1f}")
        return table

    def complaints(self) -> list[str]:
        """Lines about the images that could not be read."""
        if not self.failed:
            return []
        total = self.read + self.failed
        lines = [f"{self.failed:,} of {total:,} images could not be read:"]
        lines += [f"  {printable(prediction.file)}: {printable(prediction.error)}" for prediction in self.failures]
        if self.failed > len(self.failures):
            lines.append(f"  and {self.failed - len(self.failures):,} more")
        return lines


def write_settings(path: str, command: str, classifier: Classifier, summary: Summary) -> None:
    """Say beside a file of predictions how they came about: FILE.settings.json."""
    if not Path(path).is_file():  # the standard output, a pipe
        return
    transforms = classifier.transforms
    record = {
        "model": {"title": classifier.title, "source": classifier.source, "parameters": classifier.parameters},
        "image": {"size": transforms.size, "channels": transforms.channels, "crop_pct": transforms.crop_pct},
        "device": classifier.device.type,
        "images": {"read": summary.read, "failed": summary.failed},
        **header(command),
    }
    write_json(record, f"{path}.settings.json")
