"""The formats: what each needs, what its files are called, and who reads them."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import unknown
from ..session import Session


@dataclass(frozen=True)
class Format:
    """A way to keep a model.

    Args:
        suffix: Of its file; a folder has none.
        module: Of this package, with `write(program, description, path)` and `open(path, threads)`.
        packages: What has to be installed, by the names they are imported by.
        extra: Of ours, that installs them.
        files: Suffixes of all files that belong to one artefact.
        batches: Whether it can take any number of images at once,
        sizes: and any size.
        int8: Whether there is an int8 form,
        int8_batches: and that can take any number of images at once.
        guarded: Whether it keeps what torch assumed of sizes while capturing, and refuses images that differ.
        narrows: Whether a program for any number of images becomes one for a single image while it is written.
    """

    suffix: str
    module: str
    packages: tuple[str, ...]
    extra: str
    files: tuple[str, ...]
    batches: bool = True
    sizes: bool = True
    int8: bool = False
    int8_batches: bool = False
    guarded: bool = False
    narrows: bool = False

    @property
    def write(self) -> Callable[..., None]:
        return self._part("write")

    @property
    def open(self) -> Callable[..., Session]:
        return self._part("open")

    def _part(self, name: str) -> Any:
        return getattr(import_module(f".{self.module}", __name__), name)


ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
FORMATS = {
    "onnx": Format(".onnx", "onnx", ONNX_PACKAGES, "export", (".onnx",), int8=True, int8_batches=True),
    "openvino": Format(".xml", "openvino", ("openvino",), "openvino", (".xml", ".bin"), int8=True, narrows=True),
    "pt2": Format(".pt2", "pt2", (), "", (".pt2",), guarded=True),
    "executorch": Format(".pte", "executorch", ("executorch",), "executorch", (".pte",), batches=False, sizes=False),
    "web": Format("", "web", ONNX_PACKAGES, "export", (), sizes=False, int8=True, int8_batches=True),
}


def need(name: str, int8: bool = False) -> Format:
    """A format by its name.

    Raises:
        ValueError: There is none of that name, or what it needs is not installed; then with the line that installs it.
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    form = FORMATS[name]
    if int8 and not form.int8:
        able = ", ".join(name for name, other in FORMATS.items() if other.int8)
        raise ValueError(f"int8 with format {name!r}, which has none; expected one of {able}")
    packages = (*form.packages, "nncf") if int8 and name == "openvino" else form.packages
    missing = [package for package in packages if not installed(package)]
    if missing:
        raise ValueError(
            f"the format {name} needs {', '.join(missing)}, which is not installed; "
            f'run: pip install "broadsight[{form.extra}]"'
        )
    return form


def installed(package: str) -> bool:
    """Whether a package can be imported; it is not, since some take seconds."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def open_artefact(path: str | Path, threads: int | None = None) -> Session:
    """A file that `broadsight export` wrote, or the folder of a web page, in its own runtime on the CPU.

    Args:
        threads: Of the runtime's operators; None leaves it to the runtime.
    """
    path = Path(path)
    if path.is_dir():
        name = "web"
    else:
        name = next((name for name, form in FORMATS.items() if form.suffix and path.suffix == form.suffix), "")
    if not name:
        known = ", ".join(form.suffix for form in FORMATS.values() if form.suffix)
        raise ValueError(f"{path} is of no format of ours; expected a file ending in {known}, or the folder of a page")
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; `broadsight export` writes one")
    return need(name).open(path, threads)
