"""The map that any layer of a model gives, by the layer's name: blocks, and whatever else gives one."""

from typing import Any

from torch import Tensor, nn

from ..errors import did_you_mean
from .blocks import Block, find_blocks
from .layout import layouts_of
from .meta_pass import in_eval_mode
from .passing import moved
from .watch import eager, uncompiled

# The model itself, among the names of layers.
OUTPUT = "output"


class LayerMaps:
    """Knows a model's layers and how to read what they give as maps (B, C, h, w).

    Args:
        model: Any model that takes a batch of images.
        image: (1, C, H, W), one of those that will pass.

    Raises:
        ValueError: The model does not take the image.
    """

    def __init__(self, model: nn.Module, image: Tensor):
        self.model = uncompiled(model)
        self.size = image.shape[-2], image.shape[-1]
        self.blocks: dict[str, Block] = {}
        try:
            self.blocks = {block.name: block for block in find_blocks(self.model, image)}
        except ValueError as error:
            try:  # it may be one layer alone, whose output is the map
                with in_eval_mode(self.model), eager(self.model):
                    self.model(moved(image, self.model))
            except Exception:  # in whatever words; those of the blocks are better
                raise error from None

    def layer(self, name: str | None) -> tuple[str, nn.Module]:
        """The layer of that name; if None the last block, or the model itself where there are none."""
        if name is None:
            name = list(self.blocks)[-1] if self.blocks else OUTPUT
        modules = {OUTPUT: self.model} | {n: module for n, module in self.model.named_modules() if n}
        if name not in modules:
            hint = did_you_mean(name, modules)
            raise ValueError(f"{type(self.model).__name__} has no layer {name!r}; {hint}{self.known()}")
        return name, modules[name]

    def known(self) -> str:
        """Some names, in words."""
        names = list(self.blocks)
        shown = [*names[:2], "...", names[-1]] if len(names) > 4 else names
        return f"blocks are {', '.join(shown)}" if shown else "it has no blocks that give a map; try resnet50 or mat_2"

    def read(self, name: str, output: Any) -> Tensor:
        """What the layer gave, as a view (B, C, h, w)."""
        if name in self.blocks:
            return self.blocks[name].map_of(output, self.size)
        x = next((x for x in (output if isinstance(output, tuple | list) else [output]) if isinstance(x, Tensor)), None)
        if x is not None:
            prefixes = {block.layout.prefix for block in self.blocks.values() if block.layout.form == "NLC"}
            form = getattr(self.model, "output_fmt", None)
            found = layouts_of(x.shape, self.size, form=form, prefixes=sorted(prefixes, reverse=True))
            if found:
                return found[0].as_map(x)
        what = "no tensor" if x is None else f"shape {tuple(x.shape)}"
        raise ValueError(f"{name!r} gives {what}, which is no map of the image; name another layer: {self.known()}")
