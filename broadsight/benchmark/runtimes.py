"""Models as other runtimes run them: exported to a folder once, opened with fixed threads, checked against torch."""

import hashlib
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..deployment import Description, capture, open_artefact, prepare, rounding_of
from ..deployment.agreement import allowance
from ..deployment.formats import FORMATS, need, runtimes
from ..files import move_together
from ..inspection.precision import cast
from .settings import Settings

TOLERANCE = 1e-3  # of a float artefact's outputs, relative to the largest
ALIKE = 0.5  # cosine of an int8 artefact's outputs and the model's, whose weights are random: enough to see nonsense
PACKAGES = ("torch", "timm", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "executorch")


class Artefacts:
    """A folder of exported models. Files that are there are used again, unless the code that makes them has changed."""

    def __init__(self, folder: Path, threads: int):
        self.folder, self.threads = folder, threads
        self._captured: tuple[tuple[str, bool, str], Any] | None = None  # onnx, openvino and pt2 share one program

    def open(self, runtime: str, model: nn.Module, title: str, images: Tensor, precision: str) -> Any:
        """What gives a model's logits of images in a runtime, its file, and its difference (see `_checked`)."""
        path = self.path(runtime, model, title, images, precision)
        session = open_artefact(path, self.threads, precision)
        array, name = images.numpy(), session.description.outputs[0]
        with torch.no_grad():
            expected = model(images).numpy()

        def allowed() -> float:
            return allowance(rounding_of(model, [array], precision), precision)

        difference = _checked(runtime, expected, session(array)[name], allowed)
        return lambda: session(array)[name], path, difference

    def path(self, runtime: str, model: nn.Module, title: str, images: Tensor, precision: str) -> Path:
        """The file of a model for a runtime, written if it is not there."""
        name, int8 = runtimes()[runtime]
        form = need(name, int8)
        precision = "fp32" if form.chooses else precision  # of the file
        making = ["graph", "lowering/*", f"formats/{name}*"] + ["int8/layers", f"int8/{name}"] * int8
        more = "-int8" * int8 + f"-{precision}" * (precision != "fp32")
        path = self.folder / f"{_key(model, title, images, making)}{more}{form.suffix}"
        if not path.exists():
            if int8:
                source, shape = self.path(name, model, title, images, precision), (8, *images.shape[1:])
                noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # good for nothing but speed
            with _whole(path, form.files) as unfinished:
                if int8:
                    form.calibrated(source, noise.numpy()).write(unfinished)
                else:
                    self._write(form, model, title, images, unfinished, precision)
        return path

    def _write(self, form: Any, model: nn.Module, title: str, images: Tensor, path: Path, precision: str) -> None:
        channels, height, width = images.shape[1:]
        key = _key(model, title, images), form.batches, precision
        if self._captured is None or self._captured[0] != key:
            made, how = cast(prepare(model, (height, width)), precision), dict(any_batch=form.batches)
            self._captured = key, capture(made, (channels, height, width), **how, dtype=torch.float32)
        image = dict(channels=channels, height=height, width=width, any_batch=form.batches, any_size=False)
        said = Description("classify", title, title, None, ("logits",), image, {}, precision=precision)
        form.write(self._captured[1], said, path)

    def weights(self, model: nn.Module, title: str, images: Tensor) -> Path:
        """The model's weights as a safetensors file, which torch starts from."""
        from safetensors.torch import save_model

        path = self.folder / f"{_key(model, title, images)}.safetensors"
        if not path.exists():
            with _whole(path, (".safetensors",)) as unfinished:
                save_model(model, str(unfinished))
        return path


@contextmanager
def keep(folder: str | Path | None, settings: Settings) -> Generator[Artefacts, None, None]:
    """Artefacts in a given folder, or in a temporary one, for runtimes whose packages are all there."""
    for runtime in settings.exported:
        need(*runtimes()[runtime])
    if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
        raise ValueError(f"cannot keep artefacts in {str(folder)!r}: it is a file; give the name of a folder")
    with nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory() as place:
        yield Artefacts(Path(place), settings.threads)


def file_bytes(path: Path) -> int:
    """Bytes of an artefact, all its files together."""
    form = next((form for form in FORMATS.values() if form.owns(path)), None)
    return sum(path.with_suffix(suffix).stat().st_size for suffix in (form.files if form else (path.suffix,)))


def _checked(runtime: str, expected: np.ndarray, came: np.ndarray, allowed: Callable[[], float] = float) -> float:
    """Largest difference from the model's answers, relative to the largest; too much, beyond `allowed`, is refused."""
    if came.shape != expected.shape:
        raise ValueError(f"outputs of shape {came.shape} in {runtime}, {expected.shape} in torch")
    difference = float(np.abs(came - expected).max() / np.abs(expected).max())
    if runtimes()[runtime][1]:
        alike = float((came * expected).sum() / np.linalg.norm(came) / np.linalg.norm(expected))
        if not alike >= ALIKE:  # true for NaN
            off = f"a cosine of {alike:.2g} with torch's"
            raise ValueError(f"outputs in {runtime} have {off}; expected {ALIKE} or more")
    elif not (difference <= TOLERANCE or difference <= allowed()):
        off = f"{difference:.2g} of the largest"
        raise ValueError(f"outputs in {runtime} differ from torch's by {off}; expected {TOLERANCE} at most")
    return difference


def _key(model: nn.Module, title: str, images: Tensor, exporting: Sequence[str] = ()) -> str:
    """A file name that changes with weights, image size, versions, and code: the model's and that of `exporting`."""
    digest = hashlib.sha256(repr((title, tuple(images.shape[1:]))).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + repr(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    for file in sorted(_sources(model, exporting)):
        digest.update(file.read_bytes())
    for package in PACKAGES:
        try:
            digest.update(f"{package} {version(package)}".encode())
        except PackageNotFoundError:
            continue
    return f"{re.sub(r'[^A-Za-z0-9_@]+', '-', title)}-{images.shape[2]}x{images.shape[3]}-{digest.hexdigest()[:10]}"


def _sources(model: nn.Module, exporting: Sequence[str]) -> set[Path]:
    """Files of this package that make the graph: of the export and of the model's modules, with all layers."""
    root, modules = Path(__file__).parents[1], {type(part).__module__ for part in model.modules()}
    files = {root / "surgery" / "fusion.py"}
    files |= {file for name in exporting for file in (root / "deployment").glob(f"{name}.py")}
    if ours := {module for module in modules if module.startswith("broadsight.")}:
        files |= {Path(sys.modules[module].__file__ or "") for module in ours} | set((root / "layers").rglob("*.py"))
    return {file for file in files if file.is_file()}


@contextmanager
def _whole(path: Path, suffixes: Sequence[str]) -> Generator[Path, None, None]:
    """Another place to write to; all files of an artefact get there together, its first one last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        move_together(unfinished, path, suffixes)
