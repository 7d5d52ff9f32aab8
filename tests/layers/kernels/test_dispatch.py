"""The one rule: a fast form runs only where nobody could tell."""

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from broadsight.layers.kernels.dispatch import accelerated, untouched


class Adapted(nn.Linear):
    """A linear layer as LoRA or a quantiser would put in its place."""


def test_accelerated__the_plain_form_under_compilers_and_transforms():
    taken = []

    @accelerated(lambda plain, x: taken.append("fast") or plain(x), lambda x: True)
    def double(x):
        return 2 * x

    x = torch.ones(3)
    assert torch.equal(double(x), 2 * x) and taken == ["fast"]
    assert torch.equal(torch.vmap(double)(x), 2 * x)
    assert torch.equal(torch.compile(double, backend="eager", fullgraph=True)(x), 2 * x)
    assert taken == ["fast"]


def test_accelerated__what_hides_functions_is_shown_as_written_and_gives_the_same():
    shown = []

    class Watch(BaseTorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            shown.append(function)
            return function(*args, **kwargs or {})

    @accelerated(lambda plain, x: torch.cos(x), lambda x: True, hides=True)
    def sine(x):
        return torch.sin(x)

    x = torch.ones(3)
    with Watch():
        watched = sine(x)
    assert torch.sin in shown and torch.cos not in shown and torch.equal(watched, torch.cos(x))
    with torch.device("cpu"):  # a mode too, which watches nothing
        assert torch.equal(sine(x), watched)


def test_untouched__neither_hooked_nor_replaced_nor_parametrized():
    layer = nn.Linear(2, 2)
    assert untouched(layer, nn.Linear) and not untouched(Adapted(2, 2), nn.Linear)
    with layer.register_forward_hook(lambda *_: None):
        assert not untouched(layer, nn.Linear)
    assert untouched(layer, nn.Linear)
    nn.utils.parametrizations.weight_norm(layer)
    assert not untouched(layer, nn.Linear)
