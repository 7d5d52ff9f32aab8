"""How densely a network attends: the entropy of its attention weights, layer by layer.

The measure of the context broadcasting paper: a row of weights that reaches all tokens alike has the largest entropy, a
row that picks one token has none. The network runs as it is, with fused attention too. What its attentions are called
with is watched, and their weights are computed a second time, a few rows at once.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..branch_structure import QUERIES, is_attention
from ..drawing import PALETTE, need_matplotlib, plot_format, save
from ..dry_run import in_eval_mode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of logits, weights and entropies together that are there at once beside what the network computes itself.
WEIGHTS_BYTES = 16 << 20
# Names of the children by which a block is known that attends by itself, without a module for it.
ATTENDING_BLOCKS = (("in_proj", "attn_out_proj"), ("local_in", "global_in"))
SOFTMAXES = (torch.softmax, torch.Tensor.softmax, torch.special.softmax, F.softmax)
_multi_head = inspect.signature(F.multi_head_attention_forward)


class LayerEntropy(float):
    """The mean entropy of a layer's attention rows, in nats, over images, heads and queries.

    Args:
        value: The mean.
        heads: The mean of each head; one for all where the layer does not keep heads apart in an axis of its weights.
        keys: The length of the rows: how many tokens, or for attention among channels how many channels, are attended
            to.
    """

    heads: tuple[float, ...]
    keys: int

    def __new__(cls, value: float, heads: Iterable[float], keys: int) -> "LayerEntropy":
        self = super().__new__(cls, value)
        self.heads, self.keys = tuple(heads), int(keys)
        return self

    def __getnewargs__(self) -> tuple[float, tuple[float, ...], int]:  # ty: ignore[incompatible-method-override]
        return float(self), self.heads, self.keys

    @property
    def uniform(self) -> float:
        """The largest entropy there is, that of uniform attention: log(keys)."""
        return math.log(self.keys)

    @property
    def density(self) -> float:
        """The entropy as a share of the largest one. 1 is uniform attention, also where there is but one key."""
        return float(self) / self.uniform if self.keys > 1 else 1.0


def attention_entropy(
    model: nn.Module, images: Tensor | Iterable[Any], *, batch_size: int = 8
) -> dict[str, LayerEntropy]:
    """Entropy of the attention weights of every layer of a network, by the layer's name, in the order of execution.

    The weights are those that the soft-max gives in eval mode: before dropout, and before what some networks do to them
    afterwards (mixing of heads, differences). A layer with several soft-maxes has several entries, "name", "name#2" and
    so on. Only soft-maxes over the last axis count, and no row in which everything is masked. What a row is depends on
    the layer:

    - attention in windows: the keys of one window;
    - attention among channels (XCiT, every other layer of DaViT): channels instead of tokens;
    - super-token attention: one super token's weights over all of them. The association of pixels with super tokens is
      a soft-max over another axis, and does not count;
    - abstract tokens (MAT): a pixel's weights in its window; "#2" the abstract token's in its window; "#3" an abstract
      token's among those of the image; "#4" a pixel's among those of the image;
    - partial attention: a foreground token's weights among the foreground; "#2" the background's single query. The
      latter's rows are as long as there are tokens, and zero for the foreground;
    - EMSNet: a place's weights in its 3x3 window; "#2" a coarse cell's among all of them;
    - multi-token pooling: a learned token's weights over its group's tokens and the image.

    Args:
        model: Any network with attention that takes a batch of images: timm's, ours, yours.
        images: (B, C, H, W), or an iterable of such batches, or of tuples that begin with one, as a data loader is. All
            of one size. They are moved to the model's device and dtype.
        batch_size: How many images pass the network at a time, at most.

    Raises:
        ValueError: The network has no attention, or there are no images, or their sizes differ.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a network, as timm.create_model gives")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} lets no image pass; choose 1 or more")
    compiled = any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())
    network: Any = model
    while "_orig_mod" in network._modules:
        network = network._orig_mod
    names = {module: name for name, module in network.named_modules() if _attends(module)}
    if not names:
        raise ValueError(_no_attention(network))
    watch = _Watch({module: name.replace("_orig_mod.", "") or "attention" for module, name in names.items()})
    # Nothing can be watched in what a compiler made of a network.
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), in_eval_mode(network):
        _run(network, images, batch_size, watch)
    if not watch.layers:
        raise ValueError(_no_attention(network))
    return {name: layer.entropy() for name, layer in watch.layers.items()}


