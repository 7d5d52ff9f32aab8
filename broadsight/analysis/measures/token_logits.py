"""Where class tokens and their groups are in the space of logits, as points in a plane.

The image of MAP's Fig. 5: tokens scatter about the centre of their group, groups about the aggregate. The paper does
not say what its axes are. Here they are the logits of two classes, or the principal directions of all logits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...inspection.passing import Seen, batches
from ...visual.plots import PALETTE, need_matplotlib, save
from ..layer_chart import check_results, new_figure
from .token_groups import Answers, hear_tokens, with_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VIEWS = ("classes", "pca")
MARKERS = "osDvPX"  # of groups; triangles are the centres
AGGREGATE = PALETTE[-1]  # no group has this colour


@dataclass(frozen=True)
class TokenLogits:
    """Points of N images, G groups of T tokens.

    Args:
        view: "classes": axes are the logits of two classes. "pca": the two directions in which tokens differ most.
        tokens: (N, G, T, 2). In "classes" each token's share of its group's logits, without the bias, or its group's
            logits where that has one token. In "pca" what `placed` gives.
        groups: (N, G, 2)
        aggregate: (N, 2)
        classes: (N, 2), which classes the axes are for each image; None in "pca".
        labels: (N,) or None.
        answers: (N,), what the model answers.
        chosen: Whether the classes were asked for, the same for all images; else the first is the true one, or without
            labels the answer, and the second the strongest other.
        explained: In "pca" the part of the variance that each direction holds.
    """

    view: str
    tokens: Tensor
    groups: Tensor
    aggregate: Tensor
    classes: Tensor | None
    labels: Tensor | None
    answers: Tensor
    chosen: bool = False
    explained: tuple[float, float] | None = None

    def placed(self) -> Tensor:
        """Tokens (N, G, T, 2) in the scale of their groups, each of which is then the centre of its tokens.

        That is T times the share, and the bias of the group.
        """
        return self.tokens if self.view == "pca" else _placed(self.tokens, self.groups)

    def record(self) -> dict[str, Any]:
        """As plain numbers, for JSON."""
        images = []
        for place in range(len(self.aggregate)):
            one: dict[str, Any] = {"answer": int(self.answers[place])}
            if self.labels is not None:
                one["label"] = int(self.labels[place])
            if self.classes is not None:
                one["classes"] = self.classes[place].tolist()
            points = dict(tokens=self.tokens, groups=self.groups, aggregate=self.aggregate)
            images.append(one | {name: points_[place].tolist() for name, points_ in points.items()})
        count = dict(images=len(images), groups=self.tokens.shape[1], tokens=self.tokens.shape[2])
        record: dict[str, Any] = {"view": self.view, **count, "chosen": self.chosen, "points": images}
        return record | ({} if self.explained is None else {"explained": list(self.explained)})


def token_logits(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    labels: Tensor | None = None,
    *,
    classes: Sequence[int] | None = None,
    view: str = "classes",
    limit: int = 200,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> TokenLogits:
    """Tokens, groups and aggregate of a model with multi-token pooling as points in a plane.

    Args:
        model: With `forward_groups`, as `broadsight.swap_pool(name, "map")`, map_resnet50 and runs of such have; in
            any mode, which it keeps.
        images: Normalised (B, C, H, W), or an iterable of such batches, or of (images, labels), as a data loader is.
        labels: (B,) class numbers of images that come as one tensor.
        classes: Two classes whose logits are the axes, for all images; without them each image has its own: the true
            class, or without labels the answer, and the strongest other.
        view: "classes", or "pca" for the two directions in which the tokens' logits differ most.
        limit: Images at most; no more are read.
        batch_size: Images that pass the model at a time, at most.
        seen: Told how many images have passed.

    Raises:
        ValueError: The model has no such tokens or has dropped their classifiers, there are no images, or labels or
            classes do not fit.
    """
    if view not in VIEWS:
        raise ValueError(f"view={view!r} is not known; choose {' or '.join(map(repr, VIEWS))}")
    if limit < 1:
        raise ValueError(f"limit={limit}; expected 1 or more images")
    pair = None if classes is None else _pair(classes, view)
    heard: list[dict[str, Tensor]] = []

    def hear(answers: Answers) -> None:
        found = dict(tokens=answers.tokens, groups=answers.groups, aggregate=answers.aggregate)
        more = {} if answers.labels is None else {"labels": answers.labels}
        if view == "classes":
            more["classes"] = _axes(answers, pair)
            found = {name: _taken(logits, more["classes"]) for name, logits in found.items()}
        more["answers"] = answers.aggregate.argmax(-1)
        heard.append({name: x.cpu() for name, x in (found | more).items()})

    hear_tokens(model, _first(with_labels(images, labels), limit), hear, batch_size=batch_size, seen=seen)
    points: dict[str, Any] = {name: torch.cat([one[name] for one in heard]) for name in heard[0]}
    if view == "pca":
        points |= _principal(points["tokens"], points["groups"], points["aggregate"])
    points = {"classes": None, "labels": None, **points}
    return TokenLogits(view, **points, chosen=pair is not None)


def plot_token_logits(
    points: Mapping[str, TokenLogits], path: str | Path | None = None, names: Sequence[str] | None = None
) -> "Figure":
    """Draw a panel for each model: tokens, the centres of their groups, and the aggregates.

    Tokens are drawn where `placed` puts them. With the logits of two classes, whatever lies below the diagonal is for
    the first of them.

    Args:
        points: What `token_logits` gave, by the name that the panel shows.
        path: A png, svg or pdf file to write, which appears complete or not at all.
        names: What the classes are called, by number.
    """
    check_results(path, points, TokenLogits, "token_logits")
    need_matplotlib()
    from matplotlib.lines import Line2D

    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    figure = new_figure(1.6 + 4.2 * columns, 0.6 + 4.2 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    most = max(one.tokens.shape[1] for one in points.values())
    for panel, (label, one) in zip(panels, points.items(), strict=False):
        _draw(panel, one)
        across, up = _axis_names(one, names)
        panel.set(title=label, xlabel=across, ylabel=up)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(points) :]:
        panel.set_visible(False)
    handles = []
    for group in range(min(most, len(MARKERS) * 5)):
        colour, marker = _style(group)
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", label=f"tokens of group {group + 1}"))
    edge: dict[str, Any] = dict(marker="^", linestyle="", markeredgecolor="black")
    handles.append(Line2D([], [], color="white", markersize=9, **edge, label="group, in its colour"))
    handles.append(Line2D([], [], color=AGGREGATE, markersize=11, **edge, label="all together"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    if path is not None:
        save(figure, path)
    return figure


def _draw(panel: Any, one: TokenLogits) -> None:
    placed, few = one.placed(), len(one.aggregate) <= 20  # of many images, marks must not cover each other
    tokens, centres, all_ = (26, 60, 90) if few else (8, 11, 16)
    for group in range(placed.shape[1]):
        colour, marker = _style(group)
        spread = placed[:, group].flatten(0, 1).T.tolist()
        panel.scatter(*spread, s=tokens, color=colour, marker=marker, alpha=0.5, linewidth=0)
    edge: dict[str, Any] = dict(marker="^", edgecolor="black", linewidth=0.5 if few else 0.2, zorder=3)
    for group in range(placed.shape[1]):
        panel.scatter(*one.groups[:, group].T.tolist(), s=centres, color=_style(group)[0], **edge)
    panel.scatter(*one.aggregate.T.tolist(), s=all_, color=AGGREGATE, **edge)
    panel.set_aspect("equal", adjustable="datalim")
    if one.view == "classes":
        panel.axline((float(one.aggregate[0, 0]),) * 2, slope=1, color="grey", linestyle="--", linewidth=0.8, zorder=0)


def _style(group: int) -> tuple[str, str]:
    return PALETTE[group % (len(PALETTE) - 1)], MARKERS[group % len(MARKERS)]


def _axis_names(one: TokenLogits, names: Sequence[str] | None) -> tuple[str, str]:
    if one.explained is not None:
        first, second = (
            f"principal direction {i + 1}, {part:.0%} of the variance" for i, part in enumerate(one.explained)
        )
        return first, second
    if one.chosen and one.classes is not None:
        first, second = (
            f"logit of {names[number] if names is not None and number < len(names) else f'class {number}'}"
            for number in one.classes[0].tolist()
        )
        return first, second
    return f"logit of the {'answer' if one.labels is None else 'true class'}", "logit of the strongest other class"


def _first(images: Tensor | Iterable[Any], limit: int) -> Iterator[tuple[Any, ...]]:
    """Batches as they come, until there are so many images."""
    left = limit
    for batch, rest in batches(images):
        yield batch[:left], *(x[:left] for x in rest)
        left -= len(batch)
        if left <= 0:
            return


def _pair(classes: Sequence[int], view: str) -> tuple[int, int]:
    if view == "pca":
        raise ValueError("classes are given for view='pca', which takes all; leave them out, or choose view='classes'")
    if len(classes) != 2 or not all(isinstance(one, int) for one in classes) or classes[0] == classes[1]:
        raise ValueError(f"classes are {list(classes)}; expected the numbers of two different classes")
    return classes[0], classes[1]


def _axes(answers: Answers, pair: tuple[int, int] | None) -> Tensor:
    """(B, 2): which classes' logits are taken of each image."""
    aggregate, count = answers.aggregate, answers.aggregate.shape[-1]
    if pair is not None:
        if not all(0 <= one < count for one in pair):
            raise ValueError(f"classes are {list(pair)}, but the model has {count}: expected 0 to {count - 1}")
        return torch.tensor(pair, device=aggregate.device).expand(len(aggregate), 2)
    if count < 2:
        raise ValueError("the model has one class; a plane takes the logits of two")
    first = aggregate.argmax(-1) if answers.labels is None else answers.labels
    others = aggregate.scatter(1, first[:, None], float("-inf"))
    return torch.stack([first, others.argmax(-1)], 1)


