"""The attention weights of a model while it runs as it is, with fused attention too.

They are computed a second time from what its attentions get, a few rows at once: never a second matrix in memory.
"""

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .attention_rows import Rows, rows_of_multi_head, rows_of_product, rows_of_softmax
from .branch_structure import QUERIES, is_attention
from .passing import Images, Seen, check_model, pass_images
from .watch import Call, FunctionWatch, eager, uncompiled

# Names of the children by which a block is known that attends by itself, without a module for it.
ATTENDING_BLOCKS = (("in_proj", "attn_out_proj"), ("local_in", "global_in"))
SOFTMAXES = (torch.softmax, torch.Tensor.softmax, torch.special.softmax, F.softmax)
ATTENTIONS = frozenset((*SOFTMAXES, F.scaled_dot_product_attention, F.multi_head_attention_forward))
MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)

# Called with the layer's name, the rows of its soft-max, and the module that it is computed in.
See = Callable[[str, Rows, nn.Module], None]


class AttentionWatch(FunctionWatch):
    """Shows the rows of every soft-max in some modules, and the calls that run, outermost first, to `see`."""

    functions = ATTENTIONS

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        see: Callable[[list[Call], Rows], None],
        begins: Callable[[Call], None] = lambda call: None,
    ):
        super().__init__(names)
        self.see = see
        self.begins = begins  # ty: ignore[invalid-assignment]

    def called(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if not self.running:
            return
        if func is F.scaled_dot_product_attention:
            self.see(self.running, rows_of_product(*args, **kwargs))
        elif func is F.multi_head_attention_forward:  # torch shows the whole, and nothing of what is inside
            self.see(self.running, rows_of_multi_head(MULTI_HEAD.bind(*args, **kwargs).arguments))
        else:
            logits, axis = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs.get("dim")
            if result.ndim > 1 and isinstance(axis, int) and logits.is_floating_point():
                logits, result, axis = logits.detach(), result.detach(), axis % result.ndim - result.ndim
                if axis == -2 and result.ndim == 4 and result.shape[-1] == _mixed_heads(self.running[-1].module):
                    logits, result, axis = logits.movedim(-1, 1), result.movedim(-1, 1), -1  # heads lie innermost
                self.see(self.running, rows_of_softmax(logits, result, axis))


@contextmanager
def watch_attention(
    model: nn.Module, see: See, wanted: Callable[[str], bool] | None = None
) -> Generator[None, None, None]:
    """Show every soft-max over the last axis in an attention of a model to `see` while this is open, in order.

    Several of them in one call of a layer are called "name", "name#2" and so on; `wanted` says which to show. The model
    is not compiled; a ValueError says that it has no attention.
    """
    names = {module: layer_name(name) for module, name in find_attention(model).items()}
    if not names:
        raise _no_attention(model)
    softmaxes = dict.fromkeys(names, 0)  # in the call of each that runs

    def show(calls: list[Call], rows: Rows) -> None:
        if rows.axis != -1 or len(rows.shape) < 3:
            return
        outermost, module = calls[0], calls[-1].module
        softmaxes[outermost.module] += 1
        number = softmaxes[outermost.module]
        name = outermost.name + (f"#{number}" if number > 1 else "")
        if wanted is None or wanted(name):
            heads = _mixed_heads(module)
            if len(rows.shape) > 3 and isinstance(heads, int):
                rows.head_axis = next((axis for axis in (1, len(rows.shape) - 3) if rows.shape[axis] == heads), None)
            else:
                rows.head_axis = 1 if len(rows.shape) == 4 else None
            see(name, rows, module)

    with AttentionWatch(names, show, begins=lambda call: softmaxes.update({call.module: 0})):
        yield


def pass_attention(model: nn.Module, images: Images, see: See, *, batch_size: int, seen: Seen | None = None) -> None:
    """Run a model on all images, as `pass_images` does, and show its soft-maxes to `see`; a ValueError without any."""
    check_model(model)
    inner = uncompiled(model)
    found: set[str] = set()

    def noting(name: str, rows: Rows, module: nn.Module) -> None:
        found.add(name)
        see(name, rows, module)

    with eager(model), watch_attention(inner, noting):
        pass_images(inner, images, batch_size=batch_size, seen=seen)
    if not found:
        raise _no_attention(inner)


def find_attention(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that have the parts of an attention, and their paths in the model."""

    def attends(module: nn.Module) -> bool:
        children = module._modules
        return bool(children) and (  # most of a model's modules are leaves
            is_attention(module) or any(all(name in children for name in names) for names in ATTENDING_BLOCKS)
        )

    return {module: name for name, module in model.named_modules() if attends(module)}


def _mixed_heads(module: Any) -> Any:
    """How many heads the soft-max has: an attention that mixes its heads may have more there; None if unknown."""
    heads = getattr(module, "num_heads", None) or getattr(module, "heads", None)
    return heads * getattr(module, "head_expansion", 1) if isinstance(heads, int) else None


def layer_name(name: str) -> str:
    """What the module of that name is called in results."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") or "attention"


def _no_attention(model: nn.Module) -> ValueError:
    none = f"{type(model).__name__} has no attention weights; looked for a soft-max over the last axis"
    where = f"or scaled_dot_product_attention, in modules that hold one of {', '.join(QUERIES)}"
    hint = "such as vit_small_patch16_224, swin_tiny_patch4_window7_224 or stvit_small"
    return ValueError(f"{none}, {where}; pass a vision transformer or a hybrid, {hint}")
