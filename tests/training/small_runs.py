"""Folders with a few small images, runs on them that take a moment, and what a finished run leaves behind."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import nn

from broadsight.training import processes, run_folder
from broadsight.training.request import Request
from broadsight.training.run import Prepared, prepare
from broadsight.training.settings import settings_of
from broadsight.weights.writing import write_weights

SIZE = 32
SMALL_POOL = dict(groups=2, tokens=1, dim=24)  # of the multi-token kind, in thousandths of its published size


def fill(folder: Path, size: int = 40, **counts: int) -> Path:
    """A folder for each class with so many images, which differ in colour and noise."""
    random = np.random.default_rng(0)
    for place, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = random.integers(0, 100, (size, size, 3), dtype=np.uint8)
            pixels[..., place % 3] += 120
            Image.fromarray(pixels).save(folder / name / f"{number:03d}.png")
    return folder


def png(*colour: int, size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(file, "PNG")
    return file.getvalue()


def ask(data: Path | str, **options: Any) -> Request:
    """A request for one epoch of a tiny model; `changes` come on top of what makes it small."""
    changes = dict(epochs=1, warmup_epochs=0, batch_size=4, image_size=SIZE) | options.pop("changes", {})
    small = dict(data=str(data), model="test_resnet", recipe="quick", workers=0, threads=1, device="cpu", report=False)
    return Request(**small | options, set=changes)


def ready(request: Request) -> Prepared:
    """What `train` would run."""
    settings, recipe = settings_of(request, None)
    accelerator = processes.connect(request.device, recipe.precision, request.processes)
    return prepare(request, settings, recipe, accelerator)


def updates(prepared: Prepared, count: int) -> list[float]:
    """Make the first updates of a run; the loss of every pass."""
    engine = prepared.engine
    engine.plain.train(not engine.recipe.frozen_stats)
    engine.work.begin_epoch(0, 0)
    for _ in range(count):
        engine._update([engine.work.next_batch() for _ in range(engine.work.accumulate)])
        engine.progress.updates += 1
    return [float(loss) for loss, _ in engine._since_check]


def leave_run(
    folder: Path, name: str = "test_resnet", num_classes: int = 2, model_args: dict[str, Any] | None = None, **cfg: Any
) -> tuple[Path, nn.Module]:
    """A folder as a run leaves it, and the model in it. `cfg` overrides what timm says of it."""
    model_args = model_args or {}
    model = timm.create_model(name, num_classes=num_classes, **model_args)
    with torch.no_grad():  # answers that differ from image to image
        weight, bias = model.get_classifier().parameters()
        weight.normal_().sub_(weight.mean(1, keepdim=True)).mul_(10)
        bias.zero_()
    folder.mkdir(parents=True, exist_ok=True)
    channels = model_args.get("in_chans", 3)
    half = [0.5] * channels
    cfg = dict(input_size=[channels, SIZE, SIZE], mean=half, std=half, num_classes=num_classes) | cfg
    config = dict(architecture=name, num_classes=num_classes, model_args=model_args, pretrained_cfg=cfg)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(model, folder / "model.safetensors")
    return folder, model.eval()


def without_drawing(monkeypatch: Any) -> None:
    """Neither curves nor TensorBoard's events, which take longer than all else in a small run."""
    monkeypatch.setattr(run_folder, "draw_curves", lambda lines, path: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def offline_hub(monkeypatch: Any) -> None:
    """What HF_HUB_OFFLINE says, which is only read when the library is imported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def files_in(folder: Path) -> dict[str, bytes | None]:
    """Everything under a folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def refusal(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...] = ValueError) -> str:
    """What a call says that must fail."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind}")
