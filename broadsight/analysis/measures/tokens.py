"""What the class tokens of a multi-token pool answer: their bias and variance (MAP, Eq. 2) with zero-one loss.

The bias says how often all tokens together are wrong; the variance how often a token answers otherwise than all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection.passing import Images, Seen, pass_images
from ...inspection.watch import uncompiled
from ...papers.tables import published
from ...visual.plots import PALETTE
from .base import Measure, Rows, register_measure
from .frame import Figure, Result, count_from_one, draws, new_figure, style_of


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

    A token has its share of its group's logits, without the bias; the group's logits where a group has one token.
    """

    tokens: Tensor  # (B, G, T, C)
    groups: Tensor  # (B, G, C)
    aggregate: Tensor  # (B, C), the model's answer
    labels: Tensor | None  # (B,) on the same device


def hear_tokens(
    model: nn.Module,
    images: Images,
    labels: Tensor | None,
    hear: Callable[[Answers], None],
    *,
    batch_size: int,
    seen: Seen | None,
) -> None:
    """Let a model answer all images and pass its tokens' answers to `hear`, batch by batch; see `token_votes`."""
    inner = uncompiled(model)
    if not has_tokens(inner):
        kind = type(getattr(inner, "head", inner) if hasattr(inner, "forward_groups") else inner).__name__
        having = "broadsight.swap_pool(name, 'map'), map_resnet50 and its like, or a run with --pool map"
        raise ValueError(f"{kind} has no groups of class tokens; pass one that has: {having}")
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

    run = partial(inner.forward_groups, per_token=True)
    pass_images(inner, images, batch_size=batch_size, seen=seen, see=see, run=run)


def _answers(found: Any, labels: Any) -> Answers:
    if found.tokens is None:
        why = "it answers by its averaged tokens and has dropped the tokens' own classifiers"
        raise ValueError(f"the pool is light: {why}; pass the full one")
    groups, distill, tokens = found.tokens, getattr(found, "distill", None), found.per_token
    aggregate = (groups if distill is None else torch.cat([groups, distill], 1)).mean(1)
    if tokens is None or tokens.shape[2] == 1:
        tokens = groups[:, :, None]
    tokens, groups, aggregate = (x if x.dtype == torch.float64 else x.float() for x in (tokens, groups, aggregate))
    if not (tokens.isfinite().all() and groups.isfinite().all()):
        raise ValueError("the model answers with numbers that are not finite; its weights are damaged")
    if labels is not None:
        try:
            labels = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"labels are a {type(labels).__name__}; expected class numbers (B,)") from None
        images, classes = aggregate.shape
        if labels.shape != (images,) or labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(f"labels are {labels.dtype} {tuple(labels.shape)}; expected class numbers ({images},)")
        for label in labels.tolist():
            if not 0 <= label < classes:
                wanted = f"expected 0 to {classes - 1}"
                raise ValueError(f"a label is {label}, but the model has {classes} classes; {wanted}")
        labels = labels.to(aggregate.device)
    return Answers(tokens, groups, aggregate, labels)


@dataclass(frozen=True)
class GroupVotes(Result):
    """One group, as parts of 1."""

    bias: float | None  # how often the group is wrong; None without labels
    variance: float  # the share of its tokens that answer otherwise than the group
    differing: float  # than all groups together; the mean over groups is the variance of all tokens


@dataclass(frozen=True)
class TokenVotes(Result):
    """Bias and variance of all tokens, means over images as parts of 1; errors are None without labels or of one."""

    images: int
    groups: int  # their number
    tokens: int  # in each group
    bias: float | None  # how often the aggregate is wrong
    variance: float  # the share of tokens that answer otherwise than it; 0 for a single token
    bias_error: float | None
    variance_error: float | None
    token_error: float | None  # how often a token is wrong, on average over tokens
    per_group: tuple[GroupVotes, ...]
    per_token: tuple[tuple[float, ...], ...]  # how often each token answers otherwise than the aggregate, by group
    series: str = ""  # the curve that it is a point of, over the number of tokens

    @property
    def total(self) -> int:
        """The number of tokens in all groups."""
        return self.groups * self.tokens

    @property
    def accuracy(self) -> float | None:
        return None if self.bias is None else 1 - self.bias

    def record(self) -> dict[str, Any]:
        return super().record() | dict(total=self.total, accuracy=self.accuracy)