def plot_attention_entropy(
    entropies: Mapping[str, Mapping[str, LayerEntropy]], path: str | Path | None = None
) -> "Figure":
    """Draw one line for each network, entropy over layers, and a dashed one for uniform attention in the first.

    Args:
        entropies: What `attention_entropy` gave, by the name that the legend shows.
        path: A png, svg or pdf file to write, which appears complete or not at all.
    """
    if path is not None:
        plot_format(path)
    if not entropies:
        raise ValueError("entropies are empty; expected {label: result of attention_entropy}")
    for label, layers in entropies.items():
        if not isinstance(layers, Mapping) or not all(isinstance(x, LayerEntropy) for x in layers.values()):
            raise ValueError(
                f"entropies[{label!r}] is no result of attention_entropy but a {type(layers).__name__}; pass "
                "{label: result}"
            )
    need_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    markers = "osD^vPX"  # one more than there are colours: many lines go without the same pair
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    panel = figure.subplots()
    for i, (label, layers) in enumerate(entropies.items()):
        places = range(1, len(layers) + 1)
        colour, marker = PALETTE[i % len(PALETTE)], markers[i % len(markers)]
        panel.plot(places, [float(x) for x in layers.values()], color=colour, marker=marker, markersize=5, label=label)
    uniform = [x.uniform for x in next(iter(entropies.values())).values()]
    panel.plot(range(1, len(uniform) + 1), uniform, color="black", linestyle="--", linewidth=0.8, label="uniform")
    panel.set_xlabel("layer")
    panel.set_ylabel("attention entropy, nats")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    if path is not None:
        save(figure, path)
    return figure


def _attends(module: nn.Module) -> bool:
    return is_attention(module) or any(all(name in module._modules for name in names) for names in ATTENDING_BLOCKS)


def _no_attention(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no attention weights; looked for a soft-max over the last axis, or "
        f"scaled_dot_product_attention, in modules that hold one of {', '.join(QUERIES)}; pass a vision transformer or "
        "a hybrid, such as vit_small_patch16_224, swin_tiny_patch4_window7_224 or stvit_small"
    )


def _run(model: nn.Module, images: Tensor | Iterable[Any], batch_size: int, watch: "_Watch") -> None:
    like = next((x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()), None)
    passed = 0
    handles = watch.listen()
    try:
        for batch in _batches(images):
            for part in batch.split(batch_size):
                part = part if like is None else part.to(like.device, like.dtype)
                with watch:
                    model(part)
                passed += len(part)
    finally:
        for handle in handles:
            handle.remove()
    if not passed:
        raise ValueError("images are empty; pass one at least, as (B, C, H, W)")


