"""From a module to a program: what all formats are made of."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram

from .quiet import quiet

MOST_IMAGES = 4096  # of a batch, for programs that take any
LEAST_SIDE, MOST_SIDE = 64, 4096  # pixels, likewise of sizes


def capture(
    model: nn.Module,
    shape: tuple[int, int, int],
    *,
    any_batch: bool = True,
    any_size: bool = False,
    single_cells: bool = False,
) -> ExportedProgram:
    """The forward pass of a module as one graph, for inference.

    Args:
        model: In eval mode, on the CPU, as `prepare` gives it. (B, C, H, W) -> a tensor or a tuple of them.
        shape: (channels, height, width) of an image.
        any_batch: Leave the number of images open; else it is one.
        any_size: Leave height and width open from LEAST_SIDE pixels on.
        single_cells: With any_size, allow for maps that have but one cell where images are small.

    Raises:
        ValueError: The module cannot be captured so; the reason in one line.
    """
    free: dict[int, Dim] = {}
    if any_batch:
        free[0] = Dim("batch", min=1, max=MOST_IMAGES)
    if any_size:
        free |= {2: Dim("height", min=LEAST_SIDE, max=MOST_SIDE), 3: Dim("width", min=LEAST_SIDE, max=MOST_SIDE)}
    # One image would be taken for a constant, and so would two sides that are equal.
    dtype = next((one.dtype for one in model.parameters()), torch.float32)
    example = torch.zeros(2 if any_batch else 1, *(_unequal(shape) if any_size else shape), dtype=dtype)
    single_cells = single_cells and any_size

    def export(later: bool) -> ExportedProgram:
        """`later`: what torch cannot prove of the sides is asked when the program runs, which costs nothing."""
        options: Any = dict(prefer_deferred_runtime_asserts_over_guards=later)
        return torch.export.export(model, (example,), dynamic_shapes=(free or None,), **options)

    try:
        with torch.no_grad(), quiet(), _oblivious(single_cells), _kept_positions(not any_size):
            try:
                return export(later=single_cells)
            except UserError as error:
                if "Constraints violated" not in str(error):
                    raise
                return export(later=True)
    except Exception as error:
        asked = [name for name, wanted in (("batch", any_batch), ("size", any_size)) if wanted]
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise ValueError(
            f"{type(model).__name__} cannot be captured{' for any ' + ' and '.join(asked) if asked else ''}: {reason}"
        ) from error


def _unequal(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    channels, height, width = shape
    side = max(LEAST_SIDE, 32 * (height // 32))
    return channels, side, side + 32 if height == width else max(LEAST_SIDE, width)


@contextmanager
def _oblivious(wanted: bool) -> Generator[None, None, None]:
    """Where torch would treat sizes of one unlike all others, it takes the way that is right for both."""
    from torch.fx.experimental import _config

    patched: Any = _config
    with patched.patch(backed_size_oblivious=wanted):
        yield


@contextmanager
def _kept_positions(wanted: bool) -> Generator[None, None, None]:
    """timm's positions are taken as they are if they fit the image.

    While torch exports, timm resamples them in any case, for graphs of any size; not all runtimes know how.
    """
    from timm.layers import pos_embed

    module: Any = pos_embed
    asked = getattr(module, "is_exporting", None)  # since timm 1.0.31
    if not wanted or asked is None:
        yield
        return
    module.is_exporting = lambda: False
    try:
        yield
    finally:
        module.is_exporting = asked
