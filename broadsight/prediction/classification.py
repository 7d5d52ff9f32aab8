"""What a classifier sees in images, one after the other: nothing is kept, so there may be any number of them."""

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from rich.table import Table

from ..data.loading import EvalOrder, SourceDataset, close, default_workers, load
from ..data.names import CsvRows
from ..data.sources import Source
from ..data.sources.sample_table import is_image
from ..data.sources.unlabelled import Unlabelled
from ..errors import printable
from ..files import whole_file, write_json
from ..provenance import header
from ..runs.classifier import Classifier
from ..visual.terminal import number

FEW, FIRST = 50, 20  # up to FEW images are all shown; of more, the FIRST
STDOUT = "-"


class Prediction(NamedTuple):
    """What one image shows: K classes, the most probable first; none if it cannot be read."""

    file: str  # its path, as it was named
    classes: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()  # places among the model's classes
    probabilities: tuple[float, ...] = ()  # 0 to 1
    error: str = ""  # why it cannot be read


def predict_images(
    classifier: Classifier, source: Source, *, top: int = 5, batch: int = 64, workers: int = 0
) -> Generator[Prediction, None, None]:
    """The `top` classes of every image of a source such as `find_images` gives, in its order."""
    if isinstance(source, Unlabelled):
        source = source.in_channels(classifier.transforms.channels)
    images = SourceDataset(source, classifier.transforms.build(training=False))
    names, order = classifier.classes, EvalOrder(source, batch)
    loader = load(images, order, workers=workers, pin_memory=classifier.device.type == "cuda")
    try:
        for keys, found in zip(order, loader, strict=True):
            if found.failure:
                raise RuntimeError(found.failure)
            answers = zip(found.keys, *_ask(classifier, found.images, top), strict=True) if found.keys else ()
            read = {index: (places, values) for (_, _, index), places, values in answers}
            skipped = iter(found.skipped)
            for _, _, index in keys:  # a batch holds apart what could be read and what could not
                if index in read:
                    places, values = map(tuple, read[index])
                    yield Prediction(source.name(index), tuple(names[place] for place in places), places, values)
                else:
                    name, reason = next(skipped)
                    yield Prediction(name, error=reason)
    finally:
        close(loader)


def _ask(classifier: Classifier, images: torch.Tensor, top: int) -> tuple[list[list[int]], list[list[float]]]:
    """Bytes (B, C, H, W) -> classes and probabilities (B, top). Of equals the first class wins, as in evaluation."""
    with torch.inference_mode():  # ends here: it would last between the images in whoever asks for them
        logits = classifier.logits(classifier.normalise(images))
        order = logits.argsort(dim=1, descending=True, stable=True)[:, :top]
        probabilities = logits.softmax(1).gather(1, order)
    return order.tolist(), probabilities.tolist()


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


class JsonWriter:
    """One object for each image, in an array or each on a line of its own; in ASCII, since names may be no Unicode."""

    def __init__(self, file: TextIO, lines: bool = False):
        self.file, self.lines, self.before = file, lines, "" if lines else "[\n"

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


def _short(probability: float) -> float:
    """In the digits that single precision has."""
    return float(f"{probability:.6g}")


def check_output(option: str, path: str | None) -> None:
    """Refuse to write over an image: `--csv a.jpg` is meant as an option without a value."""
    if path is not None and path != STDOUT and is_image(path):
        raise ValueError(f"{option} {path}, which is named like an image; put {option} last, or write {option}=FILE")


@contextmanager
def writing(path: str, top: int, form: str) -> Generator[CsvWriter | JsonWriter, None, None]:
    """A writer of `form` "csv" or "json" to a file that appears when all is written, or to "-", the standard output."""
    with text_file(path) as file:
        writer = CsvWriter(file, top) if form == "csv" else JsonWriter(file, lines=path.lower().endswith(".jsonl"))
        yield writer
        if isinstance(writer, JsonWriter):
            writer.finish()


@contextmanager
def text_file(path: str) -> Generator[TextIO, None, None]:
    """A file that takes names which are not Unicode; so does the standard output for as long as this lasts."""
    names: dict[str, Any] = dict(encoding="utf-8", errors="surrogateescape")
    if path != STDOUT:
        odd = os.path.exists(path) and not os.path.isfile(path)  # a pipe or /dev/null, which must not be replaced
        with nullcontext(path) if odd else whole_file(path) as place, open(place, "w", **names, newline="") as file:
            yield file
    elif isinstance(sys.stdout, io.TextIOWrapper):
        output, before = sys.stdout, (sys.stdout.encoding, sys.stdout.errors)
        output.reconfigure(**names)
        try:
            yield output
        finally:
            output.reconfigure(encoding=before[0], errors=before[1])
    else:  # somebody has put a text in its place
        yield sys.stdout


class Summary:
    """What is shown of any number of predictions: the first of them, how many of each class, what went wrong."""

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

    def table(self) -> Table:
        """The first images and their classes."""
        further = any(len(prediction.classes) > 1 for prediction in self.first)
        table = _table("file", "class", "%", *["then"] * further)
        for file, classes, _, probabilities, _ in self.first:
            pairs = [(printable(name), 100 * value) for name, value in zip(classes, probabilities, strict=True)]
            name, percent = pairs[0] if pairs else ("-", None)
            then = ", ".join(f"{name} {value:.1f} %" for name, value in pairs[1:])
            table.add_row(printable(file), name, number(percent, digits=1), *[then] * further)
        return table

    def class_table(self) -> Table:
        """How many images show what: the most frequent classes."""
        table = _table("class", "images", "%")
        rows = [(printable(name), count) for (_, name), count in self.classes.most_common(FIRST)]
        if rest := self.read - sum(count for _, count in rows):
            rows.append((f"{len(self.classes) - FIRST:,} further classes", rest))
        for name, count in rows:
            table.add_row(name, f"{count:,}", f"{100 * count / self.read:.1f}")
        return table

    def complaints(self) -> list[str]:
        """Lines about the images that could not be read."""
        lines = [f"{self.failed:,} of {self.read + self.failed:,} images could not be read:"] if self.failed else []
        lines += [f"  {printable(file)}: {printable(error)}" for file, *_, error in self.failures]
        if self.failed > len(self.failures):
            lines.append(f"  and {self.failed - len(self.failures):,} more")
        return lines


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        how: Any = dict(justify="right", no_wrap=True) if name in ("images", "%") else dict(overflow="fold")
        table.add_column(name, **how)
    return table


def write_settings(path: str, command: str, classifier: Classifier, summary: Summary) -> None:
    """Say beside a file of predictions how they came about: FILE.settings.json."""
    if not Path(path).is_file():  # the standard output, a pipe
        return
    transforms = classifier.transforms
    record = {
        "model": {name: getattr(classifier, name) for name in ("title", "source", "parameters", "precision")},
        "image": {"size": transforms.size, "channels": transforms.channels, "crop_pct": transforms.crop_pct},
        "device": classifier.device.type,
        "images": {"read": summary.read, "failed": summary.failed},
        **header(command),
    }
    write_json(record, f"{path}.settings.json")