def _batches(images: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    if not isinstance(images, Tensor | Iterable):
        raise ValueError(f"images are a {type(images).__name__}; expected (B, C, H, W) or an iterable of such batches")
    for item in [images] if isinstance(images, Tensor) else images:
        batch = item[0] if isinstance(item, tuple | list) and item else item
        if not isinstance(batch, Tensor):
            raise ValueError(f"a batch of images is a {type(batch).__name__}; expected a tensor (B, C, H, W)")
        if batch.ndim != 4:
            hint = "; pass images[None] for a single one" if batch.ndim == 3 else ""
            raise ValueError(f"a batch of images has shape {tuple(batch.shape)}; expected (B, C, H, W){hint}")
        if len(batch):
            yield batch


@dataclass
class _Layer:
    """What has been seen of one soft-max.

    Args:
        sums: Of the entropies of all rows, by head.
        rows: How many there were, by head.
        keys: Their length.
    """

    sums: Tensor
    rows: Tensor
    keys: int

    def entropy(self) -> LayerEntropy:
        def mean(total: Tensor, rows: Tensor) -> float:
            return (total / rows).clamp(max=math.log(self.keys)).item()  # rounding may carry it past the largest

        heads = [mean(*head) for head in zip(self.sums, self.rows, strict=True)]
        return LayerEntropy(mean(self.sums.sum(), self.rows.sum()), heads, self.keys)


class _Watch(TorchFunctionMode):
    """Adds up the entropy of every row of attention weights while an attention runs.

    Args:
        names: Of the modules in which a soft-max is one of attention weights.
    """

    def __init__(self, names: dict[nn.Module, str]):
        super().__init__()
        self.names = names
        self.layers: dict[str, _Layer] = {}
        self.running: list[nn.Module] = []  # outermost first, whose name counts
        self.seen = 0  # soft-maxes in the present call of that

    def listen(self) -> list[Any]:
        def begins(module: nn.Module, inputs: tuple) -> None:
            self.seen = self.seen if self.running else 0
            self.running.append(module)

        def ends(module: nn.Module, inputs: tuple, output: Any) -> None:
            self.running.pop()

        for hook in (begins, ends):
            hook.__dict__["image_by_image"] = True
        handles: list[Any] = [module.register_forward_pre_hook(begins) for module in self.names]
        return handles + [module.register_forward_hook(ends, always_call=True) for module in self.names]

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.running:
            return result
        if func is F.scaled_dot_product_attention:
            self.add(_weights_of_product(*args, **kwargs))
        elif func is F.multi_head_attention_forward:  # torch shows the whole, and nothing of what is inside
            self.add(_weights_of_multi_head(_multi_head.bind(*args, **kwargs).arguments))
        elif func in SOFTMAXES and _over_last_axis(*args, **kwargs):
            self.add(_weights_of_softmax(result, *args, **kwargs))
        return result

    def add(self, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Adds one soft-max, given as logits and weights of some of its rows at a time."""
        self.seen += 1
        name = self.names[self.running[0]] + (f"#{self.seen}" if self.seen > 1 else "")
        for logits, weights in parts:
            entropies = torch.special.entr(weights).sum(-1)
            rows = torch.ones_like(entropies)
            if entropies.isnan().any():  # masked as a whole, or else the network computes nonsense and should show it
                rows = (~logits.isneginf().all(-1)).to(entropies.dtype)
                entropies = torch.where(rows > 0, entropies, 0)
            axis = _head_axis(weights.shape, self.running[-1])
            others = [i for i in range(entropies.ndim) if i != axis]
            sums = [x.cpu().double().sum(others).view(-1) for x in (entropies, rows)]
            found = _Layer(*sums, keys=weights.shape[-1])
            layer = self.layers.setdefault(name, found)
            if layer is found:
                continue
            if (layer.keys, len(layer.rows)) != (found.keys, len(found.rows)):
                raise ValueError(
                    f"{name} attends to {found.keys} keys now and to {layer.keys} before; pass images of one size"
                )
            layer.sums += found.sums
            layer.rows += found.rows


def _head_axis(shape: torch.Size, module: Any) -> int | None:
    """Where the heads are among the axes of weights (..., N, M), or None if they are not apart."""
    recorded = next((x for x in (getattr(module, name, None) for name in ("num_heads", "heads")) if x), None)
    if len(shape) == 4 and not isinstance(recorded, int):
        return 1
    if len(shape) < 4 or not isinstance(recorded, int):
        return None
    heads = recorded * getattr(module, "head_expansion", 1)
    return next((axis for axis in (1, len(shape) - 3) if shape[axis] == heads), None)


def _parts(shape: torch.Size, bytes_per_weight: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the first axis and of the queries of weights (B, ..., N, M), each small enough to be computed aside."""
    most = WEIGHTS_BYTES // (3 * bytes_per_weight)  # logits, weights, and the terms of their entropy
    query = max(1, math.prod(shape[1:-2]) * shape[-1])
    queries = min(max(1, most // query), shape[-2])
    images = max(1, most // (query * shape[-2])) if queries == shape[-2] else 1
    for i in range(0, shape[0], images):
        for j in range(0, shape[-2], queries):
            yield slice(i, i + images), slice(j, j + queries)


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _over_last_axis(input: Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
    return input.ndim > 2 and input.is_floating_point() and dim in (-1, input.ndim - 1)


def _weights_of_softmax(result: Tensor, input: Tensor, *_: Any, **__: Any) -> Iterator[tuple[Tensor, Tensor]]:
    rounded = result.dtype not in (torch.float32, torch.float64)
    for images, queries in _parts(result.shape, 8 if result.dtype == torch.float64 else 4):
        logits = input[images, ..., queries, :]
        yield logits, logits.float().softmax(-1) if rounded else result[images, ..., queries, :]


def _weights_of_product(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of torch's scaled dot product attention, with its arguments: (..., N, d), (..., M, d) -> parts of (..., N, M)."""
    if enable_gqa:  # several heads of queries share one of keys
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    (N, d), M = query.shape[-2:], key.shape[-2]
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]) or (1,)
    query = (_precise(query) * (d**-0.5 if scale is None else scale)).expand(*batch, N, d)
    key = _precise(key).expand(*batch, M, d)
    mask = None if attn_mask is None else attn_mask.expand(*batch, N, M)
    for images, queries in _parts(torch.Size((*batch, N, M)), query.element_size()):
        with torch.autocast(query.device.type, enabled=False):
            logits = query[images, ..., queries, :] @ key[images].mT
        if is_causal:
            places = torch.arange(N, device=query.device)[queries, None]
            logits.masked_fill_(torch.arange(M, device=query.device) > places, float("-inf"))
        if mask is not None:
            part = mask[images, ..., queries, :]
            logits = logits.masked_fill_(~part, float("-inf")) if part.dtype == torch.bool else logits.add_(part)
        yield logits, logits.softmax(-1)


def _weights_of_multi_head(given: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of the function behind nn.MultiheadAttention, with its arguments: (N, B, C), (M, B, C) -> of (B, heads, N, M)."""
    inputs = [x if x.ndim == 3 else x[:, None] for x in (given["query"], given["key"])]
    if given.get("use_separate_proj_weight"):
        weights = given["q_proj_weight"], given["k_proj_weight"]
    else:
        weights = given["in_proj_weight"].chunk(3)[:2]
    biases = (None, None) if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)[:2]
    query, key = (F.linear(*layer) for layer in zip(inputs, weights, biases, strict=True))
    images, heads, extra = query.shape[1], given["num_heads"], []
    if given["bias_k"] is not None:
        extra.append(given["bias_k"].to(key.dtype).expand(1, images, -1))
    if given["add_zero_attn"]:
        extra.append(torch.zeros_like(key[:1]))
    mask: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask"):
        one = given.get(name)
        if one is None:
            continue
        if one.dtype == torch.bool:  # here, true is what is hidden
            one = torch.zeros_like(one, dtype=query.dtype).masked_fill_(one, float("-inf"))
        if name == "key_padding_mask":
            one = one.view(images, 1, 1, -1)
        elif one.ndim == 3:
            one = one.unflatten(0, (images, heads))
        one = F.pad(one, (0, len(extra)))
        mask = one if mask is None else mask + one
    query, key = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (query, torch.cat([key, *extra])))
    return _weights_of_product(query, key, attn_mask=mask)
