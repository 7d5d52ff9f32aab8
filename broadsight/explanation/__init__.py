"""Explanations: what a model saw of one image, as maps over it."""

from .inside import kinds_of as kinds_of
from .inside import look_inside as look_inside
from .maps.map import Look as Look
