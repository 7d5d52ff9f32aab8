"""The images that models are measured on: found, labelled where needed, and passed to them in batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data.loading import EvalOrder, SourceDataset, close, load
from ..data.sources import LISTS, Source, check_places
from ..data.sources.evaluation import Found, Which, open_part, same_data
from ..data.sources.folder import IMAGES, MASKS
from ..data.sources.unlabelled import find_images
from ..data.sources.walking import entries, is_folder
from ..data.view import View, sample
from ..evaluation.tasks import found_in, match_classes, own_splits
from .measures import MEASURES, Measure
from .request import Request
from .subjects import Subject


class Whole(View):
    """Images of dense data, without what is known of them."""

    def label(self, index: int) -> int:
        return 0


def open_images(subjects: Sequence[Subject], request: Request, *, labelled: bool) -> Found:
    """The images for all models: those that `eval` takes, "scenes:COUNT", or any without labels if none are needed.

    Where no data is named these are the validation images of the first run among the models, or else scenes.
    """
    data, part, seed = request.data, request.part, request.seed
    channels = subjects[0].transforms.channels
    owner = next((one for one in subjects if one.own_data and (data is None or same_data(data, one.own_data))), None)
    notes: list[str] = []
    if owner is not None and seed is None and part in ("auto", "train", "val"):
        found = _own_images(owner, request)
        if data is None and len(subjects) > 1:
            notes.append(f"no --data, so all see the images that {owner.label} was validated on")
        return replace(found, notes=(*notes, *found.notes))
    if data is None:
        data = "scenes"
        notes.append("no --data, so the images are built-in scenes; give your own by --data")
    if data == "scenes" or data.startswith("scenes:"):
        check_places([data], request.root, request.download)
        found = _scenes(data, part, subjects, seed or 0)
    else:
        options: dict[str, Any] = dict(seed=seed or 0, channels=channels, root=request.root, download=request.download)
        found = open_part(data, part, **options) if labelled else _any_images(data, part, channels, options)
    return replace(found, notes=(*notes, *found.notes))


def _own_images(subject: Subject, request: Request) -> Found:
    if subject.classifier is not None:
        splits = own_splits(subject.classifier, request.root, request.download)
        return found_in(subject.classifier, splits, request.part)
    assert subject.dense is not None
    check_places([str(subject.own_data)], request.root, request.download)
    splits, part = subject.dense.own_data(), "train" if request.part == "train" else "val"
    source: Any = getattr(splits, part)
    view = Whole(source, classes=())
    about = {**splits.description, "data": subject.own_data, "part": part, "images": len(view)}
    return Found(view, str(subject.own_data), splits.notes, about)


def _scenes(data: str, part: Which, subjects: Sequence[Subject], seed: int) -> Found:
    """That number of scenes, of those that are not used for training."""
    _, colon, number = data.partition(":")
    if colon and not (number.isdecimal() and int(number)):
        raise ValueError(f"--data {data}: {number!r} is not a count; write for example scenes:1000")
    # `open_part` takes a quarter of the scenes for validation
    opened = f"scenes:{4 * int(number)}" if colon and part != "train" else data
    sizes = dict(channels=subjects[0].transforms.channels, scenes_size=max(one.transforms.size for one in subjects))
    found = open_part(opened, part, seed=seed, **sizes)
    return replace(found, description={**found.description, "data": data})


def _any_images(data: str, part: Which, channels: int, options: Mapping[str, Any]) -> Found:
    """Labelled data, or images without labels; of COCO whole images, not the boxes in them."""
    place: list[str | Path] = [data]
    try:
        found = open_part(data, part, **options)
        if found.description["kind"] != "coco" or not Path(data).is_dir():
            return found
    except (ValueError, FileNotFoundError):
        if part not in ("auto", "all") or not (Path(data).exists() or any(sign in data for sign in "*?[")):
            raise
        if Path(data).is_dir():
            folders = {entry.name.lower(): entry.path for entry in entries(data) if is_folder(entry)}
            pair = [path for name, path in folders.items() if name in IMAGES]
            if pair and MASKS & folders.keys():  # masks are no images
                place = [pair[0]]
    listed = Path(data).is_file() and data.lower().endswith(LISTS)
    source, notes = find_images([], data) if listed else find_images(place)
    about = dict(kind="images", data=data, part="all", place=data, images=len(source))
    return Found(source.in_channels(channels) if channels in (1, 3) else source, data, tuple(notes), about)


def images_for(
    request: Request, measure: Measure, subjects: Sequence[Subject], settings: Mapping[str, Any]
) -> tuple[Found, list[tuple[Source, bool]]]:
    """The data, and for each model its images and whether they have labels, which are numbers of its own classes."""
    labels_are = "needed" if settings.get("target") == "label" else measure.labels
    needed = labels_are == "needed"
    try:
        found = open_images(subjects, request, labelled=needed)
    except ValueError as error:
        if not needed or "class" not in str(error):
            raise
        others = ", ".join(name for name, other in MEASURES.items() if other.labels != "needed")
        raise ValueError(f"{measure.name} needs labelled images: {error}; without labels there are {others}") from None
    count = request.samples or measure.samples
    if count < measure.least:
        raise ValueError(f"--samples {count}; {measure.name} needs {measure.least} images or more")
    if len(found.source) < measure.least:
        came = f"{found.place} has too few images, {len(found.source)}"
        raise ValueError(f"{came}; {measure.name} needs {measure.least} or more")
    sources, notes = [], list(found.notes)
    for subject in subjects:
        source, labels, classifier = found.source, False, None if labels_are == "no" else subject.classifier
        if classifier is not None and not len(source.classes):
            notes.append(f"{found.place} has no labels, so {measure.name} is without what depends on them")
        elif classifier is not None:
            try:
                places, names, more = match_classes(classifier, source, found.place)
                source, labels = View(source, classes=names, places=places), True
                notes += more
            except ValueError as error:
                if needed:
                    raise
                notes.append(f"labels are not used: {error}")
        sources.append((sample(source, count, request.seed or 0), labels))
    about = {**found.description, "there": len(found.source), "images": len(sources[0][0])}
    return replace(found, notes=tuple(notes), description=about), sources


@dataclass(frozen=True)
class Batches:
    """Images (B, C, H, W) of a source as a model takes them, from the start whenever they are gone through."""

    subject: Subject
    source: Source
    labels: bool  # give tuples of images and their labels (B,)
    batch: int
    workers: int
    strict: bool
    skipped: dict[str, str]  # gets name and reason of every image that cannot be read

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        photos = SourceDataset(self.source, self.subject.transforms.build(False), strict=self.strict)
        loader = load(photos, EvalOrder(self.source, self.batch), workers=self.workers)
        passed = 0
        try:
            for batch in loader:
                if batch.failure:
                    raise ValueError(batch.failure)
                self.skipped.update(batch.skipped)
                if len(batch.images):
                    passed += len(batch.images)
                    images = self.subject.normalise(batch.images)
                    yield (images, batch.labels) if self.labels else images
        finally:
            close(loader)
        if not passed:
            name, reason = next(iter(self.skipped.items()))
            raise ValueError(f"none of {len(self.source):,} images can be read, {name}: {reason}; give other --data")
