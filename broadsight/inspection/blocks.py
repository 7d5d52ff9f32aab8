"""The blocks of any vision model, in order of execution, and the map that each of them gives, found in one pass."""

import functools
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import first_line
from ..layers import MultiTokenPool
from .branch_structure import affine_layers
from .layout import MOST_PREFIX_TOKENS, Layout, layouts_of, path_of, prefix_tokens
from .map_places import Place, tensors_in
from .meta_pass import in_eval_mode
from .passing import Images, moved, peek
from .watch import Call, FunctionWatch, eager, hooked, uncompiled

SUMS, JOINS = ("add", "add_", "addcmul", "addcmul_"), ("cat", "concat")
# Parts of a path inside which there are no blocks, and classes that are none: they change the class token alone.
ELSEWHERE = re.compile(r"(^|\.)(head\w*|fc|classifier|\w*stem\w*|patch_embed\w*|downsample\w*|attn_pool)(\.|$)")
OF_CLASS_TOKEN = re.compile("Class(Attn|Attention|Block)")
# What belongs to the layer before it, in a model that is a plain sequence.
FOLLOWERS = re.compile(r"norm|relu|act|elu|swish|mish|sigmoid|tanh", re.IGNORECASE)
# Called with the number of a block, from 0, and its map (B, C, h, w).
See = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Block(Place):
    """A block of a model and how to read the map that it gives."""

    image_size: tuple[int, int] = (0, 0)  # (H, W) of the images that it was found with, to which the layout belongs
    # (B, N, C) -> (B, h, w, C), for a model that does not keep its tokens row by row
    reorder: Callable[[Tensor], Tensor] | None = field(default=None, repr=False, compare=False)

    def map_of(self, output: Any, image_size: tuple[int, int]) -> Tensor:
        """What the module gave for images of that size, as a view (B, C, h, w)."""
        x, layout = self.tensor(output), self.layout
        if self.reorder is not None:
            return self.reorder(x).permute(0, 3, 1, 2)
        if layout.form != "NLC" or image_size == self.image_size:
            return layout.as_map(x)
        found = layouts_of(x.shape, image_size, prefixes=[layout.prefix])
        if not found:
            came = f"{x.shape[1]} tokens for an image of {image_size[0]}x{image_size[1]}"
            hint = f"pass images of {self.image_size[0]}x{self.image_size[1]}"
            raise ValueError(f"{self.name} gives {came}, which are no grid after {layout.prefix} others; {hint}")
        return found[0].as_map(x)


def find_blocks(model: nn.Module, images: Images) -> list[Block]:
    """The residual blocks of a model, in the order in which they run.

    A block is the nearest numbered element of a list or sequence around the addition of a branch that gives a map of
    the whole image, or the module that adds where nothing is numbered. All elements of such a list count, with a
    shortcut or without. Where nothing is added, these are the modules that join branches (Inception, DenseNet); in a
    plain sequence (VGG) every convolution or linear layer with its norm and activation, by the name of the last. Stems,
    down-sampling, pooling, class attention and heads are none, nor are modules whose map has a single place.
    """
    watch = _Watched(model, images)
    found = watch.blocks()
    if not found:
        looked = "looked for modules that add or join branches, and for two convolutions or linear layers in a row"
        hint = f"{looked}; pass an image classifier, such as resnet50, deit_small_patch16_224 or mat_2"
        raise ValueError(f"{type(watch.model).__name__} has no blocks that give a map of several places; {hint}")
    return found


def find_layers(model: nn.Module, images: Images, layers: str | Sequence[str]) -> list[Block]:
    """Modules that give a map of the whole image, by patterns such as "*.mixer.static", in the order in which they run.

    Several are a sequence, or separated by commas.
    """
    patterns = [one.strip() for one in (layers.split(",") if isinstance(layers, str) else layers)]
    inner = uncompiled(model)
    names = {name for name, _ in inner.named_modules() if any(fnmatchcase(name, one) for one in patterns)}
    if not names:
        hint = "* stands for anything, as in '*.mlp', and modules are listed by model.named_modules()"
        raise ValueError(f"no module of {type(inner).__name__} is called {', '.join(patterns)}; {hint}")
    watch = _Watched(model, images)
    found = [block for name in names & watch.calls.keys() if (block := watch.place(name)) is not None]
    if not found:
        raise ValueError(f"{', '.join(sorted(names)[:3])} gives no map of several places; name modules that do")
    return sorted(found, key=lambda block: watch.calls[block.name].order)


