"""The command that looks inside: explain."""

import json as json_
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..files import next_folder, write_json
from .evaluate import new_folder
from .parser import (
    DONE,
    INTERRUPTED,
    WRONG_USAGE,
    AllowOutside,
    Arg,
    Checkpoint,
    Device,
    Light,
    ModelArgs,
    Pretrained,
    Run,
    Size,
    Threads,
    UsageError,
    check_options,
    facts_of,
    register_models,
    typed,
    value_of,
)
from .terminal import check_writable, progress_bar, show

if TYPE_CHECKING:
    from rich.table import Table

SAMPLES = 3  # scenes that are looked at if nobody names an image
MOST_SCENES = 1000
GRADCAM = "the kind gradcam"
FEW = 20  # lines that the terminal shows


def explain(
    run: Run,
    images: Annotated[
        list[str] | None,
        Arg("files, folders, quoted patterns, or scenes:N, which are drawn; none: a few scenes", True, "IMAGE"),
    ] = None,
    list: Annotated[str | None, Arg("text file with the path of an image on every line", metavar="FILE")] = None,
    allow_outside: AllowOutside = False,
    kinds: Annotated[
        str | None,
        Arg(
            "joined by commas: gradcam, attention, map-tokens, super-tokens, abstract-tokens, fusion, foreground, "
            "c-mhsa; without it all that the model has"
        ),
    ] = None,
    class_: Annotated[
        str | None,
        Arg("class that Grad-CAM explains; without it the predicted one", metavar="NAME|NUMBER", of=(GRADCAM,)),
    ] = None,
    layers: Annotated[
        str | None, Arg("only these, joined by commas: paths such as layer4, or patterns such as 'stages.2.*'")
    ] = None,
    depth: Annotated[
        str | None, Arg("only these layers of each kind, joined by commas: numbers from 1, or last")
    ] = None,
    out: Annotated[str | None, Arg("new folder; without it the next in explanations/", metavar="DIR")] = None,
    singles: Annotated[bool, Arg("write every map over its image as a file too")] = False,
    raw: Annotated[bool, Arg("write the maps' numbers too, NAME.npz for each image")] = False,
    json: Annotated[
        str | None, Arg("print what explanation.json says, or write it to FILE too; comes last", False, "FILE", "-")
    ] = None,
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = True,
    model_args: ModelArgs = None,
    size: Size = None,
    light: Light = False,
    threads: Threads = None,
    device: Device = "auto",
) -> int:
    """Show what a model looks at: a sheet for every image with Grad-CAM, attention and the maps of its tokens."""
    given = dict(locals())
    folder = new_folder(out, "explanations")
    check_writable(json if json != "-" else None)
    register_models()
    from ..data.inside import permit_outside
    from ..prediction.classification import check_counts, check_output, printable
    from ..runs import is_dense, task_of

    permit_outside(allow_outside)
    check_counts(threads=threads)
    check_output("--json", json)
    if is_dense(run):
        raise UsageError(
            f"{run} is a run of --task {task_of(run)}; explain looks into classifiers, and what this run finds is "
            f"drawn by: broadsight predict {run} IMAGE --out DIR"
        )
    seen = words_of("--kinds", kinds)
    check_options(
        explain, given, facts_of(run) | {GRADCAM: None if not seen or "gradcam" in seen else f"this is --kinds {kinds}"}
    )
    import torch

    from ..explanation import files as explanation_files
    from ..explanation import run as explaining
    from ..runs.classifier import open_classifier
    from ..training.recipes import assignments

    wanted = explanation_files.Wanted(seen, class_, words_of("--layers", layers), _depths(depth), singles, raw)
    scenes = scenes_asked_for(images, list)
    source, notes = (None, []) if scenes else _found(images, list)
    if threads is not None:
        torch.set_num_threads(threads)
    classifier = open_classifier(
        run,
        checkpoint=checkpoint,
        pretrained=pretrained,
        model_args={key: value_of(text) for key, text in assignments(model_args or [], "--model-args").items()},
        size=size,
        light=light,
        device=device,
    )
    if source is None:
        source = drawn_scenes(scenes, classifier)
        given = "" if images else "; give IMAGE for others"
        notes = [f"on {scenes} built-in scenes, which are drawn{given}"]
    untrained = not (classifier.run or checkpoint or pretrained)
    if untrained:
        notes.append(f"{classifier.title} is {explanation_files.UNTRAINED}")
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    folder = folder or next_folder("explanations", classifier.title)
    bar: Any = nullcontext(lambda *_: None) if json == "-" and sys.stdout.isatty() else progress_bar()
    with bar as progress:
        found = explaining.explain(
            classifier,
            source,
            folder,
            wanted,
            untrained=untrained,
            seen=lambda done, name: progress(done, len(source), printable(Path(name).name) or classifier.title),
        )
    weights = "run" if classifier.run else "random" if untrained else str(checkpoint) if checkpoint else "pretrained"
    data = f"scenes:{scenes}" if scenes else " ".join(map(str, images or [])) or str(list)
    record = explanation_files.record_of(classifier, found, wanted, command=typed(), weights=weights, data=data)
    if found.entries:
        write_json(record, folder / explanation_files.RECORD)
    if json and json != "-":
        write_json(record, json)
    if json == "-":
        print(json_.dumps(record, indent=1))
    elif found.entries:
        show(_table(found.entries[:FEW]))
        more = f"the first {FEW} of {len(found.entries):,} images; " if len(found.entries) > FEW else ""
        print(f"{more}sheets: {folder} (with {explanation_files.RECORD})")
    _complain(found.errors, printable)
    if found.interrupted:
        return INTERRUPTED
    return DONE if found.entries else WRONG_USAGE  # nothing that was named is an image


