"""A page of what several models see in the same images: Markdown, and a folder of sheets beside it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.decoding import open_image
from ..data.names import address, markdown, markdown_block, markdown_code
from ..files import whole_folder, write_json, write_text
from ..runs.classifier import Classifier
from .files import UNTRAINED, Explained, Wanted, record_of
from .inside import kinds_of
from .run import explain
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
            found = explain(
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
