"""BatchNorm over the batches of all processes, on CPUs as well, which torch's SyncBatchNorm refuses."""

from typing import Any

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SharedBatchNorm(_BatchNorm):
    """BatchNorm whose statistics are those of all processes' batches; then, as in timm, an activation."""

    def __init__(self, norm: Any):
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self._parameters, self._buffers = dict(norm._parameters), dict(norm._buffers)
        self.drop, self.act = getattr(norm, "drop", nn.Identity()), getattr(norm, "act", nn.Identity())
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        output = self._over_all(input) if self.training and dist.is_initialized() else super().forward(input)
        return self.act(self.drop(output))

    def _over_all(self, input: Tensor) -> Tensor:
        over, shape = [0, *range(2, input.ndim)], (1, -1, *(1,) * (input.ndim - 2))
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input  # sums need the precision
        # Sums are exchanged, not means: processes may have batches of different size
        count = x.new_full((1,), input.numel() // input.shape[1])
        sums = _SumOverProcesses.apply(torch.cat([x.sum(over), count]))
        total = sums[-1].detach()
        centred = x - (sums[:-1] / total).view(shape)
        variance = _SumOverProcesses.apply((centred * centred).sum(over)) / total
        if self.track_running_stats:
            seen, running_mean, running_var = self.num_batches_tracked, self.running_mean, self.running_var
            assert seen is not None and running_mean is not None and running_var is not None
            seen.add_(1)
            weight = self.momentum if self.momentum is not None else 1 / float(seen)
            running_mean.lerp_(sums[:-1].detach() / total, weight)
            running_var.lerp_(variance.detach() * total / (total - 1).clamp(min=1), weight)
        output = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least (B, C), got {input.ndim} dimensions")


def synchronise(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """The model with every BatchNorm replaced; its state-dict keys stay."""
    if device is not None and device.type == "cuda":
        return convert_sync_batchnorm(model)
    done = (SharedBatchNorm, nn.SyncBatchNorm)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and not isinstance(module, done)]
    shared: dict[nn.Module, SharedBatchNorm] = {norm: SharedBatchNorm(norm) for norm in norms}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # not named_children, which names a module once
            if child is not None and child in shared:
                setattr(parent, name, shared[child])
    return shared.get(model, model)


class _SumOverProcesses(torch.autograd.Function):
    """Sum over the processes; every process uses it, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SumOverProcesses.forward(ctx, gradients[0])
