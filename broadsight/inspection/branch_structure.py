"""Modules that have the structure of an attention or an MLP, by timm's conventions for names and parts alone."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..layers import MultiScaleInteraction, MultiTokenPool

MLP_NAMES = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)
# A child of one of these names makes its parent an attention; the names of the layers at its end.
QUERIES = ("qkv", "qkvs", "qkv_proj", "q", "qk", "kv", "v", "wq", "q_proj", "query", "to_query")
PROJECTIONS = ("proj", "out_proj", "o_proj", "output", "final")
LOOKED_FOR = {
    "mlp": "modules named or classed like *mlp*, *ffn* or *feed_forward* that hold two linear layers or convolutions, "
    "and pairs of modules named intermediate and output",
    "attn": f"modules that hold one of {', '.join(QUERIES)}, and *_tokens mixers",
}


@dataclass(frozen=True)
class Candidate:
    """A module with the structure of a branch."""

    kind: str  # "mlp" or "attn"
    name: str
    module: nn.Module
    projection: nn.Module | None  # its last linear layer or convolution
    begins: nn.Module | None = None  # its first, where no module holds the whole branch; then `module` is the last


def candidates(model: nn.Module) -> Iterator[Candidate]:
    """All modules with the structure of an attention or an MLP."""
    claimed: set[str] = set()  # of modules inside which there are no others
    for name, module in model.named_modules():
        if any(name.startswith(f"{other}.") for other in claimed):
            continue
        if isinstance(module, MultiTokenPool) or name.rpartition(".")[2] == "head":
            claimed.add(name)
        elif _is_child(module, "attn_out_proj") and _is_child(module, "mlp_out_proj"):  # both begin in one layer
            for kind in ("attn", "mlp"):
                projection = module.get_submodule(f"{kind}_out_proj")
                yield Candidate(kind, f"{name}.{kind}_out_proj", projection, projection)
        elif (last := _after_attention(module)) is not None:
            claimed.add(name)
            yield Candidate("attn", name, module, last)
        elif is_attention(module):
            claimed.add(name)
            named = next((getattr(module, child) for child in PROJECTIONS if _is_child(module, child)), nn.Identity())
            # nn.MultiheadAttention reads the weights of its projection without calling it
            layers = [] if isinstance(module, nn.MultiheadAttention) else list(affine_layers(named))
            yield Candidate("attn", name, module, layers[-1] if layers else None)
        elif name.endswith("_tokens") and list(affine_layers(module)):
            claimed.add(name)
            yield Candidate("attn", name, module, None)
        elif _is_mlp(name, module):
            inner_name, inner = _unwrapped(name, module)
            if not any(_is_mlp(n, m) for n, m in inner.named_modules() if n):  # the innermost is meant
                claimed.add(name)
                yield Candidate("mlp", inner_name, inner, list(affine_layers(inner))[-1])
        elif (first := _only_layer(module, "intermediate")) and (last := _only_layer(module, "output")):
            claimed |= {f"{name}.intermediate", f"{name}.output"}
            yield Candidate("mlp", next(n for n, m in model.named_modules() if m is last), last, last, first)


def is_attention(module: nn.Module) -> bool:
    """Whether the module has the parts of an attention."""
    strided = _is_child(module, "conv_proj") and _is_child(module, "o_proj")
    ours = isinstance(module, MultiScaleInteraction | nn.MultiheadAttention)
    return ours or strided or any(_is_child(module, name) for name in QUERIES)


def _after_attention(module: nn.Module) -> nn.Module | None:
    """Of what transformers calls an attention, with the computation in one child, the layer in the other."""
    inner = any(is_attention(module.get_submodule(name)) for name in ("attention", "self") if _is_child(module, name))
    return _only_layer(module, "output") if inner else None


def _only_layer(module: nn.Module, child: str) -> Any:
    """The linear layer or convolution of a child, if it has a single one."""
    layers = list(affine_layers(module.get_submodule(child))) if _is_child(module, child) else []
    return layers[0] if len(layers) == 1 else None


def _is_mlp(name: str, module: nn.Module) -> bool:
    named = MLP_NAMES.search(f"{name.rpartition('.')[2]} {type(module).__name__}")
    return bool(named) and len(list(affine_layers(_unwrapped(name, module)[1]))) > 1


def _unwrapped(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The module itself, or what is inside when it only wraps that, as a residual connection does."""
    while not isinstance(module, nn.Sequential):
        weighty = [(key, child) for key, child in module.named_children() if list(affine_layers(child))]
        if len(weighty) != 1 or not list(weighty[0][1].children()):
            break
        name, module = f"{name}.{weighty[0][0]}", weighty[0][1]
    return name, module


def affine_layers(module: nn.Module) -> Iterator[nn.Module]:
    """All linear layers and convolutions in the module."""
    return (child for child in module.modules() if isinstance(child, nn.Linear | nn.Conv1d | nn.Conv2d))


def _is_child(module: nn.Module, name: str) -> bool:
    return isinstance(module._modules.get(name), nn.Module)