def token_votes(
    model: nn.Module,
    images: Images,
    labels: Tensor | None = None,
    *,
    series: str = "",
    batch_size: int = 8,
    seen: Seen | None = None,
) -> TokenVotes:
    """Bias and variance of the class tokens of a model with multi-token pooling.

    A token's answer is the largest of its share of the logits, without the bias of the classifier; where groups have
    one token each, of the group's logits. Distillation tokens take part in the aggregate and do not vote.

    Args:
        model: With `forward_groups`, as of `broadsight.swap_pool(name, "map")` or map_resnet50.
        images, batch_size, seen: As for `pass_images`; the second of a tuple of images is their labels.
        labels: (B,) class numbers of images that come as one tensor. Without labels there is no bias.
        series: What the model has in common with others of more or fewer tokens, which are drawn as one curve.
    """
    votes: list[list[Tensor]] = []

    def hear(answers: Answers) -> None:
        said = [x.argmax(-1).cpu() for x in (answers.tokens, answers.groups, answers.aggregate)]
        votes.append(said if answers.labels is None else [*said, answers.labels.cpu()])

    def error(values: Tensor) -> float | None:
        """The standard error of their mean (N,)."""
        return float(values.std() / len(values) ** 0.5) if len(values) > 1 else None

    hear_tokens(model, images, labels, hear, batch_size=batch_size, seen=seen)
    tokens, groups, aggregate, *labelled = map(torch.cat, zip(*votes, strict=True))  # N G T, N G, N and perhaps N
    differing = (tokens != aggregate[:, None, None]).double()
    per_token = differing.mean(0)  # G T
    within = (tokens != groups[:, :, None]).double().mean((0, 2))
    bias = bias_error = token_error = None
    biases: list[float | None] = [None] * groups.shape[1]
    if labelled:
        (labels,) = labelled
        wrong = (aggregate != labels).double()
        bias, bias_error = wrong.mean().item(), error(wrong)
        token_error = (tokens != labels[:, None, None]).double().mean().item()
        biases = (groups != labels[:, None]).double().mean(0).tolist()
    errors = bias_error, error(differing.flatten(1).mean(1)), token_error
    per_group = tuple(map(GroupVotes, biases, within.tolist(), per_token.mean(1).tolist()))
    by_token = tuple(map(tuple, per_token.tolist()))
    values: Any = *tokens.shape, bias, per_token.mean().item(), *errors, per_group, by_token, series
    return TokenVotes(*values)


def curves_of(votes: Mapping[str, TokenVotes]) -> dict[str, list[TokenVotes]]:
    """The models of every series, fewest tokens first; a model without one is a series of its own.

    A series with one number of tokens in several ways, such as 2 x 4 and 4 x 2, is split by the number of groups.
    """
    found: dict[str, list[TokenVotes]] = {}
    for label, one in sorted(votes.items(), key=lambda item: item[1].total):
        found.setdefault(one.series or label, []).append(one)
    for series, members in list(found.items()):
        if len({(one.total, one.groups) for one in members}) > len({one.total for one in members}):
            del found[series]
            for one in members:
                found.setdefault(f"{series}, {one.groups} group{'s' if one.groups > 1 else ''}", []).append(one)
    return found


@draws(TokenVotes, "token_votes")
def plot_token_votes(votes: Mapping[str, TokenVotes], *, paper: bool = False) -> Figure:
    """Draw accuracy, bias and variance over the number of tokens, a curve for each series, with standard errors.

    Where no series has several numbers of tokens these are bars, and beside them the variance group by group. `paper`
    adds the published accuracies, of another training, as broken lines.
    """
    curves = curves_of(votes)
    return _draw_curves(curves, paper) if paper or _several(curves) else _draw_bars(votes)


def notes(votes: Mapping[str, TokenVotes]) -> list[str]:
    """What curves need, where there are none."""
    if _several(curves_of(votes)):
        return []
    runs = "runs that differ in --pool-args groups or tokens alone, such as tokens=1, 2, 4 and 8"
    return [f"curves over the number of class tokens need {runs}; these are bars"]


def _several(curves: Mapping[str, Sequence[TokenVotes]]) -> bool:
    return any(len({one.total for one in members}) > 1 for members in curves.values())


