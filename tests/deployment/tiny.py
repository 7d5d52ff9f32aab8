"""A model that exports in a second, what an artefact of it says of itself, and how artefacts are made and checked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from broadsight.data.loading import Transforms
from broadsight.deployment import FORMATS, Description, Session, capture
from broadsight.deployment.request import Request
from broadsight.inspection.precision import cast


class Tiny(nn.Module):
    """(B, 3, H, W) -> (B, 4): one convolution, a mean, one linear layer."""

    num_classes = 4

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


class Pair(Tiny):
    """Two outputs: (B, 8, h, w) and (B, 4)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.conv(x).relu()
        return maps, self.head(maps.mean((2, 3)))


def described(side: int = 32, **changes) -> Description:
    image = {"channels": 3, "height": side, "width": side, "any_batch": True, "any_size": False}
    image |= {name: changes.pop(name) for name in image.keys() & changes.keys()}
    values = dict(task="classify", title="tiny", source="tiny", outputs=("logits",), image=image)
    values["classes"] = ("ant", "bée", "cat", "dog")
    values["preprocessing"] = preprocessing(Transforms(side, mean=(0.5,) * 3, std=(0.25,) * 3, crop_pct=0.875))
    values["provenance"] = {"commit": None, "versions": {"torch": torch.__version__}}
    return Description(**(values | changes))


def preprocessing(seen: Transforms) -> dict[str, Any]:
    said = dict(resize=int(seen.size / seen.crop_pct), crop=seen.size, crop_pct=seen.crop_pct)
    return said | dict(interpolation=seen.interpolation, mean=list(seen.mean), std=list(seen.std))


def ask(format: str, **options) -> Request:
    """How an artefact is asked for; of which model is the subject's business."""
    return Request("net", format=format, **options)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def needed(format: str) -> None:
    for package in FORMATS[format].packages:
        pytest.importorskip(package)


def written(format: str, folder: Path, model: nn.Module, description: Description) -> Path:
    """An artefact of a model, without a comparison; skipped where the format's packages are missing."""
    needed(format)
    image, form = description.image, FORMATS[format]
    model = cast(model.eval(), "fp32" if form.chooses else description.precision)
    sizes = dict(any_batch=image["any_batch"], any_size=image["any_size"])
    path = folder / f"model{form.suffix}"
    form.write(capture(model, description.shape, **sizes, dtype=torch.float32), description, path)
    return path


def reference(model: nn.Module) -> Callable[[np.ndarray], list[np.ndarray]]:
    """What `compare` compares with."""

    def run(images: np.ndarray) -> list[np.ndarray]:
        with torch.no_grad():
            found = model(torch.from_numpy(images))
        return [one.numpy() for one in (found if isinstance(found, tuple) else (found,))]

    return run


def check_same(session: Session, model: nn.Module, images: np.ndarray, atol: float = 1e-5, rtol: float = 1e-7) -> None:
    """A session with one output answers as the model does."""
    (found,) = session(images).values()
    np.testing.assert_allclose(found, *reference(model)(images), rtol=rtol, atol=atol)


def shifted(original: Callable[..., Session], amount: float) -> property:
    """`Format.open`, but what it opens answers by this much too high."""

    def opened(self):
        def session_of(path: Path, threads: int | None = None, precision: str | None = None) -> Session:
            true = original(path, threads, precision)
            return Session(true.description, lambda images: [x + np.float32(amount) for x in true(images).values()])

        return session_of

    return property(opened)
