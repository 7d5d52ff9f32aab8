"""Exported files where a run is taken: a classifier that answers through the file's own runtime."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.normalising import Normalise
from ..errors import UsageError
from ..options import ModelOptions, flag
from ..runs.classifier import Classifier
from ..runs.opening import Run, open_asked
from ..training.run_folder import is_run
from .formats import FORMATS, open_artefact
from .images import transforms_of
from .session import Session

# Options of runs and timm names that cannot change what a file holds.
FIXED = ("checkpoint", "pretrained", "model_args", "size", "light")


class ExportedModel(nn.Module):
    """Normalised images (B, C, H, W) -> logits (B, K). It has no layers to look into, and gives no gradients."""

    def __init__(self, session: Session):
        super().__init__()
        self.session = session
        named = session.description.classes
        self.num_classes = len(named) if named else self(torch.zeros(1, *session.description.shape)).shape[1]

    def forward(self, images: Tensor) -> Tensor:
        if images.requires_grad:
            title = self.session.description.title
            raise ValueError(f"{title} is an exported file, which gives no gradients; give the run it was made from")
        return torch.from_numpy(self.session(images.numpy())["logits"])


@dataclass(frozen=True)
class ExportedClassifier(Classifier):
    """A classifier in a file; its size is what the file says of it."""

    @property
    def parameters(self) -> int:
        return self.model.session.description.provenance["parameters"]  # ty: ignore


def is_exported(run: Run) -> bool:
    """Whether a run is named by a file that `broadsight export` writes, or by the folder of a page."""
    if not isinstance(run, str | Path):
        return False
    path = Path(run)
    page = path.is_dir() and (path / "index.html").is_file() and not is_run(path)
    return page or (path.is_file() and any(form.owns(path) for form in FORMATS.values()))


def open_exported(path: str | Path, threads: int | None = None, precision: str | None = None) -> ExportedClassifier:
    """An exported classifier, ready to be asked as a run is; a ValueError if the file holds something else."""
    session = open_artefact(path, threads, precision)
    description = session.description
    if description.task != "classify":
        raise ValueError(
            f"{path} was exported for the task {description.task}; expected a classifier: ask it by "
            "broadsight.deployment.dense.session.predict_images, or give the run it was made from"
        )
    if type(description.provenance.get("parameters")) is not int:
        raise ValueError(f"{path} does not say how many parameters it has; export it again")
    transforms = transforms_of(description)
    normalise = Normalise(transforms.mean, transforms.std)
    model = ExportedModel(session).eval()
    about = str(path), model, transforms, description.classes, normalise, {}, session.precision
    return ExportedClassifier(description.title, *about)


def refuse_without_gradients(what: str, classifier: Classifier) -> None:
    """Refuse what needs gradients of an exported classifier."""
    if isinstance(classifier, ExportedClassifier):
        raise UsageError(f"{what} needs gradients; {classifier.source} is an exported file without any: give a run")


def open_any(request: ModelOptions, run: Run | None = None, **options: Any) -> Any:
    """What `open_asked` opens, or an exported file."""
    named: Any = getattr(request, "run", None) if run is None else run
    if not is_exported(named):
        return open_asked(request, run, **options)
    if run is None:
        for name in FIXED:
            if name in request.given:
                raise UsageError(f"{flag(name)}: {named} is an exported file, which stays as it is; leave it out")
    if getattr(request, "device", "auto") == "cuda":
        raise UsageError(f"--device cuda: {named} is an exported file, which runs on the CPU; leave it out")
    precision: Any = getattr(request, "precision", None) if "precision" in request.given else None
    return open_exported(named, torch.get_num_threads(), precision)  # with the threads of models it is timed beside
