"""How the blocks of a model are found: by what they do.

Models say little about their blocks. In one pass it is watched which modules add a branch to what they got, and which
of them give a map of the whole image.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import first_line
from ..layers import MultiTokenPool
from .block import Block, grid_of, grids_of, is_grid
from .branch_structure import affine_layers
from .meta_pass import in_eval_mode

SUMS, JOINS = ("add", "add_", "addcmul", "addcmul_"), ("cat", "concat")
# Parts of a path inside which there are no blocks, and classes that are none: they change the class token alone.
ELSEWHERE = re.compile(r"(^|\.)(head\w*|fc|classifier|\w*stem\w*|patch_embed\w*|downsample\w*|attn_pool)(\.|$)")
OF_CLASS_TOKEN = re.compile("Class(Attn|Attention|Block)")
# What belongs to the layer before it, in a model that is a plain sequence.
FOLLOWERS = re.compile(r"norm|relu|act|elu|swish|mish|sigmoid|tanh", re.IGNORECASE)


@dataclass
class Call:
    """What a module was called with and gave, in its last call; of tensors only the shape.

    Args:
        order: How many modules had ended before.
        times: How often it was called.
        merges: Names of the functions by which it merged maps or rows itself.
    """

    args: tuple = ()
    output: Any = None
    order: int = -1
    times: int = 0
    merges: set[str] = field(default_factory=set)


@dataclass
class Watched:
    """One pass of two equal images.

    Args:
        size: (H, W) of them.
        calls: By the module's path.
    """

    model: nn.Module
    size: tuple[int, int]
    calls: dict[str, Call]

    def __post_init__(self) -> None:
        self.modules = {name: module for name, module in self.model.named_modules() if name in self.calls}
        self.pools = tuple(f"{name}." for name, m in self.modules.items() if isinstance(m, MultiTokenPool))
        self.places: dict[str, Block | None] = {}
        self.doubtful: set[str] = set()  # may be (B, C, h, w) or (B, h, w, C)

    def blocks(self) -> list[Block]:
        names = self.merging(SUMS) or self.merging(JOINS) or self.plain()
        found = [block for name in names if (block := self.place(name)) is not None]
        sure = {type(block.module): block.form for block in found if block.name not in self.doubtful}
        return [self.settled(block, sure.get(type(block.module), block.form)) for block in found]

    def merging(self, functions: tuple[str, ...]) -> list[str]:
        """Names of the blocks around the modules that call one of these functions."""
        merging = {name for name, call in self.calls.items() if name and not call.merges.isdisjoint(functions)}
        found = {block for name in merging if (block := self.around(name)) is not None}
        if any(map(_numbered, found)):
            found = set(filter(_numbered, found))
        for name in sorted(found, key=len, reverse=True):
            inside = sum(other.startswith(f"{name}.") for other in found)
            if inside > 1 or (inside and name not in merging):
                found.discard(name)  # a stage, not a block
        kinds = {_kind(name) for name in found if _numbered(name)}
        found |= {name for name in self.modules if _numbered(name) and _kind(name) in kinds and self.is_block(name)}
        found = {name for name in found if not any(name.startswith(f"{other}.") for other in found)}
        return sorted(found, key=lambda name: self.calls[name].order)

    def around(self, name: str) -> str | None:
        """The nearest numbered block that holds a module, or the module itself if it is a block."""
        path = name.split(".")
        holders = (".".join(path[:depth]) for depth in range(len(path), 0, -1))
        return next((x for x in holders if _numbered(x) and self.is_block(x)), name if self.is_block(name) else None)

    def is_block(self, name: str) -> bool:
        """Whether the module has two layers at least and gives a map."""
        module = self.modules.get(name)
        if module is None or self.is_elsewhere(name) or next(module.children(), None) is None:
            return False
        layers = affine_layers(module)
        return next(layers, None) is not None and next(layers, None) is not None and self.place(name) is not None

    def is_elsewhere(self, name: str) -> bool:
        of_class_token = OF_CLASS_TOKEN.search(type(self.modules[name]).__name__)
        return bool(of_class_token or ELSEWHERE.search(name)) or f"{name}.".startswith(self.pools)

    def plain(self) -> list[str]:
        """Names of the last modules of all layers of a model that has no blocks."""
        ends: list[str] = []
        goes_on = False
        for name in sorted(self.calls, key=lambda name: self.calls[name].order):
            module = self.modules[name]
            if next(module.children(), None) is not None:
                continue
            begins = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
            follows = goes_on and bool(FOLLOWERS.search(type(module).__name__))
            goes_on = (begins or follows) and self.calls[name].times == 1 and self.place(name) is not None
            if goes_on:
                ends[len(ends) - follows :] = [name]
        return ends if len(ends) > 1 else []

    def place(self, name: str) -> Block | None:
        if name not in self.places:
            self.places[name] = self._place(name)
        return self.places[name]

    def _place(self, name: str) -> Block | None:
        output, module = self.calls[name].output, self.modules[name]
        several = isinstance(output, tuple)
        for item, x in enumerate(output if several else (output,)):
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim not in (3, 4) or len(x) != 2:
                continue
            common: dict[str, Any] = dict(
                module=module, item=item if several else None, name=name, image_size=self.size
            )
            if x.ndim == 3:
                rows = self._rows(name, x.shape[1])
                if rows is not None:
                    return Block(**common, form="rows", prefix=rows[0], grid=rows[1], reorder=self._reorder(name))
                continue
            forms = [form for form, grid in grids_of(x).items() if is_grid(grid, self.size)]
            if len(forms) > 1:
                self.doubtful.add(name)
                forms.sort(key=lambda form: form != str(getattr(self.model, "output_fmt", "NCHW")))
            if forms:
                return Block(**common, form=forms[0], grid=grids_of(x)[forms[0]])
        return None

    def _rows(self, name: str, count: int) -> tuple[int, tuple[int, int]] | None:
        """Tokens before the grid, and the grid."""
        call = self.calls[name]
        for pair in (*call.args, *(call.output if isinstance(call.output, tuple) else ())):  # some are told the grid
            if not isinstance(pair, tuple) or len(pair) not in (2, 3) or not all(isinstance(n, int) for n in pair):
                continue
            places = pair[-2] * pair[-1]
            if places > 1 and 0 <= count - places <= 16:
                return count - places, (pair[-2], pair[-1])
        path = name.split(".")
        holders: list[Any] = [self.model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
        said = [n for holder in holders[::-1] if isinstance(n := getattr(holder, "num_prefix_tokens", None), int)]
        for prefix in dict.fromkeys((*said, 0, 1, 2)):
            grid = grid_of(count - prefix, self.size)
            if grid is not None:
                return prefix, grid
        return None

    def _reorder(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Hiera keeps the tokens of one window together; it knows itself how to undo that."""
        holder, _, number = name.rpartition(".blocks.") if ".blocks." in name else ("", "", name.rpartition(".")[2])
        reroll = getattr(self.model.get_submodule(holder), "reroll", None)
        if not callable(reroll) or not number.isdigit():
            return None
        return lambda x: reroll(x, int(number))

    def settled(self, block: Block, form: str) -> Block:
        """A block in doubt is of the form that others of its class have."""
        if block.name not in self.doubtful:
            return block
        return replace(block, form=form, grid=grids_of(block.tensor(self.calls[block.name].output))[form])


