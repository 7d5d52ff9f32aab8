"""Which layer has a form for other runtimes."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

FORMS: dict[type, Any] = {}
Form = TypeVar("Form", bound=type)


def lowers(layer: type[nn.Module]) -> Callable[[Form], Form]:
    """Register the decorated class, a subclass of `layer` without weights of its own, as its form for other runtimes.

    A static method `fits(module) -> bool` of that class, if it has one, says whether it can stand for this very module.
    """

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
