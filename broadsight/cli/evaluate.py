"""The command that measures how good a model is: eval."""

import json as json_
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from ..files import next_folder
from .parser import (
    CLASSIFIERS,
    DENSE_RUNS,
    DONE,
    INTERRUPTED,
    PARTS,
    AllowOutside,
    Arg,
    Checkpoint,
    Device,
    Flip,
    Light,
    ModelArgs,
    Pretrained,
    Run,
    Scales,
    Size,
    Slide,
    Threads,
    UsageError,
    Workers,
    check_options,
    facts_of,
    register_models,
    typed,
    value_of,
)
from .terminal import check_creatable, check_writable, printable, progress_bar, show

BATCH = 4  # images per call of a dense model, unless asked for otherwise: they are large
SUITES = ("occlusion", "fgsm", "salient", "corruptions")  # those that have options of their own


def eval(
    run: Run,
    data: Annotated[
        str | None,
        Arg(
            "images, as train takes them, an ImageNet set, or a folder of several; none: what the run validated on",
            True,
            "DATA",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        Arg(
            "joined by commas: occlusion, fgsm, salient, corruptions, robustness (all four); or what DATA must be: "
            "imagenet, imagenet-real, imagenet-v2, imagenet-a, imagenet-r, imagenet-sketch",
            of=(CLASSIFIERS,),
        ),
    ] = None,
    beside: Annotated[
        str | None,
        Arg(
            "further runs and timm names to compare, joined by commas; NAME@FILE brings its weights", of=(CLASSIFIERS,)
        ),
    ] = None,
    out: Annotated[
        str | None, Arg("folder for the result; without it a new one in evaluations/", metavar="DIR")
    ] = None,
    part: Annotated[
        Literal["auto", "train", "val", "test", "all"],
        Arg("of DATA; auto: what is set apart to validate, or all", of=(PARTS,)),
    ] = "auto",
    split: Annotated[
        float | None, Arg("where nothing is: the part that training with this --split held out", of=(PARTS,))
    ] = None,
    samples: Annotated[int | None, Arg("so many images, drawn by chance, instead of all", least=1)] = None,
    metrics: Annotated[
        str | None,
        Arg(
            "figures, joined by commas, that must be there: top1, top5, loss, balanced_accuracy, macro_f1, auroc, ece, "
            "confidence; without it all that can be",
            of=(CLASSIFIERS,),
        ),
    ] = None,
    bins: Annotated[int, Arg("of the calibration error", of=(CLASSIFIERS,), least=1)] = 15,
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = True,
    model_args: ModelArgs = None,
    size: Size = None,
    light: Light = False,
    saliency: Annotated[
        str | None,
        Arg("of the suite salient: scenes, gradcam, dino, or your own as file.py:function", of=("--suite salient",)),
    ] = None,
    dino_checkpoint: Annotated[
        str | None, Arg("weights of the saliency dino; timm's without", metavar="FILE", of=("--saliency dino",))
    ] = None,
    corruptions: Annotated[
        str | None,
        Arg("of the suite corruptions, joined by commas; all fifteen without", of=("--suite corruptions",)),
    ] = None,
    severities: Annotated[
        str | None, Arg("of the suite corruptions, joined by commas; 1,2,3,4,5 without", of=("--suite corruptions",))
    ] = None,
    epsilons: Annotated[
        str | None, Arg("of the suite fgsm, in 255ths, joined by commas; 1,4,8 without", of=("--suite fgsm",))
    ] = None,
    occluded: Annotated[
        str | None,
        Arg(
            "of the suite occlusion, parts of the side, joined by commas; 0.25,0.5,0.75 without",
            of=("--suite occlusion",),
        ),
    ] = None,
    real_labels: Annotated[
        str | None, Arg("other labels for imagenet-real than timm's", metavar="FILE", of=(CLASSIFIERS,))
    ] = None,
    flip: Flip = False,
    scales: Scales = None,
    slide: Slide = False,
    batch: Annotated[int | None, Arg("images per call; 64, or of a dense run 4", least=1)] = None,
    workers: Workers = None,
    threads: Threads = None,
    device: Device = "auto",
    seed: Annotated[
        int | None,
        Arg(
            "of samples and suites; and of scenes and hold-outs, where it is the run's",
            of=(PARTS, "--samples"),
            least=0,
        ),
    ] = None,
    strict: Annotated[bool, Arg("stop at an image that cannot be read instead of skipping it")] = False,
    latency: Annotated[bool, Arg("take times", of=(CLASSIFIERS,))] = True,
    root: Annotated[str | None, Arg("where a timm dataset lies or is put", metavar="DIR", of=(CLASSIFIERS,))] = None,
    download: Annotated[bool, Arg("let a timm dataset be fetched", of=(CLASSIFIERS,))] = False,
    allow_outside: AllowOutside = False,
    json: Annotated[
        str | None, Arg("print the record as JSON, not tables, or write it to FILE; comes last", False, "FILE", "-")
    ] = None,
) -> int:
    """Evaluate a run: accuracy, calibration and robustness, or AP and mIoU of a dense one; with a report."""
    given = dict(locals())
    check_writable(json if json != "-" else None)
    register_models()
    from ..data.inside import permit_outside

    permit_outside(allow_outside)
    facts = _facts_of_eval(run, data, _words(suite) or (), _words(beside) or (), saliency, samples)
    check_options(eval, given, facts)
    if facts[DENSE_RUNS] is None:
        return eval_dense(
            run,
            data,
            out=out,
            json=json,
            batch=batch,
            part=part,
            split=split,
            seed=seed,
            samples=samples,
            flip=flip,
            scales=_numbers("--scales", scales, float) or (1.0,),
            slide=slide,
            size=size,
            workers=workers,
            threads=threads,
            device=device,
            strict=strict,
        )
    from ..evaluation.request import Asked
    from ..evaluation.run import evaluate
    from ..evaluation.suites import Choices
    from ..files import write_text
    from ..report.run import write_evaluation
    from ..training.recipes import assignments
    from .evaluation_tables import terminal_tables

    folder = new_folder(out)
    choices = Choices(
        **_given(
            sides=_numbers("--occluded", occluded, float),
            epsilons=_numbers("--epsilons", epsilons, float),
            corruptions=_words(corruptions),
            severities=_numbers("--severities", severities, int),
            saliency=saliency,
            dino_checkpoint=dino_checkpoint,
        )
    )
    asked = Asked(
        run,
        data,
        suites=_words(suite) or (),
        beside=_words(beside) or (),
        part=part,
        split=split,
        root=root,
        download=download,
        samples=samples,
        metrics=_words(metrics),
        bins=bins,
        checkpoint=checkpoint,
        pretrained=pretrained,
        model_args={key: value_of(text) for key, text in assignments(model_args or [], "--model-args").items()},
        size=size,
        light=light,
        choices=choices,
        real_labels=real_labels,
        batch=64 if batch is None else batch,
        workers=workers,
        threads=threads,
        device=device,
        strict=strict,
        seed=seed,
        latency=latency,
    )
    with progress_bar() as progress:
        evaluation = evaluate(asked, progress, lambda note: print(f"note: {printable(note)}", file=sys.stderr))
    if evaluation.how["interrupted"]:
        print(f"note: {printable(evaluation.found.notes[-1])}", file=sys.stderr)
    folder = folder or next_evaluation(evaluation.results[0].task.classifier.title, evaluation.found.description)
    record = write_evaluation(evaluation, folder, typed())
    if json and json != "-":
        write_text(json_.dumps(record, indent=1, allow_nan=False) + "\n", Path(json))
    if json == "-":
        print(json_.dumps(record, indent=1, allow_nan=False))
        return INTERRUPTED if evaluation.how["interrupted"] else DONE
    for table in terminal_tables(record):
        show(table, whole=True)
    if record["skipped"]:
        print(f"{len(record['skipped'])} images could not be read; the report names them", file=sys.stderr)
    print(f"report: {folder / 'report.html'} (with evaluation.json and predictions.csv)")
    return INTERRUPTED if evaluation.how["interrupted"] else DONE


def new_folder(out: str | None, usual: str = "evaluations") -> Path | None:
    """The folder for a result, after a check that it can be made: hours of work should not end in this.

    Args:
        usual: Where a new one is made if none is named.
    """
    folder = Path(out) if out else None
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {out} exists and is not an empty folder; choose another, nothing was changed")
    check_creatable(folder or Path(usual))
    return folder


def _facts_of_eval(
    run: str, data: str | None, suites: Sequence[str], beside: Sequence[str], saliency: str | None, samples: int | None
) -> dict[str, str | None]:
    """What holds of an evaluation, by what options are for: None, or why it does not."""
    facts = facts_of(run, *(one for one in beside if not one.partition("@")[1]))
    dense = facts[CLASSIFIERS]
    names = {f"--suite {name}": name in suites or "robustness" in suites for name in SUITES}
    names |= {"--saliency dino": saliency == "dino" and names["--suite salient"]}
    facts |= {name: dense or (None if holds else "which is not given") for name, holds in names.items()}
    facts["--samples"] = None if samples is not None else "which is not given"
    return facts | {PARTS: "a dense run is asked about what it validated on" if dense and data is None else None}


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(option: str, text: str | None, kind: type) -> tuple[Any, ...] | None:
    try:
        return None if text is None else tuple(kind(word) for word in _words(text) or ())
    except ValueError:
        raise UsageError(f"{option} {text}; expected numbers joined by commas") from None


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def next_evaluation(title: str, found: dict[str, Any]) -> Path:
    """The next free number of a name that says what was evaluated."""
    data = re.sub(r"\W+", "-", Path(str(found.get("data") or found.get("kind"))).name or "data")
    return next_folder("evaluations", data, title)


def eval_dense(
    run: str, data: str | None, *, out: str | None, json: str | None, batch: int | None, **options: Any
) -> int:
    """Evaluate a dense run, write evaluation.json, results.json and report.html, and show the figures."""
    from ..evaluation.dense import DenseAsked, evaluate_dense
    from ..files import write_text
    from ..report.dense import write_dense_evaluation
    from .evaluation_tables import dense_tables

    folder = new_folder(out)
    asked = DenseAsked(run, data, batch=batch or BATCH, **options)
    with progress_bar() as progress:
        evaluation = evaluate_dense(asked, progress, lambda note: print(f"note: {printable(note)}", file=sys.stderr))
    folder = folder or next_evaluation(evaluation.run.title, evaluation.part.description)
    record = write_dense_evaluation(evaluation, folder, typed())
    code = INTERRUPTED if evaluation.interrupted else DONE
    if json and json != "-":
        write_text(json_.dumps(record, indent=1, allow_nan=False) + "\n", Path(json))
    if json == "-":
        print(json_.dumps(record, indent=1, allow_nan=False))
        return code
    for table in dense_tables(record):
        show(table, whole=True)
    if record["skipped"]:
        print(f"{len(record['skipped'])} images could not be read; the report names them", file=sys.stderr)
    also = "evaluation.json and results.json" if evaluation.results else "evaluation.json"
    print(f"report: {folder / 'report.html'} (with {also})")
    return code
