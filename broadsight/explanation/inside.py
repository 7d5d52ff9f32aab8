"""All maps of what a model does while one image passes."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ..errors import unknown
from ..inspection.meta_pass import in_eval_mode
from ..inspection.passing import moved
from ..inspection.watch import eager, uncompiled
from .maps.attention import AttentionLooks, LocalAttentionLooks
from .maps.gradcam import gradcam_looks
from .maps.map import KNOWN, Collector, Look
from .maps.query import QueryLooks
from .maps.tokens import AbstractTokenLooks, ForegroundLooks, FusionLooks, PoolLooks, SuperTokenLooks

GRADCAM = "gradcam"  # has passes of its own, since it needs gradients
OF_TOKENS = (PoolLooks, SuperTokenLooks, AbstractTokenLooks, FusionLooks, ForegroundLooks, LocalAttentionLooks)
COLLECTORS: dict[str, type[Collector]] = {one.kind: one for one in (AttentionLooks, QueryLooks, *OF_TOKENS)}
QUERY = QueryLooks.kind  # is about places that are asked for
KINDS = (GRADCAM, *COLLECTORS)  # in the order in which they are shown


def kinds_of(model: nn.Module, query: bool = False) -> tuple[str, ...]:
    """The kinds of looks that a model has, without running it, in the order in which `look_inside` gives them.

    With `query` those too that are about chosen places.
    """
    inner = uncompiled(model)
    own = [GRADCAM] if getattr(inner, "num_classes", None) != 0 else []
    found = [kind for kind, collector in COLLECTORS.items() if collector.suits(inner)]
    return (*own, *(kind for kind in found if query or kind != QUERY))


def check_kinds(model: nn.Module, kinds: Sequence[str], name: str) -> None:
    """Refuse kinds that nobody knows, or that a model, called so, lacks."""
    there = kinds_of(model, QUERY in kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("kind", kind, KINDS)
        if kind not in there:
            has = ", ".join(there) or "nothing to look at"
            raise ValueError(f"{name} has no {kind} to look at; it has {has}; {kind}: {KNOWN[kind]['where']}")


def look_inside(
    model: nn.Module,
    image: Tensor,
    kinds: str | Iterable[str] | None = None,
    target: int | None = None,
    query: Sequence[tuple[float, float]] = (),
) -> list[Look]:
    """All looks of some kinds, by kind and depth, in one pass, and further ones of Grad-CAM; the model stays as it was.

    Args:
        model: Takes normalised images; it may be compiled, in any mode and on any device.
        image: (1, C, H, W), normalised; moved to the model's device and dtype.
        kinds: All that the model has if None.
        target: Number of the class that Grad-CAM explains; the predicted one if None.
        query: Places (x, y) in pixels of the image, from its top left, whose attention the kind query shows.
    """
    inner = uncompiled(model)
    wanted = _checked(inner, kinds, len(query) > 0)
    if not isinstance(image, Tensor):
        raise ValueError(f"image is a {type(image).__name__}; expected a normalised tensor (1, C, H, W)")
    if image.ndim != 4 or len(image) != 1:
        hint = {3: "; pass image[None]", 4: "; look at one at a time"}.get(image.ndim, "")
        raise ValueError(f"image has shape {tuple(image.shape)}; expected one, as (1, C, H, W){hint}")
    if not image.is_floating_point():
        raise ValueError(f"image has dtype {image.dtype}; expected normalised floats, as the model's transforms give")
    image = moved(image, inner)
    size = (image.shape[-2], image.shape[-1])
    collectors = [collector(inner, size) for kind, collector in COLLECTORS.items() if kind in wanted]
    marks = _marks(query, size)
    for one in collectors:
        one.marks = marks
    found: dict[str, list[Look]] = {}
    with eager(inner):
        if collectors:
            trains = any(module.training for module in inner.modules())  # else nothing needs to be restored
            with in_eval_mode(inner) if trains else torch.no_grad(), ExitStack() as watching:
                for collector in collectors:
                    watching.enter_context(collector)
                inner(image)
        with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
            found |= {collector.kind: collector.looks() for collector in collectors}
        if GRADCAM in wanted:
            try:
                found[GRADCAM] = gradcam_looks(inner, image, target)
            except ValueError:
                # Only now it is known whether the model has a map to explain; without a wish for it, give the rest.
                if kinds is not None or target is not None or not any(found.values()):
                    raise
    if not any(found.values()) or (marks and not found[QUERY]):
        shown = [QUERY] if marks else list(found)
        missing = [getattr(one, "skipped", {}) for one in collectors if one.kind in shown]
        skipped = [f": {layer}: {why}" for one in missing for layer, why in one.items()]
        what = f"{type(inner).__name__} ran without {' or '.join(shown)} to show{''.join(skipped[:1])}"
        raise ValueError(f"{what}; choose another kind")
    return [look for kind in KINDS for look in sorted(found.get(kind, []), key=lambda look: look.depth)]


def _marks(query: Sequence[tuple[float, float]], size: tuple[int, int]) -> list[tuple[float, float]]:
    """Middles of pixels (x, y) of an image (height, width) as shares of its sides."""
    height, width = size
    marks = [((x + 0.5) / width, (y + 0.5) / height) for x, y in query]
    for (x, y), mark in zip(query, marks, strict=True):
        if not all(0 <= share < 1 for share in mark):
            what = f"query {x:g},{y:g} is outside of the image, which is {width}x{height}"
            raise ValueError(f"{what}; expected x from 0 to {width - 1}, y from 0 to {height - 1}")
    return marks


def _checked(model: nn.Module, kinds: str | Iterable[str] | None, query: bool) -> Sequence[str]:
    """The kinds that are wanted, all that the model has if None; `query` says whether places are asked for."""
    there = kinds_of(model, query)
    if kinds is None:
        kinds = [*there, *([QUERY] if query and QUERY not in there else [])]
    name, kinds = type(model).__name__, [kinds] if isinstance(kinds, str) else list(kinds)
    if query != (QUERY in kinds):
        hint = f"query is given, the kind query not among {', '.join(kinds)}" if query else "the kind query needs query"
        raise ValueError(f"{hint}; expected both or none, such as query=[(12, 30)]")
    check_kinds(model, kinds, name)
    if not kinds:
        raise ValueError(f"no kind was asked for; {name} has {', '.join(there) or 'nothing to look at'}")
    return kinds
