"""Detectors, segmenters and pose models on any timm model."""

from .build import build, models_for
from .heads import HEADS, register
from .stages import Stages, open_stages

__all__ = ["HEADS", "Stages", "build", "models_for", "open_stages", "register"]
