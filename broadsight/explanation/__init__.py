"""Explanations: what a model saw of one image, as maps over it."""

from .. import lazy

_MODULES = {
    "inside": ("kinds_of", "look_inside"),
    "maps.map": ("Look",),
}

__getattr__, __dir__ = lazy(__name__, {name: module for module, names in _MODULES.items() for name in names})
