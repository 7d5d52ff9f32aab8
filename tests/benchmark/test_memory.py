"""Memory and kernel launches of calls whose costs are known."""

import torch
from torch import nn

from broadsight.benchmark.memory import kernel_launches, peak_memory, saved_for_backward


def linear_gelu() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU()), torch.randn(8, 16)


def test_saved_for_backward():
    model, x = linear_gelu()
    # the linear layer keeps its input for the weights' gradient, GELU keeps its own input; weights do not count
    assert saved_for_backward(model, lambda: model(x)) == 4 * (8 * 16 + 8 * 32)
    # with a gradient wanted for x the linear layer saves its weight too, which is the model's own
    assert saved_for_backward(model, lambda: model(x.clone().requires_grad_())) == 4 * (8 * 16 + 8 * 32)
    x = torch.randn(8, 16, requires_grad=True)
    assert saved_for_backward(nn.Identity(), lambda: x * x) == 4 * 8 * 16
    assert saved_for_backward(nn.Identity(), lambda: x[:2] * x[2:4]) == 4 * 8 * 16
    assert saved_for_backward(nn.Identity(), lambda: x + x) == 0


def test_peak_memory_and_kernel_launches__the_worst_moment_not_the_sum_and_views_are_free():
    model, x = linear_gelu()

    @torch.inference_mode()
    def infer() -> None:
        model(x)

    assert peak_memory(infer) == 4 * (8 * 32 + 8 * 32)  # what goes into GELU and what comes out
    assert peak_memory(lambda: None) == 0

    def one_after_the_other() -> None:
        for _ in range(5):
            torch.zeros(1000)

    assert peak_memory(one_after_the_other) == 4 * 1000
    x = torch.randn(4, 4)
    assert kernel_launches(lambda: x.view(2, 8).t()[0]) == 0
    assert kernel_launches(lambda: (x + 1).t().contiguous() @ x) == 3
