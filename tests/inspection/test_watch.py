"""Hooks and function watches come and go, and change nothing."""

import pytest
import torch
from torch import nn

from broadsight.inspection.watch import FunctionWatch, eager, hooked, uncompiled


def hooks_of(model: nn.Module) -> list:
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_hooked__begins_and_ends_of_the_modules_named_also_after_an_error():
    model, noted = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), []
    with hooked(
        [model, model[0]],
        before=lambda module, args, kwargs: noted.append(("before", module)),
        after=lambda module, args, output: noted.append(("after", module)),
    ):
        model(torch.zeros(1, 2))
        assert len(hooks_of(model)) == 4
    assert noted == [("before", model), ("before", model[0]), ("after", model[0]), ("after", model)]
    assert not hooks_of(model)
    model = nn.Linear(2, 3)
    for always in (True, False):
        noted.clear()
        hooks = hooked([model], after=lambda module, args, output: noted.append(output), always=always)
        with pytest.raises(RuntimeError), hooks:
            model(torch.zeros(1, 5))
        assert noted == [None] * always and not hooks_of(model)


def test_function_watch__is_hidden_from_others_and_builds_no_graph():
    class Doubles(FunctionWatch):
        def __init__(self):
            super().__init__({})
            self.shown, self.made = [], []

        def called(self, func, args, kwargs, result) -> None:
            self.shown.append(func.__name__)
            self.made.append(result * 2)

    x = torch.ones(2, requires_grad=True)
    with Doubles() as outer, Doubles() as inner:
        y = torch.exp(x)
    assert outer.shown == inner.shown == ["exp"] and y.requires_grad
    assert not outer.made[0].requires_grad and torch.equal(inner.made[0], 2 * y)


def test_eager__of_compiled_parts():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = torch.compile(model, backend=lambda graph, inputs: pytest.fail("compiled"))
    assert uncompiled(compiled) is model and uncompiled(model) is model
    with eager(compiled):
        compiled(torch.zeros(1, 2))
