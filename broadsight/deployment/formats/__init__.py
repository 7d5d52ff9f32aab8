"""The formats that models are exported to: what a format is, and the table of all, one module of this folder each."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

from ...errors import UsageError, first_line, unknown
from ...inspection.precision import chosen
from ..session import KEY, Description, Session

FORMATS: dict[str, "Format"] = {}
Kind = TypeVar("Kind", bound="type[Format]")


class Format:
    """A file format with its runtime. A subclass decorated by `register` is all that a new one needs."""

    name: str  # for `--format`
    files: tuple[str, ...] = ()  # suffixes of an artefact's files, that of the file to open first; a folder has none
    runtime = ""  # what runs it, for messages
    packages: tuple[str, ...] = ()  # what has to be installed, by import name; the last is the runtime's
    extra = ""  # the extra of ours that installs them, as in `pip install "broadsight[export]"`
    batches = sizes = True  # whether it can take any number of images at once, and any image size
    int8 = ""  # name of its int8 form in `broadsight bench --runtime`; empty if there is none
    int8_batches = False  # whether the int8 form can take any number of images at once
    int8_packages: tuple[str, ...] = ()  # what int8 needs beside `packages`
    guarded = False  # whether the file keeps what torch assumed about sizes while capturing, and refuses other images
    precisions: tuple[str, ...] = ("fp32",)  # that it can have, fp32 first
    chooses = False  # whether `load` takes the precision to compute in; else a file has that of its weights
    narrows = False  # whether `write` makes a program for one image of a program for any number

    @property
    def suffix(self) -> str:
        """The ending of the file to open; empty for a folder."""
        return self.files[0] if self.files else ""

    def write(self, program: Any, description: Description, path: Path) -> None:
        """Write a `torch.export.ExportedProgram` with its weights and its description."""
        raise NotImplementedError

    def load(self, path: Path, threads: int | None) -> Session:
        """What `write` wrote, in its runtime on the CPU. An error becomes one line in `open`."""
        raise NotImplementedError

    def open(self, path: str | Path, threads: int | None = None, precision: str | None = None) -> Session:
        """A file of this format in its runtime, on the CPU, with so many threads; what is inside is checked first. A
        precision must be what the runtime says that it computes in; None is the file's own, whatever becomes of it."""
        try:
            asked = {"precision": precision} if self.chooses else {}
            session = self.load(Path(path), threads, **asked)
            if precision not in (None, "auto", session.precision):
                what = f"{path} has {session.description.precision} weights, and {self.runtime} computes in"
                raise UsageError(f"{what} {session.precision} on this CPU, not in {precision}")
            return session
        except (OSError, UsageError):
            raise
        except ValueError as error:
            raise ValueError(f"{path} cannot be opened: {str(error).splitlines()[0]}") from None
        except Exception as error:
            raise ValueError(f"{path} cannot be opened by {self.runtime}: {first_line(error)}") from None

    def precision(self, asked: str, int8: bool = False) -> str:
        """What a request for a precision means; a ValueError if the format, or on this CPU its runtime, has none."""
        able = ("fp32",) if int8 else self.precisions
        if asked == "auto":
            return found if (found := chosen(asked)) in able else "fp32"
        if asked not in able:
            what = f"{self.runtime}{' in int8' * int8} has {' and '.join(able)} on this CPU"
            raise ValueError(f"--precision {asked}, but {what}; give one of these, or auto")
        return asked

    def owns(self, path: Path) -> bool:
        """Whether a path may be one of its artefacts, by its name."""
        return path.suffix == self.suffix and not path.is_dir()

    def calibrated(self, source: Path, calibration: Any, threads: int | None = None) -> Any:
        """A float file with the ranges of its values on images (N, C, H, W): an `int8.layers.Calibrated`."""
        raise NotImplementedError

    def describe(self, path: Path, description: Description) -> None:
        """Replace the description in a file; int8 needs it."""
        raise NotImplementedError


def register(kind: Kind) -> Kind:
    """Make a format known to `broadsight export`, `open_artefact` and `broadsight bench`; a class decorator."""
    FORMATS[kind.name] = kind()
    return kind


def need(name: str, int8: bool = False) -> Format:
    """A format by its name; a ValueError if it is unknown, or says how to install what it needs."""
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    form = FORMATS[name]
    if int8 and not form.int8:
        able = ", ".join(name for name, other in FORMATS.items() if other.int8)
        raise ValueError(f"int8 with format {name!r}, which has none; expected one of {able}")
    packages = (*form.packages, *(form.int8_packages if int8 else ()))
    if missing := ", ".join(package for package in packages if not _installed(package)):
        install = f'run: pip install "broadsight[{form.extra}]"'
        raise ValueError(f"the format {name} needs {missing}, which is not installed; {install}")
    return form


def _installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported, since some take seconds."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def runtimes() -> dict[str, tuple[str, bool]]:
    """Names for `broadsight bench --runtime` -> the format, and whether in int8."""
    files = {name: form for name, form in FORMATS.items() if form.suffix}
    return {name: (name, False) for name in files} | {one.int8: (name, True) for name, one in files.items() if one.int8}


def of_file(path: str | Path) -> Format:
    """The format of an artefact, by the ending of its name; a folder is a web page."""
    for form in FORMATS.values():
        if form.owns(Path(path)):
            return form
    known = ", ".join(form.suffix for form in FORMATS.values() if form.suffix)
    raise ValueError(f"{path} is in no known format; expected a file ending in {known}, or the folder of a page")


def open_artefact(path: str | Path, threads: int | None = None, precision: str | None = None) -> Session:
    """A file that `broadsight export` wrote, or the folder of a web page, in its own runtime on the CPU, with so many
    threads for its operators; None leaves them to the runtime. A precision that it does not compute in is refused."""
    form = of_file(path)
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no {path}; `broadsight export` writes one")
    return need(form.name).open(path, threads, precision)


def described(kept: Mapping[str, Any], key: str = KEY) -> Description:
    """The description among what a file keeps beside its model; a ValueError if there is none or it is damaged."""
    if key not in kept:
        raise ValueError("it does not say what it is; expected a file that `broadsight export` wrote")
    return Description.from_json(kept[key])


for _module in iter_modules(__path__):
    import_module(f".{_module.name}", __name__)
