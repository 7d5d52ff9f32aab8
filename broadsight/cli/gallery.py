"""The command that makes a page of what models look at: gallery."""

import sys
from pathlib import Path
from typing import Annotated, Any

from .explain import drawn_scenes, scenes_asked_for, words_of
from .parser import DONE, TIMM_NAMES, Arg, Device, Size, Threads, UsageError, check_options, register_models, typed
from .terminal import check_creatable, printable, progress_bar


def gallery(
    models: Annotated[
        list[str] | None,
        Arg("runs and timm names, NAME@FILE with its weights; none: the runs in runs/", True, "RUN|MODEL"),
    ] = None,
    images: Annotated[
        str, Arg("files, folders and quoted patterns, joined by commas, or scenes:N, which are drawn")
    ] = "scenes:2",
    kinds: Annotated[str | None, Arg("of maps, joined by commas; without it all that each model has")] = None,
    out: Annotated[
        str, Arg("the page; its images go into a folder of that name beside it", metavar="FILE.md")
    ] = "gallery.md",
    pretrained: Annotated[
        bool, Arg("timm's own weights for timm names; without them random ones, for a trial", of=(TIMM_NAMES,))
    ] = True,
    size: Size = None,
    threads: Threads = None,
    device: Device = "auto",
) -> int:
    """Make a page of what models look at in images of your choice: a sheet for each model and image."""
    given = dict(locals())
    register_models()
    import torch

    from ..explanation import run as explaining
    from ..explanation.gallery import build_gallery, check_page

    wanted = explaining.Wanted(kinds=words_of("--kinds", kinds))
    page = Path(out)
    check_page(page)
    check_creatable(page.parent)
    named = models or _runs()
    plain = [name for name in named if not Path(name).is_dir() and "@" not in name]
    check_options(gallery, given, {TIMM_NAMES: None if plain else "all that are named bring their own"})
    photos = words_of("--images", images)
    scenes = scenes_asked_for(list(photos))
    if threads is not None:
        torch.set_num_threads(threads)
    exhibits = [_exhibit(one, photos, scenes, pretrained=pretrained, size=size, device=device) for one in named]
    for exhibit in exhibits:
        explaining.check_kinds(exhibit.classifier, wanted.kinds)
        if exhibit.untrained:
            print(f"note: {printable(exhibit.classifier.title)} is {explaining.UNTRAINED}", file=sys.stderr)
    data = f"{scenes} drawn scenes that no run has learned from" if scenes else images
    with progress_bar() as progress:
        record = build_gallery(exhibits, page, wanted, command=typed(), data=data, seen=progress)
    sheets = sum(len(one["images"]) for one in record["models"])
    for name, reason in {name: why for one in record["models"] for name, why in one["failed"].items()}.items():
        print(f"broadsight: {printable(name)} cannot be read: {printable(reason)}", file=sys.stderr)
    print(f"gallery: {page} ({sheets} sheets of {len(exhibits)} models in {page.with_suffix('')})")
    return DONE


def _runs() -> list[str]:
    """All runs in runs/ that classify and have weights."""
    from ..runs import is_dense
    from ..training.run_folder import WEIGHTS

    folder = Path("runs")
    found = sorted(path for path in folder.iterdir() if (path / WEIGHTS).is_file()) if folder.is_dir() else []
    found = [str(path) for path in found if not is_dense(path)]
    if not found:
        raise UsageError(
            "no RUN or MODEL is named, and runs/ holds no run that classifies; name one, or first: broadsight train"
        )
    return found


def _exhibit(
    name: str, images: tuple[str, ...], scenes: int, *, pretrained: bool, size: int | None, device: str
) -> Any:
    from ..data.sources.unlabelled import find_images
    from ..explanation.gallery import Exhibit
    from ..runs.classifier import open_classifier

    source, _, checkpoint = (name, "", "") if Path(name).exists() else name.partition("@")
    classifier = open_classifier(source, checkpoint=checkpoint or None, pretrained=pretrained, size=size, device=device)
    untrained = not (classifier.run or checkpoint or pretrained)
    shown = drawn_scenes(scenes, classifier) if scenes else find_images(images)[0]
    return Exhibit(classifier, shown, _weights(classifier, checkpoint, untrained), untrained)


def _weights(classifier: Any, checkpoint: str, untrained: bool) -> str:
    if classifier.run:
        return _training(classifier)
    return "random" if untrained else f"`{Path(checkpoint).name}`" if checkpoint else "timm's"


def _training(classifier: Any) -> str:
    """How a run was trained, and what it reached."""
    from ..training.run_folder import RunFolder

    about = classifier.run.get("broadsight", {})
    count = about.get("data", {}).get("counts", {}).get("train")
    epochs = [line for line in RunFolder(Path(classifier.source)).metrics() if line["kind"] == "epoch"]
    words = ["trained here"] + ([f"on {count:,} images"] if count else [])
    if epochs:
        best = epochs[-1].get("best")
        words.append(f"for {epochs[-1]['epoch']} epochs" + (f": {best:.1f} % of others right" if best else ""))
    return " ".join(words)
