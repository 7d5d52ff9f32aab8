"""What a classifier sees in images, and where it looks for it: image by image, into a folder."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.decoding import UnreadableImage, within_memory
from ..data.inside import outside_allowed
from ..data.loading import Transforms
from ..data.names import unique_stems as unique
from ..data.scenes import Scenes
from ..data.sources.unlabelled import Unlabelled
from ..errors import UsageError, nearest, printable
from ..files import whole_file, write_json
from ..provenance import header
from ..runs.classifier import Classifier
from ..runs.images import shown_images
from ..runs.opening import RANDOM, facts_of, is_dense, name_of, open_asked, origin_of, task_of
from .inside import check_kinds, kinds_of, look_inside
from .maps.gradcam import gradcam_looks
from .maps.map import Look
from .overlay import overlay
from .request import GRADCAM, QUERY, Request
from .sheet import overview_sheet

Progress = Callable[[int, int, str], None]  # how many are done, of how many, and what is done now
Tell = Callable[[str], None]
RECORD = "explanation.json"
UNTRAINED = "untrained: the weights are random, so the answers and maps mean little"
TOP = 5


@dataclass(frozen=True)
class Wanted:
    """What to look at, all that the model has where nothing is said; and what to write besides the sheets."""

    kinds: tuple[str, ...] = ()
    target: str | None = None  # name or number of the class that Grad-CAM explains; the predicted one if None
    layers: tuple[str, ...] = ()  # paths of modules or patterns of them, such as stages.2.*
    depths: tuple[str, ...] = ()  # numbers of layers among those of their kind, from 1; "last" is the last
    query: tuple[tuple[int, int], ...] = ()  # places whose attention is shown, in pixels of the image as it is opened
    singles: bool = False  # each map over the image in a file of its own
    raw: bool = False  # the maps' numbers in an .npz file


@dataclass(frozen=True)
class Seen:
    """One image, as the model sees it, and what it says of it."""

    image: Image.Image  # resized and cropped, RGB or grey
    tensor: Tensor  # (1, C, H, W), normalised, on the model's device
    places: tuple[int, ...]  # the first classes by their numbers
    probabilities: tuple[float, ...]  # theirs
    looks: tuple[Look, ...]  # what there is to see inside
    explained: int  # the class that Grad-CAM explains


@dataclass
class Explained:
    """What came out of all images."""

    entries: list[dict[str, Any]] = field(default_factory=list)  # of images that were written, what the record says
    looked: dict[str, Seen] = field(default_factory=dict)  # by image, where no files are written
    errors: dict[str, str] = field(default_factory=dict)  # images that could not be read, and why
    unasked: dict[str, str] = field(default_factory=dict)  # images that lack a place that was asked for
    interrupted: bool = False
    folder: Path | None = None  # where files were written
    record: dict[str, Any] = field(default_factory=dict)  # what explanation.json holds


def explain(
    request: Request,
    progress: Progress = lambda done, total, doing: None,
    tell: Tell = lambda note: None,
    folder_for: Callable[[str], Path | None] = lambda title: None,
) -> Explained:
    """Look at images with a classifier; all is checked before. `folder_for` its title is where files go, if any."""
    run, kinds = request.run, request.kinds
    if is_dense(run):
        what = f"{name_of(run)} is a run of --task {task_of(run)}; explain looks into classifiers, and what this run"
        raise UsageError(f"{what} finds is drawn by: broadsight predict {name_of(run)} IMAGE --out DIR")
    gradcam = None if not kinds or "gradcam" in kinds else f"this is --kinds {','.join(kinds)}"
    asking = None if not kinds or "query" in kinds else f"this is --kinds {','.join(kinds)}"
    request.refuse_ignored(facts_of(run) | {GRADCAM: gradcam, QUERY: asking})
    more: dict[str, Any] = {name: getattr(request, name) for name in ("layers", "query", "singles", "raw")}
    wanted = Wanted(kinds, request.class_, depths=request.depth, **more)
    with outside_allowed(request.allow_outside):
        images = shown_images(request.images, request.list)
        if request.threads is not None:
            torch.set_num_threads(request.threads)
        classifier = open_asked(request)
        source, about, notes = images.of(classifier)
        origin = origin_of(run, request.checkpoint, request.pretrained)
        for note in [*notes, *([f"{classifier.title} is {UNTRAINED}"] if origin == RANDOM else [])]:
            tell(note)
        folder = folder_for(classifier.title)

        def seen(done: int, name: str) -> None:
            progress(done, len(source), printable(Path(name).name) or classifier.title)

        found = explain_images(classifier, source, folder, wanted, untrained=origin == RANDOM, seen=seen)
    weights = "pretrained" if origin == "timm" else origin
    found.record = record_of(classifier, found, wanted, command=request.command, weights=weights, data=about)
    if folder is not None and found.entries:
        found.folder = folder
        write_json(found.record, folder / RECORD)
    return found


def explain_images(
    classifier: Classifier,
    source: Unlabelled | Scenes,
    out: Path | None,
    wanted: Wanted,
    *,
    untrained: bool = False,
    seen: Callable[[int, str], None] = lambda done, name: None,
) -> Explained:
    """Look at every image and write NAME.png, its sheet, into a folder, or if there is none keep all that was seen.

    `seen` is told how many images are done, and the name of the next.
    """
    check_kinds(classifier.model, wanted.kinds or (["query"] if wanted.query else []), classifier.title)
    target = None if wanted.target is None else class_index(classifier, wanted.target)
    if isinstance(source, Unlabelled):
        source = source.in_channels(classifier.transforms.channels)
    names = [source.name(index) for index in range(len(source))]
    found = Explained()
    try:
        for index, (name, stem) in enumerate(zip(names, unique_stems(names), strict=True)):
            seen(index, name)
            try:
                with within_memory():
                    looked = look_at(classifier, source.open(index), wanted, target, printable(name))
            except (UnreadableImage, NotInImage) as error:
                if len(names) == 1 and isinstance(error, NotInImage):
                    raise
                kept = found.unasked if isinstance(error, NotInImage) else found.errors
                kept[name] = str(error).removeprefix(f"{name}: ")
                continue
            if out is None:
                found.looked[name] = looked
            else:
                found.entries.append(write_files(classifier, looked, wanted, out, name, stem, untrained))
        seen(len(names), "")
    except KeyboardInterrupt:
        found.interrupted = True
    return found


class NotInImage(ValueError):
    """A place that an image does not have, or that the model does not see."""


def look_at(
    classifier: Classifier,
    photo: Image.Image,
    wanted: Wanted | None = None,
    target: int | None = None,
    name: str = "the image",
) -> Seen:
    """One image, of any size, through the model; Grad-CAM explains a class by its number, or the predicted one."""
    wanted = wanted or Wanted()
    query = seen_places(classifier.transforms, photo.size, wanted.query, name)
    channels = classifier.transforms.channels
    photo = photo.convert("L" if channels == 1 else "RGB")
    data = torch.as_tensor(classifier.transforms.build(training=False)(photo))  # C H W of bytes
    image = classifier.normalise(data[None])
    with torch.inference_mode():
        logits = classifier.logits(image)[0]
        order = logits.argsort(descending=True, stable=True)[:TOP]
        probabilities = logits.softmax(0)[order]
    explained = int(order[0]) if target is None else target
    found = look_inside(classifier.model, image, wanted.kinds or None, explained, query)
    looks = _chosen(found, wanted) or [_asked_for(classifier, image, explained, wanted, found)]
    if query and not any(look.kind == "query" for look in looks):
        layers = list(dict.fromkeys(look.layer for look in found if look.kind == "query"))
        what = f"no place asks in these layers of {classifier.title}; such as {', '.join(layers[:3])} would do"
        raise ValueError(f"--query with --{'layers' if wanted.layers else 'depth'}: {what}")
    looks = [replace(look, title=_titled(look, classifier.classes[explained], wanted.query)) for look in looks]
    shown = Image.fromarray(data[0].numpy() if channels == 1 else data.permute(1, 2, 0).numpy())
    return Seen(shown, image, tuple(order.tolist()), tuple(probabilities.tolist()), tuple(looks), explained)


def seen_places(
    transforms: Transforms, size: tuple[int, int], query: Sequence[tuple[int, int]], name: str
) -> list[tuple[float, float]]:
    """Pixels (x, y) of an image (width, height) in what the model sees of it, in its pixels."""
    left, top, right, bottom = transforms.view(size)
    found = []
    for x, y in query:
        across, down = (x + 0.5 - left) / (right - left), (y + 0.5 - top) / (bottom - top)
        outside = x >= size[0] or y >= size[1]
        if outside or not (0 <= across < 1 and 0 <= down < 1):
            edges = (0, size[0], 0, size[1]) if outside else (left, right, top, bottom)
            a, b, c, d = (math.ceil(edge - 0.5) for edge in edges)
            what = f"outside {'' if outside else 'what the model sees of '}{name}, which is {size[0]}x{size[1]}"
            raise NotInImage(f"query {x},{y} is {what}; expected x from {a} to {b - 1}, y from {c} to {d - 1}")
        found.append((across * transforms.size - 0.5, down * transforms.size - 0.5))
    return found


def _titled(look: Look, explained: str, query: Sequence[tuple[int, int]]) -> str:
    """The title of a look with the class's name, or with the place in pixels of the image."""
    if look.kind == "query":
        number, comma, what = look.title.removeprefix("query ").partition(", ")
        x, y = query[int(number) - 1]
        return f"({x},{y}){comma}{what}"
    return explained if look.kind == "gradcam" else look.title


