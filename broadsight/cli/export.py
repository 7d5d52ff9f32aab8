"""The command that ships a model: export."""

import json as json_
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .explain import words_of
from .parser import (
    CLASSIFIERS,
    DONE,
    MOST,
    TIMM_NAMES,
    Arg,
    Checkpoint,
    Light,
    ModelArgs,
    Run,
    Size,
    UsageError,
    check_options,
    facts_of,
    register_models,
    typed,
    value_of,
)
from .terminal import check_writable, progress_bar

if TYPE_CHECKING:
    from ..deployment.run import Exported
    from ..deployment.subject import Subject

BATCHES = "formats that take several images at once"
SEED = 0  # of weights that nobody has trained


def export(
    run: Run,
    format: Annotated[str, Arg("onnx, openvino, pt2, executorch (for phones) or web (a page for browsers)")] = "onnx",
    out: Annotated[
        str | None,
        Arg("file, or folder of a page; without it NAME with the format's ending, here", metavar="FILE|DIR"),
    ] = None,
    int8: Annotated[bool, Arg("quantise to 8-bit integers, by calibration on images", of=(CLASSIFIERS,))] = False,
    data: Annotated[
        str | None,
        Arg(
            "with --int8: labelled images to measure accuracy on; without it what the run validated on",
            of=("--int8",),
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        Arg(
            "with --int8: folder of images to calibrate on; without it the training part of DATA",
            metavar="IMAGES",
            of=("--int8",),
        ),
    ] = None,
    calibration_images: Annotated[int, Arg("with --int8: so many of them", of=("--int8",), least=1)] = 128,
    max_drop: Annotated[
        float,
        Arg(
            "with --int8: points of accuracy that may be lost; layers that lose more stay in float",
            of=("--int8",),
            least=0,
        ),
    ] = 1.0,
    keep_float: Annotated[
        str | None,
        Arg("with --int8: layers to leave in float, joined by commas, such as 'stages.0.*'", of=("--int8",)),
    ] = None,
    any_size: Annotated[bool, Arg("take images of any size, where the model can; slower than a fixed size")] = False,
    any_batch: Annotated[bool, Arg("take any number of images at once; else one", of=(BATCHES,))] = True,
    images: Annotated[
        str | None,
        Arg(
            "images to compare on: files, folders and quoted patterns, joined by commas; without it the run's own, "
            "or drawn scenes",
            metavar="IMAGES",
        ),
    ] = None,
    compare: Annotated[int, Arg("so many images", least=1)] = 8,
    tolerance: Annotated[float, Arg("largest difference to torch that is let through, over the largest output")] = 1e-3,
    rounds: Annotated[int, Arg("of timing against torch; 0 for none", least=0)] = 11,
    threads: Annotated[int, Arg("of torch and of the runtime while comparing and timing", least=1, most=MOST)] = 1,
    ort_web: Annotated[
        str | None,
        Arg(
            "with --format web: folder of onnxruntime-web; without it from npm, once",
            metavar="DIR",
            of=("--format web",),
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    pretrained: Annotated[
        bool,
        Arg("timm's own weights for a timm name that has some; others get random ones, with a note", of=(TIMM_NAMES,)),
    ] = True,
    model_args: ModelArgs = None,
    size: Size = None,
    light: Light = False,
    json: Annotated[
        str | None, Arg("print what NAME.export.json says, or write it to FILE too; comes last", False, "FILE", "-")
    ] = None,
) -> int:
    """Write a model for another runtime, open it there, compare it with torch on images, and take times."""
    given = dict(locals())
    check_writable(json if json != "-" else None)
    shown = words_of("--images", images)
    register_models()
    from ..deployment import run as exporting
    from ..prediction.classification import printable
    from ..runs import is_dense

    options = (("ort_web", ort_web),) if ort_web is not None else ()
    wanted = exporting.Wanted(format, any_batch, any_size, tolerance, threads, rounds, options)
    form = exporting.check_request(wanted, int8)
    facts = facts_of(run)
    facts["--int8"] = facts[CLASSIFIERS] or (None if int8 else "which is not given")
    facts["--format web"] = None if format == "web" else f"this is --format {format}"
    batches = form.int8_batches if int8 else form.batches
    facts[BATCHES] = (
        None if batches or not any_batch else f"{format}{' in int8' if int8 else ''} takes one image at a time"
    )
    check_options(export, given, facts)
    if out is not None:
        exporting.check_target(Path(out), form)
    if not is_dense(run):
        arguments = dict(checkpoint=checkpoint, pretrained=pretrained, model_args=model_args, size=size, light=light)
        subject, classifier, notes = _classifier(run, arguments, shown, compare)
    else:
        if format == "web":
            raise UsageError(
                f"--format web is a page for classifiers; {facts[CLASSIFIERS]}: "
                "expected onnx, openvino, pt2 or executorch"
            )
        subject, classifier, notes = _dense(run, size, shown, compare, any_size), None, []
    name = re.sub(r"[^a-zA-Z0-9_.-]+", "-", subject.description.title).strip("-.") or "model"
    target = Path(out or name + ("-int8" if int8 else "") + (form.suffix or "-web"))
    exporting.check_target(target, form)
    for note in [*notes, *subject.notes]:
        print(f"note: {printable(note)}", file=sys.stderr)
    bar: Any = nullcontext(lambda *_: None) if json == "-" and sys.stdout.isatty() else progress_bar()
    with bar as progress:
        quantise = None
        if int8 and classifier is not None:
            from ..deployment.int8.run import quantiser

            quantise = quantiser(
                classifier,
                subject,
                data=data,
                calibrate=calibrate,
                images=calibration_images,
                max_drop=max_drop,
                kept=tuple(word.strip() for word in (keep_float or "").split(",") if word.strip()),
                threads=threads,
                progress=progress,
            )
        found = exporting.export(subject, target, wanted, quantise=quantise, progress=progress)
    record = {"command": typed(), **found.record()}
    if json and json != "-":
        from ..benchmark.run import write_json

        write_json(record, json)
    if json == "-":
        print(json_.dumps(record, indent=1))
    else:
        for line in _lines(found, wanted):
            print(printable(line))
    return DONE


def _classifier(
    run: str, arguments: dict[str, Any], images: Sequence[str], count: int
) -> "tuple[Subject, Any, list[str]]":
    import timm
    import torch

    from ..deployment.subject import of_classifier
    from ..runs.classifier import open_classifier
    from ..training.recipes import assignments

    notes = []
    given = assignments(arguments.pop("model_args") or [], "--model-args")
    name = str(run).split(".")[0]
    if not Path(run).is_dir() and timm.is_model(name) and not arguments["checkpoint"]:
        config = timm.models.get_pretrained_cfg(run)
        has_weights = arguments["pretrained"] and config is not None and config.has_weights
        if not has_weights:
            arguments["pretrained"] = False
            notes.append(f"{run} has random weights: for the speed and a trial; --checkpoint gives it trained ones")
    torch.manual_seed(SEED)
    try:
        classifier = open_classifier(
            run, **arguments, model_args={key: value_of(text) for key, text in given.items()}, device="cpu"
        )
    except RuntimeError as error:
        if "cannot be had" not in str(error):
            raise
        raise ValueError(
            f"{error}; give some by --checkpoint, or export random ones, for the speed, by --no-pretrained"
        ) from None
    return of_classifier(classifier, typed(), images, count), classifier, notes


def _dense(run: str, size: int | None, images: Sequence[str], count: int, any_size: bool) -> "Subject":
    from ..deployment.dense.subject import of_dense

    return of_dense(run, typed(), images, count, size=size, any_size=any_size)


def _lines(found: "Exported", wanted: Any) -> list[str]:
    """What a user wants to know of an export."""
    agreement, image = found.agreement, found.description.image
    batch = "any number of images" if image["any_batch"] else "one image at a time"
    sides = "any size" if image["any_size"] else f"{image['height']} x {image['width']} pixels"
    same = "" if agreement.same_class is None else f"; the same class for {agreement.same_class:.0%}"
    lines = [
        f"{found.path}: {found.bytes / 1e6:.1f} MB, {batch} of {sides}, written in {found.seconds:.0f} s",
        f"max error to torch {agreement.largest:.2e}, {agreement.relative:.2e} of the largest output (limit "
        f"{wanted.tolerance:g}), on {agreement.images} {found.shown}{same}",
    ]
    if agreement.relative > wanted.tolerance:
        lines.append(
            f"note: these weights magnify rounding: torch differs from itself by {agreement.rounding:.2e} in single "
            "precision against double, so that no artefact can come closer; training mends that"
        )
    if found.findings is not None:
        lines.append(_decoded(found.description.task, found.findings))
    if found.int8 is not None:
        lines += found.int8["lines"]
    if found.times is not None:
        times, plural = found.times, "s" if wanted.threads > 1 else ""
        lines.append(
            f"one image: torch {times.torch_ms.median:.1f} ms, {wanted.format}{' int8' if found.int8 else ''} "
            f"{times.artefact_ms.median:.1f} ms, {times.speedup.median:.2f} times as fast "
            f"(±{times.speedup.spread:.0%}, {wanted.rounds} rounds, {wanted.threads} thread{plural})"
        )
    return lines


def _decoded(task: str, findings: dict[str, float]) -> str:
    """How far apart findings are, which are boxes, classes of pixels or keypoints."""
    what = {"segment": "pixels", "keypoints": "keypoints"}.get(task, "objects")
    lead = f"decoded: {findings['differing']:.2%} of the {what} differ"
    return lead if task == "segment" else f"{lead}, the others by at most {findings['pixels']:.2g} pixels"
