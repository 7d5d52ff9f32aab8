"""The formats that models are exported to: every module of this folder that registers one."""

from importlib import import_module
from pkgutil import iter_modules

from .registry import FORMATS, Format, need, of_file, open_artefact, register, runtimes

for _module in iter_modules(__path__):
    import_module(f".{_module.name}", __name__)

__all__ = ["FORMATS", "Format", "need", "of_file", "open_artefact", "register", "runtimes"]