def class_index(classifier: Classifier, wanted: str) -> int:
    """The number of a class, by its name in any case of letters or by the number itself."""
    names = classifier.classes
    same = [number for number, name in enumerate(names) if name.casefold() == wanted.strip().casefold()]
    if len(same) > 1:
        raise ValueError(f"{len(same)} classes are called {wanted}; give the number: {', '.join(map(str, same))}")
    if same:
        return same[0]
    if wanted.strip().isdecimal() and int(wanted) < len(names):
        return int(wanted)
    near = nearest(wanted, names, 3)
    hint = f"nearest: {', '.join(near)}" if near else f"expected a name such as {names[0]}"
    raise ValueError(f"{classifier.title} has no class {wanted!r}; {hint}, or a number from 0 to {len(names) - 1}")


def _chosen(looks: Sequence[Look], wanted: Wanted) -> list[Look]:
    """Those of the layers and depths that were asked for."""
    last = {look.kind: max(other.depth for other in looks if other.kind == look.kind) for look in looks}

    def matches(layer: str, pattern: str) -> bool:  # a pattern, the path itself, or that of a module around it
        return fnmatchcase(layer, pattern) or layer.startswith(f"{pattern}.")

    def depths(look: Look) -> list[int]:
        return [last[look.kind] if text == "last" else int(text) - 1 for text in wanted.depths]

    kept = [look for look in looks if not wanted.layers or any(matches(look.layer, path) for path in wanted.layers)]
    found = [look for look in kept if not wanted.depths or look.depth in depths(look)]
    if kept and not found:
        most = max(last.values()) + 1
        raise ValueError(f"--depth {','.join(wanted.depths)}: there is no such layer; expected 1 to {most}, or last")
    return found


