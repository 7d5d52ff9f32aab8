"""All measures by the names that users type: every file in this folder that registers one."""
# ruff: noqa: F401 (names for the rest of the package)

import pkgutil
from importlib import import_module

from .base import MEASURES, Measure, find_measure, refuse_unsuited, register_measure, suiting, unlabelled_measures

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