def _draw_curves(curves: Mapping[str, Sequence[TokenVotes]], paper: bool) -> Figure:
    figure = new_figure(13, 4.6)
    panels = figure.subplots(1, 3)
    # of an image right is the opposite of wrong, so that both have one standard error
    for panel, name in zip(panels, ("accuracy", "bias", "variance"), strict=True):
        for number, (label, members) in enumerate(curves.items()):
            values: dict[int, list[float]] = {}
            for one in members:
                if (value := getattr(one, name)) is not None:
                    values.setdefault(one.total, []).append(100 * value)
                    spread = 100 * ((one.variance_error if name == "variance" else one.bias_error) or 0.0)
                    panel.errorbar(one.total, 100 * value, spread, **style_of(number), linestyle="", capsize=2)
            if values:
                panel.plot(list(values), list(map(fmean, values.values())), color=style_of(number)["color"])
            panel.plot([], [], **style_of(number), label=label)
        titles = dict(title=name if name == "accuracy" else f"{name} error", xlabel="class tokens")
        panel.set(**titles, ylabel="of tokens, %" if name == "variance" else "of images, %")
    if paper:
        printed = published("competitors.yaml")["class_tokens"]
        for grey, (way, row) in zip(("0.65", "0.35"), printed["rows"].items(), strict=True):
            label, style = f"published, {way} ({printed['source']})", dict(color=grey, linestyle="--", marker=".")
            panels[0].plot([int(count) for count in row], [float(value) for value in row.values()], **style)
            panels[-1].plot([], [], **style, label=label)
    ticks = sorted({int(x) for panel in panels for line in panel.lines for x in line.get_xdata()})
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, list(map(str, ticks)))
        panel.set_ylim(bottom=0 if panel is not panels[0] else None)
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_bars(votes: Mapping[str, TokenVotes]) -> Figure:
    figure = new_figure(max(9, 5 + 1.1 * len(votes)), 4.2)
    whole, by_group = figure.subplots(1, 2)
    for part, (name, hatch) in enumerate({"bias": "", "variance": "//"}.items()):
        bars = [(place, getattr(one, name), getattr(one, f"{name}_error")) for place, one in enumerate(votes.values())]
        bars = [bar for bar in bars if bar[1] is not None]
        style: dict[str, Any] = dict(color=PALETTE[part], edgecolor="white", hatch=hatch, capsize=3, label=name)
        errors = [100 * (error or 0.0) for _, _, error in bars]
        at = [place + 0.4 * part - 0.2 for place, _, _ in bars]
        whole.bar(at, [100 * value for _, value, _ in bars], 0.38, yerr=errors, **style)
    turned = sum(map(len, votes)) > 24
    whole.set_xticks(range(len(votes)), list(votes), rotation=25 if turned else 0, ha="right" if turned else "center")
    for place, (label, one) in enumerate(votes.items()):
        style = style_of(place) | dict(linestyle="")
        beside = 0.5 * (place + 0.5) / len(votes) - 0.25  # models side by side
        numbers = [number + beside for number in range(1, one.groups + 1)]
        by_group.plot(numbers, [100 * group.differing for group in one.per_group], **style, label=label)
        by_group.plot(numbers, [100 * group.variance for group in one.per_group], **style, markerfacecolor="white")
    empty: dict[str, Any] = dict(color="grey", marker="o", linestyle="")
    by_group.plot([], [], **empty, label="filled: differ from all")
    by_group.plot([], [], **empty, markerfacecolor="white", label="hollow: differ from their group")
    by_group.set_xlim(0.5, max(one.groups for one in votes.values()) + 0.5)
    count_from_one(by_group, "group")
    whole.set(title="all tokens together", ylabel="of images or tokens, %", ylim=(0, None))
    by_group.set(title="group by group", ylabel="tokens that answer otherwise, %", ylim=(0, None))
    whole.legend(frameon=False)
    by_group.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def rows(result: TokenVotes) -> Rows:
    def row(name: str, tokens: int, *shares: float | None) -> tuple[Any, ...]:
        return name, tokens, *(None if share is None else 100 * share for share in shares)

    whole = row("all", result.groups * result.tokens, result.bias, result.variance, None)
    numbered = enumerate(result.per_group, 1)
    groups = [row(f"group {i}", result.tokens, one.bias, one.differing, one.variance) for i, one in numbered]
    return ("of", "tokens", "wrong %", "tokens that differ from all %", "from their group %"), [whole, *groups]


ABOUT = "bias and variance of class tokens: how often all of them are wrong, and how often one differs from all"
FUNCTIONS = token_votes, plot_token_votes, rows
OPTIONS = {"paper": "true: MAP's published accuracies too, as broken lines"}
TAKES: dict[str, Any] = dict(least=2, order=6, notes=notes, options=OPTIONS)
register_measure(Measure("tokens", ABOUT, "MAP, Eq. 2 and Fig. 4", *FUNCTIONS, **OF_TOKENS, **TAKES))