@contextmanager
def watch_blocks(model: nn.Module, blocks: Iterable[Block], see: See) -> Generator[None, None, None]:
    """Call `see` with every map that a block gives while this is open, which it must neither keep nor change."""
    inner, size = uncompiled(model), None
    numbers: dict[nn.Module, list[tuple[int, Block]]] = {}
    for number, block in enumerate(blocks):
        numbers.setdefault(block.module, []).append((number, block))

    def begins(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal size
        images = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        size = images.shape[-2], images.shape[-1]

    def ends(module: nn.Module, args: tuple, output: Any) -> None:
        with torch.no_grad():
            for number, block in numbers[module]:
                see(number, block.map_of(output, size or block.image_size))

    with eager(model), hooked([inner], before=begins), hooked(numbers, after=ends):
        yield


@dataclass
class _Noted:
    """What a module was called with and gave, in its last call; of tensors only the shape."""

    args: tuple = ()
    output: Any = None
    order: int = -1  # how many modules had ended before
    times: int = 0
    merges: set[str] = field(default_factory=set)  # names of the functions by which it merged maps or rows itself


class _Watched(FunctionWatch):
    """One pass of two equal images, and what it shows of the modules, by their paths."""

    def __init__(self, model: nn.Module, images: Images):
        self.model, image = uncompiled(model), peek(images)[0]
        super().__init__({module: name for name, module in self.model.named_modules()})
        self.size = image.shape[-2], image.shape[-1]
        self.calls: dict[str, _Noted] = {}
        self.doubtful: set[str] = set()  # may be (B, C, h, w) or (B, h, w, C)
        self.place = functools.cache(self._place)
        try:
            with in_eval_mode(self.model), eager(self.model), self:
                self.model(moved(image, self.model).repeat(2, 1, 1, 1))
        except Exception as error:
            came = f"an image of {'x'.join(map(str, image.shape[1:]))}: {first_line(error)}"
            hint = "pass images of the size that it was built for"
            raise ValueError(f"{type(self.model).__name__} does not take {came}; {hint}") from error
        self.calls = {name: call for name, call in self.calls.items() if call.times}
        self.modules = {name: module for name, module in self.model.named_modules() if name in self.calls}
        self.pools = tuple(f"{name}." for name, m in self.modules.items() if isinstance(m, MultiTokenPool))

    def begins(self, call: Call) -> None:
        self.calls.setdefault(call.name, _Noted()).args = _shapes((*call.args, *call.kwargs.values()))

    def ends(self, call: Call, output: Any) -> None:
        noted = self.calls[call.name]
        noted.order, noted.times = sum(x.order >= 0 for x in self.calls.values()), noted.times + 1
        noted.output = _shapes(output)

    def called(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        if self.running and name in (*SUMS, *JOINS):
            parts = args[0] if name in JOINS and args and isinstance(args[0], tuple | list) else args[:2]
            # maps, rows or windows of both images
            fit = all(isinstance(x, Tensor) and x.ndim > 2 and len(x) and len(x) % 2 == 0 for x in parts)
            if fit and (name in JOINS or (len(parts) > 1 and parts[0].shape == parts[1].shape)):
                self.calls[self.running[-1].name].merges.add(name)

    def blocks(self) -> list[Block]:
        names = self.merging(SUMS) or self.merging(JOINS) or self.plain()
        found = [block for name in names if (block := self.place(name)) is not None]
        # a block whose form is in doubt has the form that others of its class have
        sure = {type(block.module): block.layout.form for block in found if block.name not in self.doubtful}
        for i, block in enumerate(found):
            if block.name in self.doubtful:
                x, form = block.tensor(self.calls[block.name].output), sure.get(type(block.module), block.layout.form)
                found[i] = replace(block, layout=layouts_of(x.shape, self.size, form=form)[0])
        return found

    def merging(self, functions: tuple[str, ...]) -> list[str]:
        """Names of the blocks around the modules that call one of these functions."""
        merging = {name for name, call in self.calls.items() if name and not call.merges.isdisjoint(functions)}
        found = {block for name in merging if (block := self.around(name)) is not None}
        found = set(filter(_numbered, found)) or found
        for name in sorted(found, key=len, reverse=True):
            inside = sum(other.startswith(f"{name}.") for other in found)
            if inside > 1 or (inside and name not in merging):
                found.discard(name)  # a stage, not a block
        kinds = {re.sub(r"\d+", "#", name) for name in found if _numbered(name)}
        alike = (name for name in self.modules if _numbered(name) and re.sub(r"\d+", "#", name) in kinds)
        found |= set(filter(self.is_block, alike))
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
        of_class_token = OF_CLASS_TOKEN.search(type(module).__name__)
        if module is None or of_class_token or ELSEWHERE.search(name) or f"{name}.".startswith(self.pools):
            return False
        return len(list(islice(affine_layers(module), 2))) > 1 and self.place(name) is not None

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

    def _place(self, name: str) -> Block | None:
        for item, x in tensors_in(self.calls[name].output):
            found = [layout for layout in self._layouts(name, x) if layout.places > 1] if len(x) == 2 else []
            if not found:
                continue
            if x.ndim == 4 and len(found) > 1:
                self.doubtful.add(name)
            reorder = self._reorder(name) if x.ndim == 3 else None
            return Block(self.modules[name], item, found[0], name, image_size=self.size, reorder=reorder)
        return None

    def _layouts(self, name: str, x: Tensor) -> list[Layout]:
        call = self.calls[name]
        if x.ndim == 3:
            for pair in (*call.args, *(call.output if isinstance(call.output, tuple) else ())):  # some get the grid
                if isinstance(pair, tuple) and len(pair) in (2, 3) and all(isinstance(n, int) for n in pair):
                    prefix = x.shape[1] - pair[-2] * pair[-1]
                    if 0 <= prefix <= MOST_PREFIX_TOKENS:
                        return [Layout("NLC", (pair[-2], pair[-1]), prefix)]
        said, _ = prefix_tokens(path_of(self.model, name)[1:])
        prefixes = dict.fromkeys((0, 1, 2) if said is None else (said, 0, 1, 2))
        return layouts_of(x.shape, self.size, form=getattr(self.model, "output_fmt", None), prefixes=prefixes)

    def _reorder(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Hiera keeps the tokens of one window together; it knows itself how to undo that."""
        holder, _, number = name.rpartition(".blocks.") if ".blocks." in name else ("", "", name.rpartition(".")[2])
        reroll = getattr(self.model.get_submodule(holder), "reroll", None)
        if not callable(reroll) or not number.isdigit():
            return None
        return lambda x: reroll(x, int(number))


def _shapes(x: Any) -> Any:
    """The same without the content of its tensors: the activations of a whole pass would be many."""
    if isinstance(x, tuple | list):
        return tuple(_shapes(item) for item in x)
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


def _numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()
