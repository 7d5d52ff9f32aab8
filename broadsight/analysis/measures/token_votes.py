"""Bias and variance of class tokens, each of which is taken for a voter.

The measure of MAP (Eq. 2) with zero-one loss. All tokens together may be wrong: that is the bias. A token may answer
otherwise than all together: that is the variance, whether it is right or not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...inspection.passing import Seen
from ...visual.plots import PALETTE, need_matplotlib, save
from ..layer_chart import check_results, new_figure, style_of
from .token_groups import Answers, hear_tokens, with_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class GroupVotes:
    """One group, as parts of 1.

    Args:
        bias: How often the group is wrong; None without labels.
        variance: How many of its tokens answer otherwise than the group.
        apart: How many of its tokens answer otherwise than all groups together; the mean over groups is the variance
            of all tokens.
    """

    bias: float | None
    variance: float
    apart: float


@dataclass(frozen=True)
class TokenVotes:
    """Bias and variance of all tokens, means over images as parts of 1.

    Args:
        images, groups, tokens: How many images there were, groups, and tokens in each.
        bias: How often the aggregate is wrong; None without labels.
        variance: How many tokens answer otherwise than the aggregate; 0 by nature if there is but one.
        bias_error, variance_error: Standard errors of these means; None where one image says nothing of them.
        token_error: How often a token is wrong, on average over tokens; None without labels.
        per_group: Each group alone.
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
        """As plain numbers, for JSON."""
        record = asdict(self)
        record["per_group"] = list(record["per_group"])
        record["per_token"] = [list(group) for group in self.per_token]
        return record


class _Count:
    """Sums over images, as whole numbers."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.variances: list[Tensor] = []

    def add(self, answers: Answers) -> None:
        said = answers.tokens.argmax(-1)  # B G T
        by_group, together = answers.groups.argmax(-1), answers.aggregate.argmax(-1)  # B G, B
        apart = said != together[:, None, None]
        self.variances.append(apart.flatten(1).double().mean(1).cpu())
        sums = dict(apart=apart.sum(0), within=(said != by_group[:, :, None]).sum((0, 2)))
        if answers.labels is not None:
            truth = answers.labels
            sums |= dict(groups=(by_group != truth[:, None]).sum(0), wrong=(together != truth).sum())
            sums |= dict(tokens=(said != truth[:, None, None]).sum())
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value.cpu()

    def result(self) -> TokenVotes:
        variances = torch.cat(self.variances)
        images, (groups, tokens) = len(variances), self.sums["apart"].shape
        per_token = self.sums["apart"].double() / images  # G T
        within = self.sums["within"].double() / (images * tokens)
        bias = token_error = bias_error = None
        biases: list[float | None] = [None] * groups
        if "wrong" in self.sums:
            bias = int(self.sums["wrong"]) / images
            token_error = int(self.sums["tokens"]) / (images * groups * tokens)
            biases = (self.sums["groups"].double() / images).tolist()
            bias_error = (bias * (1 - bias) / (images - 1)) ** 0.5 if images > 1 else None
        rows = zip(biases, within.tolist(), per_token.mean(1).tolist(), strict=True)
        return TokenVotes(
            images,
            groups,
            tokens,
            bias,
            float(per_token.mean()),
            bias_error,
            float(variances.std() / images**0.5) if images > 1 else None,
            token_error,
            tuple(GroupVotes(*row) for row in rows),
            tuple(map(tuple, per_token.tolist())),
        )


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
        model: With `forward_groups`, as `broadsight.swap_pool(name, "map")`, map_resnet50 and runs of such have; in
            any mode, which it keeps.
        images: Normalised (B, C, H, W), or an iterable of such batches, or of (images, labels), as a data loader is.
        labels: (B,) class numbers of images that come as one tensor. Without any there is no bias.
        batch_size: Images that pass the model at a time, at most.
        seen: Told how many images have passed.

    Raises:
        ValueError: The model has no such tokens or has dropped their classifiers, there are no images, or labels do
            not fit.
    """
    count = _Count()
    hear_tokens(model, with_labels(images, labels), count.add, batch_size=batch_size, seen=seen)
    return count.result()


def plot_token_votes(votes: Mapping[str, TokenVotes], path: str | Path | None = None) -> "Figure":
    """Draw bias and variance of each model, with standard errors, and beside them the variance group by group.

    Args:
        votes: What `token_votes` gave, by the name that the axis shows.
        path: A png, svg or pdf file to write, which appears complete or not at all.
    """
    check_results(path, votes, TokenVotes, "token_votes")
    need_matplotlib()
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(max(9, 5 + 1.1 * len(votes)), 4.2)
    whole, by_group = figure.subplots(1, 2)
    for part, (name, hatch) in enumerate({"bias": "", "variance": "//"}.items()):
        bars = [(place, getattr(one, name), getattr(one, f"{name}_error")) for place, one in enumerate(votes.values())]
        bars = [bar for bar in bars if bar[1] is not None]
        whole.bar(
            [place + 0.4 * part - 0.2 for place, _, _ in bars],
            [100 * value for _, value, _ in bars],
            0.38,
            yerr=[100 * (error or 0.0) for _, _, error in bars],
            color=PALETTE[part],
            edgecolor="white",
            hatch=hatch,
            capsize=3,
            label=name,
        )
    turned = sum(map(len, votes)) > 24
    whole.set_xticks(range(len(votes)), list(votes), rotation=25 if turned else 0, ha="right" if turned else "center")
    whole.set_ylabel("of images or tokens, %")
    whole.set_title("all tokens together")
    for place, (label, one) in enumerate(votes.items()):
        style: dict[str, Any] = style_of(place)
        numbers = [
            number + 0.5 * (place + 0.5) / len(votes) - 0.25 for number in range(1, one.groups + 1)
        ]  # side by side
        by_group.plot(numbers, [100 * group.apart for group in one.per_group], **style, linestyle="", label=label)
        inside = [100 * group.variance for group in one.per_group]
        by_group.plot(numbers, inside, **style, linestyle="", markerfacecolor="white")
    empty: dict[str, Any] = dict(color="grey", marker="o", linestyle="")
    by_group.plot([], [], **empty, label="filled: apart from all")
    by_group.plot([], [], **empty, markerfacecolor="white", label="hollow: apart from their group")
    by_group.set_xlabel("group")
    by_group.set_ylabel("tokens that answer otherwise, %")
    by_group.set_title("group by group")
    by_group.set_xlim(0.5, max(one.groups for one in votes.values()) + 0.5)
    by_group.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in (whole, by_group):
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    whole.legend(frameon=False)
    by_group.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if path is not None:
        save(figure, path)
    return figure