def _asked_for(classifier: Classifier, image: Tensor, target: int, wanted: Wanted, looks: Sequence[Look]) -> Look:
    """Grad-CAM at a layer where nothing is looked at by itself; `looks` are those at other layers, for an error."""
    exact = [path for path in wanted.layers if path in dict(classifier.model.named_modules())]
    if len(exact) == 1 and "gradcam" in (wanted.kinds or kinds_of(classifier.model)):
        return gradcam_looks(classifier.model, image, target, exact[0])[0]
    layers = list(dict.fromkeys(look.layer for look in looks))
    near = ", ".join(nearest(wanted.layers[0], layers, 3, alike=0.3) or layers[:3])
    what = f"--layers {','.join(wanted.layers)}: nothing is looked at there in {classifier.title}"
    raise ValueError(f"{what}; such as {near} would do ({len(layers)} in all)")


def unique_stems(names: Sequence[str]) -> list[str]:
    """What the files of each image are called; none has the record's name."""
    return unique(names, [Path(RECORD).stem])


def write_files(
    classifier: Classifier, looked: Seen, wanted: Wanted, out: Path, name: str, stem: str, untrained: bool
) -> dict[str, Any]:
    """The files of one image, the sheet last; its entry in the record."""

    def save(image: Image.Image, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as unfinished:
            image.save(unfinished, "PNG")

    names, keys = classifier.classes, _keys(looked.looks)
    answers = list(zip(looked.places, looked.probabilities, strict=True))
    out.mkdir(parents=True, exist_ok=True)
    singles = [f"{stem}/{key}.png" for key in keys] if wanted.singles else [None] * len(keys)
    entries = []
    for look, key, file in zip(looked.looks, keys, singles, strict=True):
        if file is not None:
            save(overlay(looked.image, look), out / file)
        hidden, values = ("values", "heads"), look.values.double()
        fields = {name: value for name, value in vars(look).items() if name not in hidden and value is not None}
        ends = {"smallest": float(f"{values.min():.6g}"), "largest": float(f"{values.max():.6g}")}
        entries.append({**fields, "size": list(values.shape), **ends, "array": key, "file": file})
    if wanted.raw:
        arrays = {key: look.values.numpy() for key, look in zip(keys, looked.looks, strict=True)}
        heads = {f"{key}-heads": look.heads for key, look in zip(keys, looked.looks, strict=True)}
        arrays |= {key: values.numpy() for key, values in heads.items() if values is not None}
        with whole_file(out / f"{stem}.npz") as unfinished, open(unfinished, "wb") as file:
            np.savez_compressed(file, image=np.asarray(looked.image), **arrays)
    size = f"{looked.image.width} x {looked.image.height} pixels · {classifier.parameters / 1e6:.2f} M parameters"
    words = dict(subtitle=f"{printable(Path(name).name)} · {size}", explained=names[looked.explained])
    named, warning = [(names[place], value) for place, value in answers], UNTRAINED if untrained else ""
    sheet = overview_sheet(looked.image, looked.looks, named, classifier.title, **words, warning=warning)
    save(sheet, out / f"{stem}.png")
    predictions = [{"class": names[at], "index": at, "probability": float(f"{value:.6g}")} for at, value in answers]
    files = {"file": name, "sheet": f"{stem}.png", "raw": f"{stem}.npz" if wanted.raw else None}
    explained = {"class": names[looked.explained], "index": looked.explained}
    return {**files, "predictions": predictions, "explained": explained, "looks": entries}


def _keys(looks: Sequence[Look]) -> list[str]:
    """A name for each look that is good for a file: its kind, its layer's number, what it shows."""
    keys = []
    for look in looks:
        words = re.sub(r"\W+", "-", look.title, flags=re.ASCII).strip("-")[:60]
        keys.append(f"{look.kind}-{look.depth + 1:02d}" + (f"-{words}" if words else ""))
    return unique([f"{key}.png" for key in keys])


def record_of(
    classifier: Classifier, found: Explained, wanted: Wanted, *, command: str = "", weights: str = "", data: str = ""
) -> dict[str, Any]:
    """All that explanation.json says; `weights` and `data` are where these are from, in words."""
    transforms = classifier.transforms
    layers: dict[str, dict[str, None]] = {}
    for entry in found.entries:
        for look in entry["looks"]:
            layers.setdefault(look["kind"], {})[look["layer"]] = None
    model = {name: getattr(classifier, name) for name in ("title", "source", "parameters")}
    return {
        "model": {**model, "weights": weights, "kinds": list(kinds_of(classifier.model))},
        "image": {"size": transforms.size, "channels": transforms.channels, "crop_pct": transforms.crop_pct},
        "device": classifier.device.type,
        "data": data,
        "settings": asdict(wanted),
        "layers": {kind: list(paths) for kind, paths in layers.items()},
        "interrupted": found.interrupted,
        "images": found.entries,
        "failed": found.errors | found.unasked,
        **header(command),
    }
