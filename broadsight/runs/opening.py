"""Opens whatever users name as a run: the folder of a classifier or of a dense model, or a timm name."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..dense.heads import HEADS
from ..errors import UsageError
from ..options import CLASSIFIERS, DENSE_RUNS, SCORED, SEGMENTERS, TIMM_NAMES, WHOLE_IMAGES, ModelOptions
from ..training.run_folder import RunFolder, is_run
from .classifier import Classifier, open_classifier
from .dense_model import DenseModel, open_dense

CLASSIFY = "classify"
OPENED = (Classifier, DenseModel)
RANDOM = "random"  # where weights are from that nobody has trained
Run = str | Path | Classifier | DenseModel


def task_of(source: Run) -> str:
    """What a run learned, read from its description alone; timm names and folders of other makers classify."""
    if isinstance(source, OPENED):
        return source.task
    path = Path(source)
    return RunFolder(path).config().get("broadsight", {}).get("task", CLASSIFY) if is_run(path) else CLASSIFY


def is_dense(source: Run) -> bool:
    """Whether `open_run` gives a DenseModel; read from the description alone."""
    return task_of(source) != CLASSIFY


def facts_of(run: Run, others: Iterable[Run] = ()) -> dict[str, str | None]:
    """What options are for (`Option.of`), of a run and others beside it: None, or why it does not hold."""
    task, dense = task_of(run), is_dense(run)
    here = f"this run is of --task {task}" if dense else "this is a classifier"
    head = run.head if isinstance(run, DenseModel) else None
    if dense and head is None:
        head = RunFolder(Path(str(run))).config().get("broadsight", {}).get("settings", {}).get("head")
    whole = not (head in HEADS and HEADS[head].top_down)
    crops = f"{head} looks at crops of single objects"
    named = not all(isinstance(one, OPENED) or Path(one).is_dir() for one in (run, *others))
    own = f"{name_of(run)} is a run with weights and arguments of its own"
    return {
        CLASSIFIERS: here if dense else None,
        DENSE_RUNS: None if dense else here,
        SEGMENTERS: None if task == "segment" else here,
        WHOLE_IMAGES: None if dense and whole else crops if dense else here,
        SCORED: None if dense and whole and task != "segment" else here if whole else crops,
        TIMM_NAMES: here if dense else None if named else own,
    }


def name_of(run: Run) -> str:
    """What messages call a run, whether it is open or not."""
    return run.source if isinstance(run, OPENED) else str(run)


def with_weights(name: Run) -> tuple[Run, str | None]:
    """NAME@FILE as the name and the file of its weights; without one, None."""
    if isinstance(name, OPENED) or Path(name).exists():
        return name, None
    first, mark, checkpoint = str(name).partition("@")
    return first if mark else name, checkpoint or None


def open_run(
    source: Run,
    *,
    checkpoint: str | Path | None = None,
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    size: int | None = None,
    light: bool = False,
    device: str = "auto",
    precision: str = "fp32",
) -> Classifier | DenseModel:
    """The best model of a run, or any of timm's, ready for use.

    Args:
        source: A run folder, any folder that timm loads as local-dir, or a timm name; what is open already stays so.
        checkpoint, pretrained, model_args, light: Of classifiers; see `open_classifier`.
        size: Pixels of a side, of dense models of the shorter one; without it what the model was trained for.
        device, precision: "auto", "cpu" or "cuda"; "auto", "fp32", "bf16" or "fp16".
    """
    given: dict[str, Any] = dict(checkpoint=checkpoint, model_args=model_args, light=light)
    if isinstance(source, OPENED):
        given |= dict(size=size, device=device.replace("auto", ""), precision=precision.replace("fp32", ""))
        if idle := [name for name, value in given.items() if value]:
            raise UsageError(f"{source.source} is open already; give {idle[0]} when you open it")
        return source
    how: dict[str, Any] = dict(size=size, device=device, precision=precision)
    if not is_dense(source):
        return open_classifier(source, pretrained=pretrained, **given, **how)
    if idle := [name for name, value in given.items() if value]:
        raise ValueError(f"{source} is a dense run with a model and weights of its own; leave {idle[0]} out")
    return open_dense(source, **how)


def open_asked(request: ModelOptions, run: Run | None = None, **options: Any) -> Any:
    """The run of a request, or another one (NAME@FILE brings its weights), opened with its options or with these."""
    names = ("checkpoint", "pretrained", "model_args", "size", "light", "device", "precision")
    asked = {name: getattr(request, name) for name in names if hasattr(request, name)}
    asked_for: Any = getattr(request, "run", None) if run is None else run
    run, checkpoint = with_weights(asked_for)
    asked["checkpoint"] = checkpoint or asked.get("checkpoint")
    return open_run(run, **{**asked, **options})


def origin_of(run: Run, checkpoint: str | None, pretrained: bool) -> str:
    """Where the weights of a run or a timm name are from: "run", a file, "timm" or "random"."""
    if isinstance(run, DenseModel) or (isinstance(run, Classifier) and run.run) or Path(name_of(run)).is_dir():
        return "run"
    return checkpoint or ("timm" if pretrained else RANDOM)
