"""Efficient vision models that see the whole picture. Importing this registers every model with timm."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__version__ = "0.1.0"


def lazy(package: str, modules: Mapping[str, str], rooms: Iterable[str] = ()) -> tuple[Callable, Callable]:
    """`__getattr__` and `__dir__` of a package that imports public names, listed by module, and `rooms` on demand."""
    places = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in places:
            return getattr(import_module(f".{places[name]}", package), name)
        if name in rooms:
            return import_module(f".{name}", package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*vars(sys.modules[package]), *places, *rooms})


# Rooms that can be imported without torch, and so can their requests: the command line reads options from them.
_LIGHT = ("analysis", "app", "benchmark", "deployment", "evaluation", "explanation", "papers", "prediction", "report")
_LIGHT += ("training", "weights")
_ROOMS = ("data", "dense", "inspection", "layers", "losses", "models", "runs", "surgery", *_LIGHT)
_PUBLIC = {
    "api": "analyze bench evaluate explain export predict train",
    "errors": "UsageError",
    "runs.classifier": "open_classifier",
    "runs.folder": "load save",
    "runs.opening": "open_run",
    "surgery.broadcasting": "add_context_broadcast",
    "surgery.fusion": "fuse",
    "surgery.pooling": "swap_pool",
    "weights.released_stvit": "convert_release load_release",
}
__getattr__, __dir__ = lazy(__name__, _PUBLIC, (*_ROOMS, "visual"))


class _Registration(MetaPathFinder, Loader):
    """Registers the models as soon as timm or a module that may need it has been imported: `--help` needs neither.

    The first of them is loaded as always; the models are registered when it is complete, so that none is half there.
    """

    loader: Loader

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        room, _, module = name.partition(".")
        may_need_timm = package == __name__ and room in _ROOMS and name not in _LIGHT and module != "request"
        if fullname != "timm" and not may_need_timm:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)  # by whoever else finds modules: installed for editing, a package has a finder
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def get_code(self, fullname: str) -> Any:
        """Of a module that is run by `python -m`, which nobody loads: the next one that is imported registers."""
        sys.meta_path.insert(0, self)
        return getattr(self.loader, "get_code")(fullname)  # noqa: B009

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader  # its own again, for whoever reads its files
        try:
            self.loader.exec_module(module)
        except BaseException:  # whoever tries again finds the models registered then
            sys.meta_path.insert(0, self)
            raise
        _register()


def _register() -> None:
    for room in ("models", "dense"):
        import_module(f".{room}", __name__)


if "timm" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _Registration())
