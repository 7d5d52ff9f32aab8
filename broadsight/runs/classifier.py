"""A classifier ready for use: the model, how images reach it, what its classes are called."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

import broadsight

from ..data.loading import Transforms
from ..data.normalising import Normalise, per_channel
from ..errors import first_line
from ..inspection.precision import cast, chosen
from ..models.from_run import label_names, read_config, stored_model
from ..surgery.pooling import check_name, create_backbone
from ..training.history import check_history
from ..training.run_folder import CONFIG, WEIGHTS, RunFolder, is_run
from ..training.settings import title as model_title
from ..weights.loading import load_given
from ..weights.packaged import load_packaged
from .names import imagenet_names

PACKAGE = "package"  # instead of a checkpoint: the weights of an installed one


class Verbs:
    """What can be done with a Classifier or a DenseModel: the verbs of the package, with this run first."""

    @property
    def metrics(self: Any) -> Mapping[str, Any]:
        """What metrics.jsonl says of the epoch whose model a run kept; empty for others."""
        lines = RunFolder(Path(self.source)).metrics() if is_run(Path(self.source)) else []
        epochs = [line for line in lines if line["kind"] == "epoch"]
        kept = epochs[-1].get("best_epoch") if epochs else None
        return next((line for line in epochs if line["epoch"] == kept), epochs[-1] if epochs else {})

    def predict(self, images: Any, **options: Any) -> Any:
        """What images show; see `broadsight.predict`."""
        return broadsight.predict(self, images, **options)

    def evaluate(self, data: Any = None, **options: Any) -> Any:
        """How good it is on labelled images; see `broadsight.evaluate`."""
        return broadsight.evaluate(self, data, **options)

    def explain(self, images: Any = (), **options: Any) -> Any:
        """What it looks at; see `broadsight.explain`."""
        return broadsight.explain(self, images, **options)

    def export(self, format: str = "onnx", **options: Any) -> Any:
        """A file for another runtime; see `broadsight.export`."""
        return broadsight.export(self, format=format, **options)


@dataclass(frozen=True)
class Classifier(Verbs):
    """A model in eval mode, and all that is needed to ask it."""

    title: str  # what tables call it
    source: str  # a run folder or a timm name
    model: nn.Module  # normalised images (B, C, H, W) -> logits (B, num_classes)
    transforms: Transforms  # how an image becomes the model's input
    labels: tuple[str, ...] | None  # names of its classes, or None where nobody has written them down
    normalise: Normalise  # bytes (B, C, H, W) -> normalised images on the model's device
    run: Mapping[str, Any]  # what a run folder says of itself; empty for others
    precision: str = "fp32"  # of the weights, in which it computes; it takes and gives float32
    task: ClassVar[str] = "classify"

    @property
    def device(self) -> torch.device:
        return self.normalise.device

    @property
    def num_classes(self) -> int:
        return int(self.model.num_classes)  # ty: ignore[invalid-argument-type]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes: as a run says, as in ImageNet for a model of timm's with 1000, or numbers."""
        if self.labels is not None:
            return self.labels
        if self.num_classes == 1000 and not self.run:
            return imagenet_names()
        return tuple(map(str, range(self.num_classes)))

    def logits(self, images: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) -> finite logits (B, num_classes) in single precision, or a RuntimeError."""
        found = self.model(images).float()
        if wrong := int((~torch.isfinite(found)).any(-1).sum()):
            what = f"{self.title} answers {wrong} of {len(found)} images with numbers that are not finite"
            raise RuntimeError(f"{what}; its weights are damaged or its training has diverged")
        return found


def open_classifier(
    source: str | Path,
    *,
    checkpoint: str | Path | None = None,
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    size: int | None = None,
    light: bool = False,
    device: str = "auto",
    precision: str = "fp32",
) -> Classifier:
    """A run's best model, or any of timm's.

    Args:
        source: A run folder (or any folder that timm loads as local-dir), or a timm name.
        checkpoint: Weights for a timm name: a file, a run folder, or "package" (see `broadsight.weights.packaged`).
        pretrained: Without a checkpoint, timm's own weights; else random ones, for a trial.
        model_args: Arguments of a timm name.
        size: Pixels of a side; without it what the model was trained for.
        light: Let a multi-token pooling classify with its averaged tokens alone.
        device, precision: "auto", "cpu" or "cuda"; "auto", "fp32", "bf16" or "fp16".
    """
    place = chosen_device(device)
    precision = chosen(precision, place)
    if size is not None and size < 1:
        raise ValueError(f"--size {size}; expected pixels of a side")
    path, channels, labels, run = Path(source), None, None, dict[str, Any]()
    if path.is_dir():
        if checkpoint or model_args:
            raise ValueError(f"{source} is a run with weights and arguments of its own; give a timm name with others")
        model, labels, run = _of_run(path)
        settings = run.get("broadsight", {}).get("settings")
        title = model_title(settings) if settings else path.absolute().name
    else:
        model = _of_timm(str(source), checkpoint, pretrained, dict(model_args or {}), size)
        channels = (model_args or {}).get("in_chans")
        title = str(source).rpartition("/")[2]
    if not getattr(model, "num_classes", 0):
        raise ValueError(f"{source} has no classifier; give a model that classifies")
    if light:
        if not hasattr(model, "lighten") or not getattr(model, "has_groups", False):
            raise ValueError(f"{source} has no multi-token pooling to lighten; leave --light out")
        model, title = model.lighten(), f"{title}-light"
    # as the model's own description has it, at the size that it is best tested at, but for the channels
    config = resolve_model_data_config(model, use_test_size=True)
    channels = channels or config["input_size"][0]
    mean, std = (per_channel(config[key], channels) for key in ("mean", "std"))
    side = size or config["input_size"][2]
    transforms = Transforms(side, channels, mean, std, config["interpolation"], config["crop_pct"])
    model = cast(model.to(place).eval().requires_grad_(False), precision)
    normalise = Normalise(mean, std, place)
    if size is not None:
        try:
            with torch.inference_mode():
                model(normalise(torch.zeros((1, channels, size, size), dtype=torch.uint8)))
        except Exception as error:
            raise ValueError(f"--size {size} does not suit {title}: {first_line(error)}") from None
    return Classifier(title, str(source), model, transforms, labels, normalise, run, precision)


def chosen_device(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no CUDA device here; use cpu or auto")
    return torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")


def _of_run(path: Path) -> tuple[Any, tuple[str, ...] | None, dict[str, Any]]:
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path} holds no run: there is no {CONFIG} in it; give the folder that train wrote")
    run = read_config(path)
    check_history(run, path / CONFIG)
    if "architecture" not in run:
        raise ValueError(f"{path / CONFIG} describes no model; give the folder that train wrote")
    if not (path / WEIGHTS).is_file():
        what = f"{path} holds no weights ({WEIGHTS}), which come with its first evaluation"
        raise FileNotFoundError(f"{what}; finish the run: broadsight train --resume --out {path}")
    RunFolder(path).check_weights(run)
    task = run.get("broadsight", {}).get("task", "classify")
    if task != "classify":
        raise ValueError(f"{path} holds a run of --task {task}; expected one that classifies")
    model: Any = stored_model(run, path, numbers=(path / WEIGHTS).stat().st_size // 2)
    load_given(model, path)
    labels = label_names(run, str(path / CONFIG))
    if labels is not None and len(labels) != model.num_classes:
        raise ValueError(f"{path / CONFIG} names {len(labels)} classes, the model has {model.num_classes}")
    return model, labels, run


def _of_timm(
    name: str, checkpoint: str | Path | None, pretrained: bool, arguments: dict[str, Any], size: int | None
) -> Any:
    if Path(name).is_file():
        raise ValueError(
            f"{name} is a file; expected a run folder or a timm name (predict and eval take exported files)"
        )
    if "/" in name and ":" not in name:
        raise FileNotFoundError(f"there is no run in {name}; give the folder that train wrote, or a timm name")
    check_name(name)
    given = bool(arguments)  # by the user, whose fault it is then
    config = timm.models.get_pretrained_cfg(name) if timm.is_model(name.split(".")[0]) else None
    if size is not None and config is not None and config.fixed_input_size:
        arguments.setdefault("img_size", size)
    if checkpoint == PACKAGE:
        return load_packaged(name, **arguments)
    fetched = pretrained and checkpoint is None
    if fetched and config is not None and not config.has_weights:
        hint = "give some by --checkpoint, or try random ones by --no-pretrained"
        raise ValueError(f"{name} comes without trained weights; {hint}")
    try:
        model: Any = create_backbone(name, pretrained=fetched, **arguments)
    except ValueError:
        raise
    except Exception as error:
        if fetched:
            raise RuntimeError(f"the pretrained weights of {name} cannot be had: {first_line(error)}") from None
        raise (ValueError if given else RuntimeError)(f"{name} cannot be made: {first_line(error)}") from None
    if checkpoint is not None:
        load_given(model, checkpoint)
    return model