def _taken(logits: Tensor, classes: Tensor) -> Tensor:
    """(B, ..., C) -> (B, ..., 2)."""
    between = logits.shape[1:-1]
    return logits.gather(-1, classes.view(-1, *(1 for _ in between), 2).expand(-1, *between, -1))


def _placed(tokens: Tensor, groups: Tensor) -> Tensor:
    """Shares (N, G, T, C) of groups (N, G, C) so that their mean is the group."""
    return tokens.shape[2] * (tokens - tokens.mean(2, keepdim=True)) + groups[:, :, None]


def _principal(tokens: Tensor, groups: Tensor, aggregate: Tensor) -> dict[str, Any]:
    """All logits (..., C) in the two directions (..., 2) in which the placed tokens differ most."""
    tokens = _placed(tokens, groups).double()
    mean = tokens.flatten(0, 2).mean(0)
    rows = tokens.flatten(0, 2) - mean  # N*G*T C
    few = len(rows) < rows.shape[1]  # of the two products the smaller: both have the same values
    values, vectors = torch.linalg.eigh(rows @ rows.T if few else rows.T @ rows)  # in ascending order
    values, vectors = (F.pad(x, (2, 0))[..., -2:].flip(-1) for x in (values.clamp(min=0), vectors))  # there may be one
    vectors = rows.T @ vectors if few else vectors  # C 2
    lengths = vectors.norm(dim=0)
    directions = torch.where(values > 1e-12 * values[0], vectors / lengths, 0.0)
    # An eigenvector may point either way: its largest part is positive, so that the same image comes again
    directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    total = float(values.sum()) and float(rows.square().sum())
    parts = (values / total).tolist() if total else [0.0, 0.0]
    found = {"tokens": tokens, "groups": groups.double(), "aggregate": aggregate.double()}
    projected = {name: ((x - mean) @ directions).float() for name, x in found.items()}
    return projected | {"explained": (parts[0], parts[1])}