def watched(model: nn.Module, image: Tensor, compiled: bool) -> Watched:
    """Run an image (1, C, H, W) and watch all modules.

    Raises:
        ValueError: The model does not take it.
    """
    calls: dict[str, Call] = {}
    running = [""]

    def begin(name: str) -> Callable[[nn.Module, tuple, dict], None]:
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            running.append(name)
            calls.setdefault(name, Call()).args = _shapes((*args, *kwargs.values()))

        return enter

    def end(module: nn.Module, args: tuple, output: Any) -> None:
        call = calls[running.pop()]
        call.output, call.order, call.times = _shapes(output), sum(x.order >= 0 for x in calls.values()), call.times + 1

    class Merges(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if (name in SUMS or name in JOINS) and _merges(name, args):
                calls.setdefault(running[-1], Call()).merges.add(name)
            return func(*args, **(kwargs or {}))

    handles: list[Any] = []
    like = next((x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()), image)
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(begin(name), with_kwargs=True))
            handles.append(module.register_forward_hook(end))
        with in_eval_mode(model), torch.compiler.set_stance("force_eager") if compiled else nullcontext(), Merges():
            model(image.to(like.device, like.dtype).repeat(2, 1, 1, 1))
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not take an image of {'x'.join(map(str, image.shape[1:]))}: "
            f"{first_line(error)}; pass images of the size that it was built for"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return Watched(model, (image.shape[-2], image.shape[-1]), {name: x for name, x in calls.items() if x.times})


def _merges(name: str, args: tuple) -> bool:
    """Whether a function gets maps, rows or windows of both images to merge."""
    parts = args[0] if name in JOINS and args and isinstance(args[0], tuple | list) else args[:2]
    if not all(isinstance(x, Tensor) and x.ndim > 2 and len(x) and len(x) % 2 == 0 for x in parts):
        return False
    return name in JOINS or (len(parts) > 1 and parts[0].shape == parts[1].shape)


def _shapes(x: Any) -> Any:
    """The same without the content of its tensors: the activations of a whole pass would be many."""
    if isinstance(x, tuple | list):
        return tuple(_shapes(item) for item in x)
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


def _numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)
