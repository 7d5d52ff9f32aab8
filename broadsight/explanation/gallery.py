"""A page of what several models see in the same images: Markdown, and a folder of sheets beside it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.decoding import open_image
from ..data.names import address, markdown, markdown_block, markdown_code, unique_stems
from ..errors import UsageError
from ..files import check_creatable, whole_folder, write_json, write_text
from ..options import TIMM_NAMES
from ..runs.classifier import Classifier, open_classifier
from ..runs.images import shown_images
from ..runs.opening import RANDOM, is_dense, origin_of, with_weights
from ..training.run_folder import WEIGHTS, RunFolder
from .inside import check_kinds, kinds_of
from .maps.map import KNOWN
from .request import GalleryRequest
from .run import UNTRAINED, Progress, Tell, Wanted, explain_images, record_of

RECORD = "gallery.json"


def gallery(
    request: GalleryRequest, progress: Progress = lambda done, total, doing: None, tell: Tell = lambda note: None
) -> dict[str, Any]:
    """Look at all images with all models; write sheets and record into a folder of the page's name, then the page."""
    page, wanted = Path(request.out), Wanted(kinds=request.kinds)
    if page.suffix.lower() != ".md":
        raise ValueError(f"--out {page}; expected a Markdown file, such as gallery.md")
    folder = page.with_suffix("")
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is no gallery's; choose another --out, nothing was changed")
    check_creatable(page.parent)
    named = request.models or _runs()
    plain = [name for name in named if not Path(name).is_dir() and "@" not in name]
    request.refuse_ignored({TIMM_NAMES: None if plain else "all that are named bring their own"})
    images = shown_images(request.images)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    models = [_opened(one, request) for one in named]
    for classifier, weights in models:
        check_kinds(classifier.model, wanted.kinds, classifier.title)
        if weights == RANDOM:
            tell(f"{classifier.title} is {UNTRAINED}")
    sources = [images.of(classifier)[0] for classifier, _ in models]  # the same images, each as the model wants them
    total, done = sum(map(len, sources)), 0
    records: list[dict[str, Any]] = []
    page.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder, replace=True) as unfinished:
        names = _folders([classifier.title for classifier, _ in models])
        for name, (classifier, weights), source in zip(names, models, sources, strict=True):

            def seen(more: int, what: str, before: int = done, name: str = name) -> None:
                progress(before + more, total, f"{name}: {what}")

            untrained = weights == RANDOM
            found = explain_images(classifier, source, unfinished / name, wanted, untrained=untrained, seen=seen)
            if found.interrupted:
                raise KeyboardInterrupt
            done += len(source)
            about = record_of(classifier, found, wanted, weights=weights)
            for entry in about["images"]:
                path = unfinished / name / entry["sheet"]
                with open_image(path) as sheet:  # WebP takes a third of PNG's bytes, and nobody sees it
                    sheet.save(path.with_suffix(".webp"), "WEBP", quality=80, method=6)
                path.unlink()
                entry["sheet"] = path.with_suffix(".webp").name
                del entry["looks"]  # thousands of lines; the layers are named once for all images
            records.append({"name": name, "untrained": untrained, "has": kinds_of(classifier.model), **about})
        if not any(record["images"] for record in records):
            name, reason = next(iter(records[0]["failed"].items()))
            raise ValueError(f"none of the images can be read; the first is {name}: {reason}")
        scenes = f"{images.scenes} drawn scenes that no run has learned from"
        data = scenes if images.scenes else ",".join(request.images)
        record = {"command": request.command, "data": data, "models": records}
        write_json(record, unfinished / RECORD)
    write_text(_page(record, folder.name), page)
    return record


def _runs() -> list[str]:
    """All runs in runs/ that classify and have weights."""
    found = [path.parent for path in sorted(Path("runs").glob(f"*/{WEIGHTS}")) if path.is_file()]
    if not (found := [str(path) for path in found if not is_dense(path)]):
        what = "no RUN or MODEL is named, and runs/ holds no run that classifies"
        raise UsageError(f"{what}; name one, or first: broadsight train")
    return found


def _opened(name: str, request: GalleryRequest) -> tuple[Classifier, str]:
    """A model, and where its weights are from: "trained on ...", "timm's", "random" or a file."""
    source, checkpoint = with_weights(name)
    options: dict[str, Any] = dict(checkpoint=checkpoint, pretrained=request.pretrained)
    classifier = open_classifier(str(source), size=request.size, device=request.device, **options)
    words = {"run": _training(classifier), "timm": "timm's", RANDOM: RANDOM} if not checkpoint else {}
    return classifier, words.get(origin_of(source, **options)) or f"`{Path(str(checkpoint)).name}`"


def _training(classifier: Classifier) -> str:
    """How a run was trained, and what it reached."""
    if not classifier.run:
        return ""
    images = classifier.run.get("broadsight", {}).get("data", {}).get("counts", {}).get("train")
    epochs = [line for line in RunFolder(Path(classifier.source)).metrics() if line["kind"] == "epoch"]
    words = ["trained here"] + ([f"on {images:,} images"] if images else [])
    if epochs:
        best = epochs[-1].get("best")
        words.append(f"for {epochs[-1]['epoch']} epochs" + (f": {best:.1f} % of others right" if best else ""))
    return " ".join(words)


def _page(record: Mapping[str, Any], folder: str) -> str:
    models = record["models"]
    lines = ["# Gallery", "", "What models look at in the same images. Each sheet has the image as the model"]
    lines += ["sees it, its answers, and everything that there is to see inside, from the first layers to the last."]
    lines += ["", "| model | parameters | weights | there is to see |", "|---|---|---|---|"]
    for one in models:
        anchor = re.sub(r"[^\w -]", "", one["name"].lower()).replace(" ", "-")
        shown = ", ".join(KNOWN[kind]["name"] for kind in one["has"])
        costs = f"{one['model']['parameters'] / 1e6:.2f} M | {markdown(one['model']['weights'])}"
        lines.append(f"| [{markdown(one['name'])}](#{address(anchor)}) | {costs} | {shown} |")
    lines += ["", f"Images: {markdown(record['data'])}. Made by", "", *markdown_block(record["command"])]
    for one in models:
        lines += ["", f"## {markdown(one['name'])}", ""]
        lines += [f"**{UNTRAINED}.**", ""] if one["untrained"] else []
        for entry in one["images"]:
            best, name = entry["predictions"][0], Path(entry["file"]).name
            lines.append(f"{markdown_code(name)}: {markdown(best['class'])}, {100 * best['probability']:.0f} %")
            sheet = address(f"{folder}/{one['name']}/{entry['sheet']}")
            lines += ["", f"![{markdown(one['name'])} looks at {markdown(name)}]({sheet})", ""]
        for name, reason in one["failed"].items():
            lines += [f"{markdown_code(Path(name).name)} cannot be read: {markdown(reason)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _folders(titles: Sequence[str]) -> list[str]:
    """Names that are good for folders, with a number where two are the same."""
    names = [re.sub(r"[^\w.-]+", "-", title, flags=re.ASCII).strip("-.") or "model" for title in titles]
    return unique_stems([f"{name}.webp" for name in names])
