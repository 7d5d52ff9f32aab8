"""Where class tokens and their groups are in the space of logits, as points in a plane, after MAP's Fig. 5.

The paper does not name its axes. Here they are the logits of two classes, or the principal directions of all logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...inspection.passing import Images, Seen
from ...visual.plots import PALETTE
from .base import Measure, Rows, register_measure
from .frame import Figure, Result, draws, new_figure
from .tokens import OF_TOKENS, Answers, hear_tokens

MARKERS = "osDvPX"  # of groups; triangles are the centres
AGGREGATE = PALETTE[-1]  # no group has this colour


@dataclass(frozen=True)
class TokenLogits(Result):
    """Points of N images, G groups of T tokens, whose axes are the logits of two "classes", or directions by "pca"."""

    view: str  # "classes", or "pca" for the two directions in which tokens differ most
    tokens: Tensor  # (N, G, T, 2): of classes as in Answers, in "pca" as `placed`
    groups: Tensor  # (N, G, 2)
    aggregate: Tensor  # (N, 2)
    classes: Tensor | None  # (N, 2), of the axes for each image; None in "pca"
    labels: Tensor | None  # (N,)
    answers: Tensor  # (N,), the model's
    chosen: bool = False  # whether the caller chose the classes, the same for all images
    explained: tuple[float, float] | None = None  # in "pca" the part of the variance that each direction holds

    def placed(self) -> Tensor:
        """Tokens (N, G, T, 2) about the centres that their groups are: T times their shares, and the group's bias."""
        return self.tokens if self.view == "pca" else _placed(self.tokens, self.groups)

    def record(self) -> dict[str, Any]:
        points: dict[str, Tensor | None] = dict(tokens=self.tokens, groups=self.groups, aggregate=self.aggregate)
        points |= dict(answer=self.answers, label=self.labels, classes=self.classes)
        lists = {name: values.tolist() for name, values in points.items() if values is not None}
        images = [dict(zip(lists, one, strict=True)) for one in zip(*lists.values(), strict=True)]
        count = dict(zip(("images", "groups", "tokens"), self.tokens.shape, strict=False))
        record: dict[str, Any] = {"view": self.view, **count, "chosen": self.chosen, "points": images}
        return record | ({} if self.explained is None else {"explained": list(self.explained)})


def token_logits(
    model: nn.Module,
    images: Images,
    labels: Tensor | None = None,
    *,
    classes: Sequence[int] | None = None,
    view: str = "classes",
    batch_size: int = 8,
    seen: Seen | None = None,
) -> TokenLogits:
    """Tokens, groups and aggregate of a model with multi-token pooling as points in a plane.

    Args:
        model, images, labels: As for `token_votes`.
        classes: Two classes whose logits are the axes, for all images; without them each image has its own: the true
            class, or without labels the answer, and the strongest other.
        view: "classes" or "pca".
    """
    if view not in ("classes", "pca"):
        raise ValueError(f"view={view!r} is not known; choose 'classes' or 'pca'")
    if classes is not None and view == "pca":
        raise ValueError("classes are given for view='pca', which takes all; leave them out, or choose view='classes'")
    numbers = () if classes is None else [one for one in classes if isinstance(one, int)]
    if classes is not None and not len(classes) == len(numbers) == len({*numbers}) == 2:
        raise ValueError(f"classes are {list(classes)}; expected the numbers of two different classes")
    heard: list[dict[str, Tensor]] = []

    def hear(answers: Answers) -> None:
        found = dict(tokens=answers.tokens, groups=answers.groups, aggregate=answers.aggregate)
        more = {} if answers.labels is None else {"labels": answers.labels}
        if view == "classes":
            more["classes"] = axes = _axes(answers, classes)
            for name, logits in found.items():  # (B, ..., C) -> (B, ..., 2)
                found[name] = logits.take_along_dim(axes.view(-1, *[1] * (logits.ndim - 2), 2), -1)
        more["answers"] = answers.aggregate.argmax(-1)
        heard.append({name: x.cpu() for name, x in (found | more).items()})

    hear_tokens(model, images, labels, hear, batch_size=batch_size, seen=seen)
    points: dict[str, Any] = {"classes": None, "labels": None}
    points |= {name: torch.cat([one[name] for one in heard]) for name in heard[0]}
    if view == "pca":
        points |= _principal(points["tokens"], points["groups"], points["aggregate"])
    return TokenLogits(view, **points, chosen=classes is not None)


