"""Detectors, segmenters and pose models on any timm model."""

from . import registry as registry
from .build import MODELS, build, models_for
from .stages import Stages, open_stages

__all__ = ["MODELS", "Stages", "build", "models_for", "open_stages"]
