"""Opens whatever users name as a run: the folder of a classifier or of a dense model, or a timm name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..training.run_folder import RunFolder, is_run
from .classifier import Classifier, open_classifier
from .dense_model import DenseModel, open_dense

CLASSIFY = "classify"


def task_of(source: str | Path) -> str:
    """What a run learned, read from its description alone; timm names and folders of other makers classify."""
    path = Path(source)
    return RunFolder(path).config().get("broadsight", {}).get("task", CLASSIFY) if is_run(path) else CLASSIFY


def is_dense(source: str | Path) -> bool:
    """Whether `open_run` gives a DenseModel; read from the description alone."""
    return task_of(source) != CLASSIFY


def open_run(
    source: str | Path,
    *,
    checkpoint: str | Path | None = None,
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    size: int | None = None,
    light: bool = False,
    device: str = "auto",
) -> Classifier | DenseModel:
    """The best model of a run, or any of timm's, ready for use.

    Args:
        source: A run folder, any folder that timm loads as local-dir, or a timm name.
        checkpoint, pretrained, model_args, light: Of classifiers; see `open_classifier`.
        size: Pixels of a side, of dense models of the shorter one; without it what the model was trained for.
        device: "auto", "cpu" or "cuda".

    Raises:
        FileNotFoundError: There is no such run, or it has no weights yet.
        ValueError: The folder is damaged, or an option is not for what it holds.
    """
    if not is_dense(source):
        options: dict[str, Any] = dict(checkpoint=checkpoint, pretrained=pretrained, model_args=model_args, light=light)
        return open_classifier(source, size=size, device=device, **options)
    given = dict(checkpoint=checkpoint, model_args=model_args, light=light)
    if idle := [name for name, value in given.items() if value]:
        raise ValueError(f"{source} is a dense run with a model and weights of its own; leave {idle[0]} out")
    return open_dense(source, device=device, size=size)
