"""A batch a few images at a time, so that what is worked on stays in the processor's cache."""

import torch


def image_slices(batch: int, bytes_per_image: int, budget: int) -> list[slice]:
    """Consecutive slices of as many images as fit into the budget, one at least."""
    step = max(1, budget // bytes_per_image)
    return [slice(i, min(i + step, batch)) for i in range(0, batch, step)]


def runs_eagerly() -> bool:
    """Whether operations run as they are called: nobody compiles, exports, traces or transforms the function."""
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active())
