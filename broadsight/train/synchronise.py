"""BatchNorm over the batches of all processes. Torch's own runs on GPUs alone; this one on CPUs as well."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SharedBatchNorm(nn.SyncBatchNorm):
    """BatchNorm whose statistics are those of all processes' batches; then, as in timm, an activation.

    Args:
        norm: What it takes the place of; parameters and buffers are shared with it.
    """

    def __init__(self, norm: Any):
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.drop, self.act = getattr(norm, "drop", nn.Identity()), getattr(norm, "act", nn.Identity())
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda or not self.training or not dist.is_initialized():
            return self.act(self.drop(self._on_device(input)))
        over = [0, *range(2, input.ndim)]
        shape = (1, -1, *(1,) * (input.ndim - 2))
        # Sums are exchanged, not means: processes may have batches of different size.
        count = torch.full((1,), input.numel() // input.shape[1], dtype=input.dtype)
        sums = torch.cat([input.sum(over), count])
        sums = _sum_over_processes(sums)
        mean = sums[:-1] / sums[-1]
        centred = input - mean.view(shape)
        variance = _sum_over_processes((centred * centred).sum(over)) / sums[-1].detach()
        if self.track_running_stats:
            self._remember(mean.detach(), variance.detach(), float(sums[-1]))
        output = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return self.act(self.drop(output))

    def _on_device(self, input: Tensor) -> Tensor:
        if input.is_cuda:
            return super().forward(input)
        statistics = (
            (self.running_mean, self.running_var) if not self.training or self.track_running_stats else (None,) * 2
        )
        return F.batch_norm(input, *statistics, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps)

    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), weight)


def synchronise(model: nn.Module) -> nn.Module:
    """The network with every BatchNorm replaced; its state-dict keys stay."""
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm) and not isinstance(child, (nn.SyncBatchNorm, nn.InstanceNorm2d)):
            setattr(model, name, SharedBatchNorm(child))
        else:
            synchronise(child)
    return model


class _SumOverProcesses(torch.autograd.Function):
    """Sum over the processes; since all of them use it, so do the gradients come from all."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


def _sum_over_processes(values: Tensor) -> Tensor:
    return _SumOverProcesses.apply(values)
