"""A page of what several models see in the same images: Markdown, and a folder of sheets beside it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.decoding import open_image
from ..data.names import address, markdown, markdown_block, markdown_code
from ..errors import UsageError
from ..files import check_creatable, whole_folder, write_json, write_text
from ..options import TIMM_NAMES
from ..runs.classifier import Classifier, open_classifier
from ..runs.images import ShownImages, shown_images
from ..runs.opening import RANDOM, is_dense, origin_of, with_weights
from ..training.run_folder import WEIGHTS, RunFolder
from .files import UNTRAINED, Explained, Wanted, record_of
from .inside import kinds_of
from .request import GalleryRequest
from .run import check_kinds, explain_images
from .sheet import HEADINGS

RECORD = "gallery.json"
QUALITY = 80  # of WebP: a third of PNG's bytes, and nobody sees it


@dataclass(frozen=True)
class Exhibit:
    """A model of the gallery.

    Args:
        classifier: The model.
        source: Its images, the same ones for all models, each as the model wants them.
        weights: Where they are from, in words: "trained on ...", "timm's", "random".
        untrained: Whether they are random.
    """

    classifier: Classifier
    source: Any
    weights: str
    untrained: bool = False


def gallery(
    request: GalleryRequest,
    progress: Callable[[int, int, str], None] = lambda done, total, doing: None,
    tell: Callable[[str], None] = lambda note: None,
) -> dict[str, Any]:
    """Look at images with several models, and write a page; `build_gallery` says what is returned."""
    page, wanted = Path(request.out), Wanted(kinds=request.kinds)
    check_page(page)
    check_creatable(page.parent)
    named = request.models or _runs()
    plain = [name for name in named if not Path(name).is_dir() and "@" not in name]
    request.refuse_ignored({TIMM_NAMES: None if plain else "all that are named bring their own"})
    images = shown_images(request.images)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    exhibits = [_exhibit(one, images, request) for one in named]
    for exhibit in exhibits:
        check_kinds(exhibit.classifier, wanted.kinds)
        if exhibit.untrained:
            tell(f"{exhibit.classifier.title} is {UNTRAINED}")
    scenes = f"{images.scenes} drawn scenes that no run has learned from"
    data = scenes if images.scenes else ",".join(request.images)
    return build_gallery(exhibits, page, wanted, command=request.command, data=data, seen=progress)


def _runs() -> list[str]:
    """All runs in runs/ that classify and have weights."""
    folder = Path("runs")
    found = sorted(path for path in folder.iterdir() if (path / WEIGHTS).is_file()) if folder.is_dir() else []
    found = [str(path) for path in found if not is_dense(path)]
    if not found:
        raise UsageError(
            "no RUN or MODEL is named, and runs/ holds no run that classifies; name one, or first: broadsight train"
        )
    return found


def _exhibit(name: str, images: ShownImages, request: GalleryRequest) -> Exhibit:
    source, checkpoint = with_weights(name)
    options: dict[str, Any] = dict(checkpoint=checkpoint, pretrained=request.pretrained)
    classifier = open_classifier(str(source), size=request.size, device=request.device, **options)
    origin = origin_of(source, **options)
    words = {"run": _training(classifier), "timm": "timm's", RANDOM: "random"} if not checkpoint else {}
    weights = words.get(origin) or f"`{Path(str(checkpoint)).name}`"
    return Exhibit(classifier, images.of(classifier)[0], weights, origin == RANDOM)


def _training(classifier: Classifier) -> str:
    """How a run was trained, and what it reached."""
    if not classifier.run:
        return ""
    about = classifier.run.get("broadsight", {})
    count = about.get("data", {}).get("counts", {}).get("train")
    epochs = [line for line in RunFolder(Path(classifier.source)).metrics() if line["kind"] == "epoch"]
    words = ["trained here"] + ([f"on {count:,} images"] if count else [])
    if epochs:
        best = epochs[-1].get("best")
        words.append(f"for {epochs[-1]['epoch']} epochs" + (f": {best:.1f} % of others right" if best else ""))
    return " ".join(words)


def check_page(page: Path) -> Path:
    """The folder of the sheets beside a page; refuses what is not a gallery's."""
    if page.suffix.lower() != ".md":
        raise ValueError(f"--out {page}; expected a Markdown file, such as gallery.md")
    folder = page.with_suffix("")
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is no gallery's; choose another --out, nothing was changed")
    return folder


