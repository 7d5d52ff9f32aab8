"""What a model says differently for other runtimes: one file a layer, swapped into the copy that `prepare` makes.

A lowered layer is a subclass with another forward: the same function of the same weights, in few, plain operations, and
for sizes that are left open as well. Names, weights and hooks stay. Each registers itself by `lowers`.
"""

from importlib import import_module
from pkgutil import iter_modules

from .registry import lower, lowers

for _module in iter_modules(__path__):
    import_module(f".{_module.name}", __name__)

__all__ = ["lower", "lowers"]
