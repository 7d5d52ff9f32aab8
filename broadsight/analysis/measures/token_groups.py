"""The answers of every class token of a multi-token pool, of its group, and of all groups together."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.passing import Seen, batches, check_model, pass_images
from ...inspection.watch import uncompiled

WHO_HAS = "pass one that has: broadsight.swap_pool(name, 'map'), map_resnet50 and its like, or a run with --pool map"


def has_tokens(model: Any) -> bool:
    return callable(getattr(model, "forward_groups", None)) and bool(getattr(model, "has_groups", True))


# What all measures of class tokens have in common.
OF_TOKENS: dict[str, Any] = dict(
    thing="multi-token pooling",
    examples="map_resnet50, map_convnext_tiny, or a run trained with --pool map",
    suits=has_tokens,
    labels="welcome",
    dense=False,
)


@dataclass(frozen=True)
class Answers:
    """Logits of B images from G groups of T class tokens, C classes, in single precision or better.

    Args:
        tokens: (B, G, T, C), each token's share of its group's logits, without the bias; the group's logits where a
            group has one token.
        groups: (B, G, C)
        aggregate: (B, C), the model's answer.
        labels: (B,) on the same device, or None.
    """

    tokens: Tensor
    groups: Tensor
    aggregate: Tensor
    labels: Tensor | None


def hear_tokens(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    labels: Tensor | None,
    hear: Callable[[Answers], None],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> None:
    """Let a model answer all images and pass its tokens' answers to `hear`, batch by batch.

    Args:
        model: Any with `forward_groups`, as `broadsight.swap_pool` makes.
        images: As `pass_images` takes them; the second of a tuple is taken for labels.
        labels: (B,) of images that are one tensor; None otherwise, or without labels.
        limit: Images at most; no more are read. All if None.

    Raises:
        ValueError: The model has no groups of tokens, or labels do not fit.
    """
    check_model(model)
    inner = uncompiled(model)
    if not has_tokens(inner):
        kind = type(getattr(inner, "head", inner) if hasattr(inner, "forward_groups") else inner).__name__
        raise ValueError(f"{kind} has no groups of class tokens; {WHO_HAS}")
    if labels is not None:
        if not isinstance(images, Tensor):
            raise ValueError("labels are given apart from an iterable of batches; pass batches (images, labels)")
        if len(labels) != len(images):
            raise ValueError(f"{len(labels)} labels for {len(images)} images; expected one for each")
        images = [(images, labels)]
    labelled: set[bool] = set()

    def see(found: Any, rest: tuple) -> None:
        answers = _answers(found, rest[0] if rest else None)
        labelled.add(answers.labels is not None)
        if len(labelled) > 1:
            raise ValueError("some batches of images come with labels and others without; expected one or the other")
        hear(answers)

    images = images if limit is None else _first(images, limit)
    pass_images(_AskTokens(inner), images, batch_size=batch_size, seen=seen, see=see)


def _first(images: Tensor | Iterable[Any], count: int) -> Iterator[tuple[Any, ...]]:
    """The first images, in batches as they come."""
    for batch, rest in batches(images):
        yield batch[:count], *(x[:count] for x in rest)
        count -= len(batch)
        if count <= 0:
            return


class _AskTokens(nn.Module):
    """`forward_groups` as a model's forward."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model: Any = model

    def forward(self, x: Tensor) -> Any:
        return self.model.forward_groups(x, per_token=True)


def _answers(found: Any, labels: Any) -> Answers:
    if found.tokens is None:
        raise ValueError(
            "the pool is light: it answers by its averaged tokens and has dropped the tokens' own classifiers; pass "
            "the full one"
        )
    groups = found.tokens
    distill = getattr(found, "distill", None)
    voices = groups if distill is None else torch.cat([groups, distill], 1)
    aggregate, tokens = voices.mean(1), found.per_token
    if tokens is None or tokens.shape[2] == 1:
        tokens = groups[:, :, None]
    tokens, groups, aggregate = (x if x.dtype == torch.float64 else x.float() for x in (tokens, groups, aggregate))
    for x in (tokens, groups):
        if not bool(torch.isfinite(x).all()):
            raise ValueError("the model answers with numbers that are not finite; its weights are damaged")
    return Answers(tokens, groups, aggregate, None if labels is None else _checked(labels, aggregate))


def _checked(labels: Any, logits: Tensor) -> Tensor:
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"labels are a {type(labels).__name__}; expected class numbers (B,)") from None
    images, classes = logits.shape
    if labels.shape != (images,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype} {tuple(labels.shape)}; expected class numbers ({images},)")
    if images and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        wrong = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
        raise ValueError(f"a label is {wrong}, but the model has {classes} classes; expected 0 to {classes - 1}")
    return labels.to(logits.device)
