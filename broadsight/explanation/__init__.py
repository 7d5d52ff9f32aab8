"""Explanations: what a model saw of one image, as maps over it."""

from .. import lazy

_PUBLIC = {"inside": "kinds_of look_inside", "maps.map": "Look"}

__getattr__, __dir__ = lazy(__name__, _PUBLIC)