def words_of(option: str, text: str | None) -> tuple[str, ...]:
    """What an option names, joined by commas; nothing if it is not given."""
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    if text is not None and not words:
        raise UsageError(f"{option} {text!r} names nothing; expected names joined by commas")
    return words


def _depths(text: str | None) -> tuple[str, ...]:
    words = words_of("--depth", text)
    if not all(re.fullmatch(r"last|0*[1-9][0-9]*", word) for word in words):
        raise UsageError(f"--depth {text}; expected numbers from 1, or last, joined by commas")
    return words


def scenes_asked_for(images: list[str] | None, listing: str | None = None) -> int:
    """How many scenes are asked for; 0 if images are."""
    if not images and listing is None:
        return SAMPLES
    found = [re.fullmatch(r"scenes(?::(.*))?", image) for image in images or [] if not Path(image).exists()]
    asked = [one for one in found if one]
    if not asked:
        return 0
    if len(asked) < len(images or []) or listing is not None:
        raise UsageError("scenes together with other images; expected one of the two")
    number = asked[0][1]
    if len(asked) > 1 or (number is not None and not re.fullmatch(r"[1-9][0-9]{0,3}|", number or "")):
        raise UsageError(f"{' '.join(images or [])}; expected scenes:N, up to {MOST_SCENES}")
    count = int(number) if number else SAMPLES
    if count > MOST_SCENES:
        raise UsageError(f"scenes:{count}; expected up to {MOST_SCENES}")
    return count


def _found(images: list[str] | None, listing: str | None) -> tuple[Any, list[str]]:
    from ..data.sources.unlabelled import find_images

    return find_images(images or [], listing)


def drawn_scenes(count: int, classifier: Any) -> Any:
    """Scenes of the test part, which no run was trained on, as large as the model sees them."""
    from ..data.scenes import Scenes
    from ..data.view import Grey

    transforms = classifier.transforms
    scenes = Scenes(count, size=max(8, round(transforms.size / transforms.crop_pct)), split="test")
    return Grey(scenes) if transforms.channels == 1 else scenes


def _table(entries: list[dict[str, Any]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    from ..prediction.classification import printable

    table = Table()
    for name in ("file", "class"):
        table.add_column(name, overflow="fold")
    table.add_column("%", justify="right", no_wrap=True)
    for name in ("explained", "sheet"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        best = entry["predictions"][0]
        cells = [entry["file"], best["class"], f"{100 * best['probability']:.1f}"]
        cells += [entry["explained"]["class"], entry["sheet"]]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _complain(errors: dict[str, str], printable: Any) -> None:
    """A line for each image that could not be read."""
    for name, reason in [*errors.items()][:FEW]:
        print(f"broadsight: {printable(name)} cannot be read: {printable(reason)}", file=sys.stderr)
    if len(errors) > FEW:
        print(f"broadsight: and {len(errors) - FEW:,} more cannot be read", file=sys.stderr)
