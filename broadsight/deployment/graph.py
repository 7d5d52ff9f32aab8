"""From a model to a program: what all formats are made of."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram

from ..surgery.fusion import fuse
from .lowering import lower
from .quiet import quiet

MOST_IMAGES = 4096  # of a batch, for programs that take any
LEAST_SIDE, MOST_SIDE = 64, 4096  # pixels, likewise of sizes


def prepare(model: nn.Module, size: tuple[int, int] | None = None) -> nn.Module:
    """A copy for exporters and runtimes: in eval mode, folded as far as it can be, in plain operations, with equal
    outputs up to rounding. `capture` makes a program of it.

    Args:
        size: (height, width) of images if all have the same: positions are then resampled here, once.
    """
    try:
        made = fuse(model)
    except ValueError:  # it would lose its context broadcasting: slower is better than wrong
        made = deepcopy(model).eval().requires_grad_(False)
    lower(made)
    for module in made.modules():
        part: Any = module
        if getattr(part, "fused_attn", False) is True:
            part.fused_attn = False  # exporters choke on views of what it gave; runtimes know the plain form by sight
        if size is not None and getattr(part, "dynamic_img_size", False) is True and hasattr(part, "set_input_size"):
            embed: Any = getattr(part, "patch_embed", None)
            padded = getattr(embed, "dynamic_img_pad", False)  # to whole patches
            patches = embed.patch_size if padded else (1, 1)
            whole = (-(-side // patch) * patch for side, patch in zip(size, patches, strict=True))
            part.set_input_size(img_size=tuple(whole))
    return made


def why_one_size(model: nn.Module) -> str:
    """Why an exported model takes images of one size only; empty if it takes any."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    resamples = any(getattr(module, "dynamic_img_size", False) is True for module in model.modules())
    why = "its positions or windows are made for it; --size exports it for another"
    return why if config.get("fixed_input_size") or resamples else ""


@contextmanager
def positions_kept() -> Generator[None, None, None]:
    """Let timm's models keep positions that fit the image: from 1.0.31 on they are resampled in every program, which
    not all runtimes can. A function of timm's is replaced meanwhile, here alone."""
    from timm.layers import pos_embed

    positions: Any = pos_embed
    asks = getattr(positions, "is_exporting", None)
    if asks is None:  # an earlier timm
        yield
        return
    positions.is_exporting = lambda: False
    try:
        yield
    finally:
        positions.is_exporting = asks


def capture(
    model: nn.Module,
    shape: tuple[int, int, int],
    *,
    any_batch: bool = True,
    any_size: bool = False,
    single_cells: bool = False,
    dtype: torch.dtype | None = None,
) -> ExportedProgram:
    """The forward pass of a module as one graph, for inference; a ValueError with the reason if that cannot be.

    Args:
        model: In eval mode, on the CPU, as `prepare` gives it. (B, C, H, W) -> a tensor or a tuple of them.
        shape: (channels, height, width) of an image.
        any_batch: Leave the number of images open; else it is one.
        any_size: Leave height and width open from LEAST_SIDE pixels on.
        single_cells: With any_size, allow for maps that have but one cell where images are small.
        dtype: Of images; that of the weights if None.
    """
    from torch.fx.experimental import _config

    free: dict[int, Dim] = {0: Dim("batch", min=1, max=MOST_IMAGES)} if any_batch else {}
    channels, height, width = shape
    if any_size:
        free |= {2: Dim("height", min=LEAST_SIDE, max=MOST_SIDE), 3: Dim("width", min=LEAST_SIDE, max=MOST_SIDE)}
        # One image would be taken for a constant, and so would two sides that are equal.
        side = max(LEAST_SIDE, 32 * (height // 32))
        height, width = side, side + 32 if height == width else max(LEAST_SIDE, width)
    dtype = dtype or next((one.dtype for one in model.parameters()), torch.float32)
    example = torch.zeros(2 if any_batch else 1, channels, height, width, dtype=dtype)
    single_cells = single_cells and any_size
    # Where torch would treat sizes of one unlike all others, it takes the way that is right for both.
    oblivious = cast(Any, _config).patch(backed_size_oblivious=single_cells)

    def export(later: bool) -> ExportedProgram:
        """`later`: what torch cannot prove of the sides is asked when the program runs, which costs nothing."""
        options: Any = dict(prefer_deferred_runtime_asserts_over_guards=later)
        return torch.export.export(model, (example,), dynamic_shapes=(free or None,), **options)

    try:
        with torch.no_grad(), quiet(), oblivious, nullcontext() if any_size else positions_kept():
            try:
                return export(later=single_cells)
            except UserError as error:
                if "Constraints violated" not in str(error):
                    raise
                return export(later=True)
    except Exception as error:
        asked = " and ".join(name for name, wanted in (("batch", any_batch), ("size", any_size)) if wanted)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        what = f"{type(model).__name__} cannot be captured{' for any ' if asked else ''}{asked}"
        raise ValueError(f"{what}: {reason}") from error