def build_gallery(
    exhibits: Sequence[Exhibit],
    page: Path,
    wanted: Wanted | None = None,
    *,
    command: str = "",
    data: str = "",
    seen: Callable[[int, int, str], None] = lambda done, total, doing: None,
) -> dict[str, Any]:
    """Look at all images with all models; write the page last, when everything that it shows is there.

    Args:
        page: A .md file; sheets go into a folder of the same name, which replaces that of an earlier gallery.
        command: How the page was made, which it says.
        data: Where the images are from.
        seen: Told how many sheets are done, of how many, and which is next.

    Returns:
        The record, which lies in the folder.
    """
    wanted = wanted or Wanted()
    folder = check_page(page)
    page.parent.mkdir(parents=True, exist_ok=True)
    total = sum(len(exhibit.source) for exhibit in exhibits)
    names = _unique([exhibit.classifier.title for exhibit in exhibits])
    records, done = [], 0
    with whole_folder(folder, replace=True) as unfinished:
        for name, exhibit in zip(names, exhibits, strict=True):
            before = done
            found = explain_images(
                exhibit.classifier,
                exhibit.source,
                unfinished / name,
                wanted,
                untrained=exhibit.untrained,
                seen=lambda count, what, before=before, name=name: seen(before + count, total, f"{name}: {what}"),
            )
            if found.interrupted:
                raise KeyboardInterrupt
            done += len(exhibit.source)
            for entry in found.entries:
                entry["sheet"] = _shrunk(unfinished / name / entry["sheet"]).name
            records.append(_record(exhibit, name, found, wanted))
        if not any(record["images"] for record in records):
            name, reason = next(iter(records[0]["failed"].items()))
            raise ValueError(f"none of the images can be read; the first is {name}: {reason}")
        record = {"command": command, "data": data, "models": records}
        write_json(record, unfinished / RECORD)
    write_text(_page(record, folder.name), page)
    return record


def _record(exhibit: Exhibit, name: str, found: Explained, wanted: Wanted) -> dict[str, Any]:
    record = record_of(exhibit.classifier, found, wanted, weights=exhibit.weights)
    for entry in record["images"]:
        del entry["looks"]  # thousands of lines; the layers are named once for all images
    return {"name": name, "untrained": exhibit.untrained, "has": kinds_of(exhibit.classifier.model), **record}


def _page(record: dict[str, Any], folder: str) -> str:
    models = record["models"]
    lines = ["# Gallery", "", "What models look at in the same images. Each sheet has the image as the model"]
    lines += [
        "sees it, its answers, and everything that there is to see inside, from the first layers to the last.",
        "",
    ]
    lines += ["| model | parameters | weights | there is to see |", "|---|---|---|---|"]
    for one in models:
        shown = ", ".join(HEADINGS.get(kind, (kind,))[0] for kind in one["has"])
        lines.append(
            f"| [{markdown(one['name'])}](#{address(_anchor(one['name']))}) "
            f"| {one['model']['parameters'] / 1e6:.2f} M | {markdown(one['model']['weights'])} | {shown} |"
        )
    lines += ["", f"Images: {markdown(record['data'])}. Made by", "", *markdown_block(record["command"])]
    for one in models:
        lines += ["", f"## {markdown(one['name'])}", ""]
        if one["untrained"]:
            lines += [f"**{UNTRAINED}.**", ""]
        for entry in one["images"]:
            best = entry["predictions"][0]
            name = Path(entry["file"]).name
            lines.append(f"{markdown_code(name)}: {markdown(best['class'])}, {100 * best['probability']:.0f} %")
            sheet = address(f"{folder}/{one['name']}/{entry['sheet']}")
            lines += ["", f"![{markdown(one['name'])} looks at {markdown(name)}]({sheet})", ""]
        for name, reason in one["failed"].items():
            lines += [f"{markdown_code(Path(name).name)} cannot be read: {markdown(reason)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _anchor(name: str) -> str:
    return re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-")


def _unique(titles: Sequence[str]) -> list[str]:
    """Names that are good for folders, with a number where two are the same."""
    names: list[str] = []
    for title in titles:
        name = first = re.sub(r"[^\w.-]+", "-", title, flags=re.ASCII).strip("-.") or "model"
        number = 1
        while name.casefold() in (other.casefold() for other in names):
            number += 1
            name = f"{first}-{number}"
        names.append(name)
    return names


def _shrunk(path: Path) -> Path:
    """The same sheet in a smaller file instead."""
    smaller = path.with_suffix(".webp")
    with open_image(path) as sheet:
        sheet.save(smaller, "WEBP", quality=QUALITY, method=6)
    path.unlink()
    return smaller
