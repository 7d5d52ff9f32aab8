"""Efficient vision models that see the whole picture. Importing this registers every model with timm."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__version__ = "0.1.0"

_ROOMS = ("analysis", "app", "benchmark", "data", "dense", "deployment", "evaluation", "explanation", "inspection")
_ROOMS += ("layers", "losses", "models", "papers", "prediction", "report", "runs", "surgery", "training", "visual")
_ROOMS += ("weights",)
_NAMES = {
    "add_context_broadcast": "surgery.broadcasting",
    "convert_release": "weights.released_stvit",
    "fuse": "surgery.fusion",
    "load": "runs.folder",
    "load_release": "weights.released_stvit",
    "open_classifier": "runs",
    "open_run": "runs",
    "save": "runs.folder",
    "swap_pool": "surgery.pooling",
}


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(import_module(f".{_NAMES[name]}", __name__), name)
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES, *_ROOMS])


class _Registration(MetaPathFinder, Loader):
    """Registers the models as soon as timm or a room of this package has been imported: `--help` needs neither.

    The first of them is loaded as always; the models are registered when it is complete, so that none is half there.
    """

    loader: Loader

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != "timm" and fullname not in {f"{__name__}.{room}" for room in _ROOMS}:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)  # by whoever else finds modules: installed for editing, a package has a finder
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

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
