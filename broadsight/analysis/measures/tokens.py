"""Bias and variance of class tokens, each taken for a voter.

The measure of MAP (Eq. 2) with zero-one loss. The bias says how often all tokens together are wrong; the variance how
often a token answers otherwise than all together, right or not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...inspection.passing import Seen
from ...visual.plots import PALETTE
from .base import Measure, Rows, register_measure
from .frame import count_from_one, draws, new_figure, style_of
from .token_groups import OF_TOKENS, Answers, hear_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class GroupVotes:
    """One group, as parts of 1.

    Args:
        bias: How often the group is wrong; None without labels.
        variance: The share of its tokens that answer otherwise than the group.
        apart: The share of its tokens that answer otherwise than all groups together; the mean over groups is the
            variance of all tokens.
    """

    bias: float | None
    variance: float
    apart: float


@dataclass(frozen=True)
class TokenVotes:
    """Bias and variance of all tokens, means over images as parts of 1.

    Args:
        images, groups, tokens: Numbers of images, groups, and tokens in each group.
        bias: How often the aggregate is wrong; None without labels.
        variance: The share of tokens that answer otherwise than the aggregate; always 0 for a single token.
        bias_error, variance_error: Standard errors of these means; None for a single image.
        token_error: How often a token is wrong, on average over tokens; None without labels.
        per_group: Each group by itself.
        per_token: How often each token answers otherwise than the aggregate, by group.
    """

    images: int
    groups: int
    tokens: int
    bias: float | None
    variance: float
    bias_error: float | None
    variance_error: float | None
    token_error: float | None
    per_group: tuple[GroupVotes, ...]
    per_token: tuple[tuple[float, ...], ...]

    def record(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)


def token_votes(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    labels: Tensor | None = None,
    *,
    batch_size: int = 8,
    seen: Seen | None = None,
) -> TokenVotes:
    """Bias and variance of the class tokens of a model with multi-token pooling.

    A token's answer is the largest of its share of the logits, without the bias of the classifier; where groups have
    one token each, of the group's logits. Distillation tokens take part in the aggregate and do not vote.

    Args:
        model: With `forward_groups`, as of `broadsight.swap_pool(name, "map")` or map_resnet50; in any mode, which it
            keeps.
        images, batch_size, seen: As for `pass_images`; the second of a tuple of images is their labels.
        labels: (B,) class numbers of images that come as one tensor. Without labels there is no bias.

    Raises:
        ValueError: The model has no such tokens or has dropped their classifiers, there are no images, or labels do
            not fit.
    """
    votes: list[list[Tensor]] = []

    def hear(answers: Answers) -> None:
        said = [x.argmax(-1).cpu() for x in (answers.tokens, answers.groups, answers.aggregate)]
        votes.append(said if answers.labels is None else [*said, answers.labels.cpu()])

    hear_tokens(model, images, labels, hear, batch_size=batch_size, seen=seen)
    return _counted(*map(torch.cat, zip(*votes, strict=True)))


def _counted(tokens: Tensor, groups: Tensor, aggregate: Tensor, labels: Tensor | None = None) -> TokenVotes:
    """From the classes that tokens (N, G, T), groups (N, G) and the aggregate (N,) vote for."""
    apart = (tokens != aggregate[:, None, None]).double()
    per_token, variances = apart.mean(0), apart.flatten(1).mean(1)  # G T, N
    within = (tokens != groups[:, :, None]).double().mean((0, 2))
    bias = bias_error = token_error = None
    biases: list[float | None] = [None] * groups.shape[1]
    if labels is not None:
        wrong = (aggregate != labels).double()
        bias, bias_error = wrong.mean().item(), _error(wrong)
        token_error = (tokens != labels[:, None, None]).double().mean().item()
        biases = (groups != labels[:, None]).double().mean(0).tolist()
    rows = zip(biases, within.tolist(), per_token.mean(1).tolist(), strict=True)
    return TokenVotes(
        *tokens.shape,
        bias=bias,
        variance=per_token.mean().item(),
        bias_error=bias_error,
        variance_error=_error(variances),
        token_error=token_error,
        per_group=tuple(GroupVotes(*row) for row in rows),
        per_token=tuple(map(tuple, per_token.tolist())),
    )


def _error(values: Tensor) -> float | None:
    """The standard error of their mean (N,)."""
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else None


@draws(TokenVotes, "token_votes")
def plot_token_votes(votes: Mapping[str, TokenVotes]) -> "Figure":
    """Draw bias and variance of each model, with standard errors, and beside them the variance group by group.

    Args:
        votes: Results of `token_votes`, by the names for the axis.
    """
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
        by_group.plot(numbers, [100 * group.apart for group in one.per_group], **style, label=label)
        by_group.plot(numbers, [100 * group.variance for group in one.per_group], **style, markerfacecolor="white")
    empty: dict[str, Any] = dict(color="grey", marker="o", linestyle="")
    by_group.plot([], [], **empty, label="filled: apart from all")
    by_group.plot([], [], **empty, markerfacecolor="white", label="hollow: apart from their group")
    by_group.set_xlim(0.5, max(one.groups for one in votes.values()) + 0.5)
    count_from_one(by_group, "group")
    whole.set(title="all tokens together", ylabel="of images or tokens, %")
    by_group.set(title="group by group", ylabel="tokens that answer otherwise, %")
    for panel in (whole, by_group):
        panel.set_ylim(bottom=0)
    whole.legend(frameon=False)
    by_group.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def rows(result: TokenVotes) -> Rows:
    def percent(*shares: float | None) -> list[float | None]:
        return [None if share is None else 100 * share for share in shares]

    whole = ("all", result.groups * result.tokens, *percent(result.bias, result.variance, None))
    groups = [
        (f"group {number}", result.tokens, *percent(one.bias, one.apart, one.variance))
        for number, one in enumerate(result.per_group, 1)
    ]
    return ("of", "tokens", "wrong %", "tokens apart from all %", "from their group %"), [whole, *groups]


register_measure(
    Measure(
        "tokens",
        "bias and variance of class tokens: how often all of them are wrong, and how often one differs from all",
        "MAP, Eq. 2 and Fig. 4",
        token_votes,
        plot_token_votes,
        rows,
        **OF_TOKENS,
        least=2,
        order=6,
    )
)