@draws(TokenLogits, "token_logits")
def plot_token_logits(points: Mapping[str, TokenLogits], names: Sequence[str] | None = None) -> Figure:
    """Draw a panel for each model: `placed` tokens, their groups and the aggregates; `names` are those of classes."""
    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    figure = new_figure(1.6 + 4.2 * columns, 0.6 + 4.2 * rows)
    from matplotlib.lines import Line2D

    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, (label, one) in zip(panels, points.items(), strict=False):
        _draw(panel, one)
        axes = ["logit of the true class", "logit of the strongest other class"]
        if one.explained is not None:
            axes = [f"principal direction {i}, {part:.0%} of the variance" for i, part in enumerate(one.explained, 1)]
        elif one.chosen and one.classes is not None:
            known = dict(enumerate(names or ()))
            axes = [f"logit of {known.get(number, f'class {number}')}" for number in one.classes[0].tolist()]
        elif one.labels is None:
            axes[0] = "logit of the answer"
        panel.set(title=label, xlabel=axes[0], ylabel=axes[1])
    for panel in panels[len(points) :]:
        panel.set_visible(False)
    handles = []
    for group in range(min(max(one.tokens.shape[1] for one in points.values()), len(MARKERS) * 5)):
        colour, marker = _style(group)
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", label=f"tokens of group {group + 1}"))
    edge: dict[str, Any] = dict(marker="^", linestyle="", markeredgecolor="black")
    handles.append(Line2D([], [], color="white", markersize=9, **edge, label="group, in its colour"))
    handles.append(Line2D([], [], color=AGGREGATE, markersize=11, **edge, label="all together"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return figure


def rows(result: TokenLogits) -> Rows:
    """How far apart tokens and groups are, in logits: root mean square distances from their centres."""
    tokens, groups = result.placed(), result.groups
    within = (tokens - groups[:, :, None]).square().sum(-1).mean((0, 2)).sqrt()  # G
    between = (groups - result.aggregate[:, None]).square().sum(-1).mean(0).sqrt()
    pairs = zip(within.tolist(), between.tolist(), strict=True)
    cells = [(f"group {number}", tokens.shape[2], *distances) for number, distances in enumerate(pairs, 1)]
    return ("of", "tokens", "tokens from their group", "group from the aggregate"), cells


def _draw(panel: Any, one: TokenLogits) -> None:
    placed, few = one.placed(), len(one.aggregate) <= 20  # of many images, marks must not cover each other
    tokens, centres, all_ = (26, 60, 90) if few else (8, 11, 16)
    edge: dict[str, Any] = dict(marker="^", edgecolor="black", linewidth=0.5 if few else 0.2, zorder=3)
    for group in range(placed.shape[1]):
        colour, marker = _style(group)
        spread = placed[:, group].flatten(0, 1).T.tolist()
        panel.scatter(*spread, s=tokens, color=colour, marker=marker, alpha=0.5, linewidth=0)
        panel.scatter(*one.groups[:, group].T.tolist(), s=centres, color=colour, **edge)
    panel.scatter(*one.aggregate.T.tolist(), s=all_, color=AGGREGATE, **edge)
    panel.set_aspect("equal", adjustable="datalim")
    if one.view == "classes":
        panel.axline((float(one.aggregate[0, 0]),) * 2, slope=1, color="grey", linestyle="--", linewidth=0.8, zorder=0)


def _style(group: int) -> tuple[str, str]:
    return PALETTE[group % (len(PALETTE) - 1)], MARKERS[group % len(MARKERS)]


def _axes(answers: Answers, classes: Sequence[int] | None) -> Tensor:
    """(B, 2): the classes of the axes for each image."""
    aggregate, count = answers.aggregate, answers.aggregate.shape[-1]
    if classes is not None:
        if not all(0 <= one < count for one in classes):
            raise ValueError(f"classes are {list(classes)}, but the model has {count}: expected 0 to {count - 1}")
        return torch.tensor(classes, device=aggregate.device).expand(len(aggregate), 2)
    if count < 2:
        raise ValueError("the model has one class; a plane takes the logits of two")
    first = aggregate.argmax(-1) if answers.labels is None else answers.labels
    others = aggregate.scatter(1, first[:, None], float("-inf"))
    return torch.stack([first, others.argmax(-1)], 1)


def _placed(tokens: Tensor, groups: Tensor) -> Tensor:
    """Shares (N, G, T, C) of groups (N, G, C) so that their mean is the group."""
    return tokens.shape[2] * (tokens - tokens.mean(2, keepdim=True)) + groups[:, :, None]


def _principal(tokens: Tensor, groups: Tensor, aggregate: Tensor) -> dict[str, Any]:
    """All logits (..., C) projected on the two directions (..., 2) in which the placed tokens differ most."""
    tokens = _placed(tokens, groups).double()
    mean = tokens.flatten(0, 2).mean(0)
    rows = tokens.flatten(0, 2) - mean  # N*G*T C
    few = len(rows) < rows.shape[1]  # take the smaller of the two products, which have the same eigenvalues
    values, vectors = torch.linalg.eigh(rows @ rows.T if few else rows.T @ rows)  # in ascending order
    values, vectors = (F.pad(x, (2, 0))[..., -2:].flip(-1) for x in (values.clamp(min=0), vectors))  # there may be one
    vectors = rows.T @ vectors if few else vectors  # C 2
    lengths = vectors.norm(dim=0)
    directions = torch.where(values > 1e-12 * values[0], vectors / lengths, 0.0)
    # An eigenvector may point either way: making its largest part positive gives the same figure every time
    directions = directions * directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    total = float(values.sum()) and float(rows.square().sum())
    parts = (values / total).tolist() if total else [0.0, 0.0]
    found = {"tokens": tokens, "groups": groups.double(), "aggregate": aggregate.double()}
    projected = {name: ((x - mean) @ directions).float() for name, x in found.items()}
    return projected | {"explained": (parts[0], parts[1])}


ABOUT = "where class tokens, groups and their aggregate are among the logits", "MAP, Fig. 5"
OPTIONS = {
    "view": "classes, whose axes are two classes' logits, or pca",
    "classes": "numbers of the two classes, such as 3,5; without them each image has its own",
}
FUNCTIONS = token_logits, plot_token_logits, rows
register_measure(Measure("logits", *ABOUT, *FUNCTIONS, **OF_TOKENS, samples=200, options=OPTIONS, order=7))
