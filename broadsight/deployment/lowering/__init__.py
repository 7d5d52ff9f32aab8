"""What a model says differently for other runtimes: a class for each layer, swapped into the copy that `prepare` makes.

A lowered layer is a subclass with another forward: the same function of the same weights, in few, plain operations,
and for open sizes as well. Names and hooks stay, and weights unless they are folded. Each registers itself by `lowers`.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from torch import nn

FORMS: dict[type, Any] = {}
Form = TypeVar("Form", bound=type)


def lowers(layer: type[nn.Module]) -> Callable[[Form], Form]:
    """Register the decorated class, a subclass of `layer` without weights of its own, as its form for other runtimes;
    its static method `fits(module) -> bool`, if it has one, says whether it can stand for this very module; its method
    `settle()`, if it has one, then folds what it can into the weights."""

    def register(form: Form) -> Form:
        FORMS[layer] = form
        return form

    return register


def lower(model: nn.Module) -> None:
    """Give all layers of a model that have one their form for other runtimes, in place; subclasses stay as they are."""
    for module in model.modules():
        form = FORMS.get(type(module))
        if form is not None and (not hasattr(form, "fits") or form.fits(module)):
            module.__class__ = form
            getattr(module, "settle", lambda: None)()


for _module in iter_modules(__path__):
    import_module(f".{_module.name}", __name__)
