"""All measures by the names that users type: every file in this folder that registers one."""
# ruff: noqa: F401 (names for the rest of the package)

import pkgutil
from importlib import import_module

from .base import MEASURES, Measure, check_suits, find_measure, register_measure, suiting

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
