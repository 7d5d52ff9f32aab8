"""Losses of multi-token pooling: labels, distillation within and between token groups, and a teacher."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn

from .errors import check_choice, check_number
from .layers import GroupLogits
from .layers.checks import READINGS, check_reading
from .layers.kernels.dispatch import runs_eagerly
from .weights.loading import load_teacher, renormalization

Criterion = str | Callable[[Tensor, Tensor], Tensor]
CRITERIA = ("ce", "bce")
CHOICES = dict(label_loss=("groups", "total", "sum"), intra_direction=("tokens_to_mean", "mean_to_tokens"))
CHOICES |= dict(inter_target=("logit_mean", "probability_mean", "logit_sum"), reduction=("mean", "batchmean"))
# The options as the released code has them, and as the paper is printed: Eq. 3 to 5, and the label loss of Algorithm 1,
# since Eq. 5 does not say which logits its cross-entropy is of.
OPTIONS: dict[str, dict[str, Any]] = {reading: dict(intra_direction="tokens_to_mean") for reading in READINGS}
OPTIONS["fitted"] |= dict(label_loss="groups", inter_target="logit_mean", reduction="mean", stop_gradient=True)
OPTIONS["equations"] |= dict(label_loss="sum", inter_target="probability_mean", reduction="batchmean")
OPTIONS["equations"]["stop_gradient"] = False


def aggregate(group_logits: GroupLogits) -> Tensor:
    """The model's logits (B, C), the mean over its groups: of tokens and distillation tokens, or of averaged ones."""
    tokens, average, distill = _fields(group_logits)
    if tokens is not None:
        return (tokens if distill is None else (tokens + distill) / 2).mean(1)
    if average is None:
        raise ValueError("group_logits holds neither tokens nor average; pass what model(x, groups=True) returns")
    return average.mean(1)


class MultiTokenLoss(nn.Module):
    """Labels, distillation within the groups, and diversity between them (multi-token attention pooling, WACV 2025).

    With y the tokens' and a the averaged token's logits of a group, and sg stopping the gradient: the sum over the
    groups of criterion(y, target) + intra * KL(sg y || a) + inter * KL(sg all groups || y), in float32 at least.
    A negative `inter` drives the groups apart; `intra=0` is the loss of the predecessor, Gramian attention (GA).

    Args:
        criterion: "ce", "bce", or a loss of logits (B, C) and the target, a scalar, which is called once per group.
        intra, inter: Weights of the divergences, which are zero without averaged tokens and with one group.
        reading: Options that are None are as the released weights were trained ("fitted"), or as Eq. 3 to 5 are printed
            ("equations"). Algorithm 1 is "equations" with `inter=-1, inter_target="logit_sum"`.
        label_loss: What is labelled: each of the "groups", their mean ("total"), or the "sum" of tokens and averages.
        intra_direction: Who teaches in a group: "tokens_to_mean" or "mean_to_tokens".
        inter_target: What groups are compared with: the softmax of the "logit_mean", the "probability_mean" of their
            softmaxes, or the softmax of the "logit_sum" over all tokens and averaged tokens.
        reduction: Divergences are averaged over images and classes ("mean") or images alone ("batchmean").
        stop_gradient: Whoever teaches is constant to the gradient, in a group and between groups.
        smoothing: Label smoothing of class indices in "ce" and "bce"; soft targets are taken as they come.
    """

    criterion: Criterion

    def __init__(
        self,
        criterion: Criterion,
        intra: float = 1.0,
        inter: float = -0.8,
        *,
        reading: Literal["fitted", "equations"] = "fitted",
        label_loss: Literal["groups", "total", "sum"] | None = None,
        intra_direction: Literal["tokens_to_mean", "mean_to_tokens"] | None = None,
        inter_target: Literal["logit_mean", "probability_mean", "logit_sum"] | None = None,
        reduction: Literal["mean", "batchmean"] | None = None,
        stop_gradient: bool | None = None,
        smoothing: float = 0.0,
    ):
        super().__init__()
        name = criterion.__name__ if isinstance(criterion, type) else type(criterion).__name__
        if isinstance(criterion, type):
            raise ValueError(f"criterion is the class {name}; expected an object: pass {name}()")
        if isinstance(criterion, str):
            check_choice("criterion", criterion, CRITERIA)
        elif not callable(criterion):
            raise ValueError(f"criterion is a {name}; expected 'ce', 'bce' or a loss of (logits, target)")
        check_number("smoothing", smoothing)
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing={smoothing} is no label smoothing; choose it from 0 to below 1, e.g. 0.1")
        if smoothing and not isinstance(criterion, str):
            raise ValueError(f"smoothing={smoothing} reaches 'ce' and 'bce' alone; set it in the criterion you pass")
        check_number("intra", intra)
        check_number("inter", inter)
        check_reading(reading)
        given: dict[str, Any] = dict(label_loss=label_loss, intra_direction=intra_direction, inter_target=inter_target)
        given |= dict(reduction=reduction, stop_gradient=stop_gradient)
        options = OPTIONS[reading] | {name: choice for name, choice in given.items() if choice is not None}
        for name, known in CHOICES.items():
            check_choice(name, options[name], known)
        if not isinstance(options["stop_gradient"], bool):
            raise ValueError(f"stop_gradient={stop_gradient!r}; expected True or False")
        if options["reduction"] == "batchmean" and inter < 0:
            fault = f"reduction='batchmean' with inter={inter}: a negative divergence has no lower bound"
            warnings.warn(f"{fault} and may outrun the label loss; watch inter, or use reduction='mean'", stacklevel=2)
        self.criterion, self.smoothing, self.intra, self.inter = criterion, smoothing, intra, inter
        self.label_loss, self.intra_direction = options["label_loss"], options["intra_direction"]
        self.inter_target, self.reduction = options["inter_target"], options["reduction"]
        self.reading, self.stop_gradient = reading, options["stop_gradient"]

    def forward(self, group_logits: GroupLogits, target: Tensor) -> Tensor:
        """The scalar to minimise. The target holds class indices (B,) or soft targets (B, C)."""
        return self.parts(group_logits, target)["total"]

    def parts(self, group_logits: GroupLogits, target: Tensor) -> dict[str, Tensor]:
        """The scalars base, intra, inter and total; intra and inter unweighted, all but total also `_per_group` (G,).

        A label loss that is not of the groups is shared out equally in `base_per_group`.
        """
        y, a, _ = _training_logits(group_logits)
        target = _checked_target(target, y, self.criterion)
        with torch.autocast(y.device.type, enabled=False):  # for products in a foreign criterion
            label = partial(_label_losses, self.criterion, self.smoothing)
            base = _over_groups(label, y, a, self.label_loss, target)
            return _parts(self.intra, self.inter, base, self.intra_losses(y, a), self.inter_losses(y, a))

    def intra_losses(self, y: Tensor, a: Tensor | None) -> Tensor:
        """Divergence of tokens (B, G, C) and averaged token (B, G, C) of each group: (G,)."""
        if a is None:
            return y.new_zeros(y.shape[1])
        if self.intra_direction == "tokens_to_mean":
            return _divergences(self._taught(y).log_softmax(-1), a, self.reduction)
        # The averages' classifier gets a zero, not nothing: DistributedDataParallel waits for it.
        return _divergences(self._taught(a).log_softmax(-1), y, self.reduction) + 0 * a.mean((0, 2))

    def inter_losses(self, y: Tensor, a: Tensor | None) -> Tensor:
        """Divergence of each group (B, G, C) from all of them: (G,)."""
        groups, all_groups = y.shape[1], self._taught(y)
        if groups == 1:
            return y.new_zeros(1)
        if self.inter_target == "probability_mean":
            log_p = all_groups.log_softmax(-1).logsumexp(1, keepdim=True) - math.log(groups)
        elif self.inter_target == "logit_sum":
            log_p = _sum(all_groups, None if a is None else self._taught(a)).log_softmax(-1)
        else:
            log_p = all_groups.mean(1, keepdim=True).log_softmax(-1)
        return _divergences(log_p, y, self.reduction)

    def _taught(self, logits: Tensor) -> Tensor:
        return logits.detach() if self.stop_gradient else logits


class MultiTokenDistillationLoss(nn.Module):
    """Multi-token loss of a student with distillation tokens, which learn from a teacher.

    With d the distillation tokens' logits of a group, the label loss of MultiTokenLoss becomes
    (1 - alpha) * criterion(y, target) + alpha * teacher loss(d), and KL(sg d || a) joins the intra term. The teacher
    loss is the cross-entropy against the teacher's class ("hard"), or temperature² * KL(teacher || d) of logits divided
    by the temperature, averaged over images ("soft"). The teacher is frozen and put into eval mode in place. It moves
    with the loss, but is not among its parameters or in its state dict.

    Args:
        criterion, intra, inter, options: As for MultiTokenLoss.
        teacher: A model, a timm name, or a run folder; None if every call brings `teacher_logits`.
        alpha: Share of the teacher in the label loss.
        kind, temperature: Of the teacher loss.
        teacher_criterion: "ce" or "bce" for the hard loss; None follows the criterion.
        pretrained: Load the weights of a teacher given by name or folder.
        normalization: Mean and standard deviation of the images, which the teacher then sees normalised its own way.
    """

    scale: Tensor | None
    shift: Tensor | None

    def __init__(
        self,
        criterion: Criterion,
        teacher: nn.Module | str | Path | None,
        alpha: float = 0.5,
        kind: Literal["hard", "soft"] = "hard",
        temperature: float = 3.0,
        intra: float = 1.0,
        inter: float = -0.8,
        *,
        teacher_criterion: Literal["ce", "bce"] | None = None,
        pretrained: bool = True,
        normalization: tuple[Sequence[float], Sequence[float]] | None = None,
        **options: Any,
    ):
        super().__init__()
        self.multi_token = MultiTokenLoss(criterion, intra, inter, **options)
        check_number("alpha", alpha)
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha} is no share; choose it between 0 (labels alone) and 1 (teacher alone)")
        check_number("temperature", temperature)
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} divides the logits; choose it above 0, e.g. 3.0")
        check_choice("kind", kind, ("hard", "soft"))
        if teacher_criterion is None:
            binary = criterion == "bce" or isinstance(criterion, (nn.BCEWithLogitsLoss, BinaryCrossEntropy))
            teacher_criterion = "bce" if binary else "ce"
        check_choice("teacher_criterion", teacher_criterion, CRITERIA)
        self.alpha, self.kind, self.temperature, self.teacher_criterion = alpha, kind, temperature, teacher_criterion
        # In a tuple torch does not see it: no optimiser gets its weights, no checkpoint of the loss stores them
        self._teacher = () if teacher is None else (load_teacher(teacher, pretrained).eval().requires_grad_(False),)
        scale, shift = renormalization(normalization, self.teacher)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.normalization = normalization

    def init_non_persistent_buffers(self) -> None:
        """Compute scale and shift again; see `layers.buffers`."""
        values = renormalization(self.normalization, self.teacher)
        for buffer, value in zip((self.scale, self.shift), values, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)

    @property
    def teacher(self) -> nn.Module | None:
        return self._teacher[0] if self._teacher else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MultiTokenDistillationLoss":
        for teacher in self._teacher:  # .to(), .cuda() and .half() all come by here
            teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def forward(
        self, images: Tensor | None, group_logits: GroupLogits, target: Tensor, teacher_logits: Tensor | None = None
    ) -> Tensor:
        """The scalar to minimise, of images as the student saw them, or of the teacher's logits (B, C) if known."""
        return self.parts(images, group_logits, target, teacher_logits)["total"]

    def parts(
        self, images: Tensor | None, group_logits: GroupLogits, target: Tensor, teacher_logits: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As MultiTokenLoss.parts, with the shares of base: label and teacher, unweighted, also `_per_group`."""
        _, a, d = _training_logits(group_logits)
        if d is None:
            what = "group_logits.distill is None: the model has no distillation tokens"
            raise ValueError(f"{what}; build it with distill_tokens=1")
        if teacher_logits is None:
            teacher_logits = self.ask_teacher(images)
        student, teacher_logits = self.multi_token, _checked_teacher_logits(teacher_logits, d)
        plain = student.parts(group_logits, target)
        label, intra = plain["base_per_group"], plain["intra_per_group"] + student.intra_losses(d, a)
        teacher = _over_groups(self._teacher_losses, d, None, student.label_loss, teacher_logits)
        base = (1 - self.alpha) * label + self.alpha * teacher
        parts = _parts(student.intra, student.inter, base, intra, plain["inter_per_group"])
        shares = dict(label=label.sum(), teacher=teacher.sum(), label_per_group=label, teacher_per_group=teacher)
        return parts | shares

    @torch.no_grad()
    def ask_teacher(self, images: Tensor | None) -> Tensor:
        """The teacher's logits (B, C) for images (B, ...)."""
        if self.teacher is None or images is None:
            missing = "teacher" if self.teacher is None else "images"
            raise ValueError(f"{missing} is None and no teacher_logits came with the call; give one of the two")
        if self.teacher.training:  # its owner may have called train()
            self.teacher.eval()
        if self.scale is not None and self.shift is not None:
            images = (images * self.scale + self.shift).to(images.dtype)
        return self.teacher(images)

    def _teacher_losses(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Loss of logits (B, K, C) against the teacher's (B, C): (K,)."""
        if self.kind == "hard":
            return _label_losses(self.teacher_criterion, 0.0, logits, teacher_logits.argmax(-1))
        soft = (teacher_logits / self.temperature).log_softmax(-1)[:, None]
        return self.temperature**2 * _divergences(soft, logits / self.temperature, "batchmean")


def _parts(intra_weight: float, inter_weight: float, base: Tensor, intra: Tensor, inter: Tensor) -> dict[str, Tensor]:
    per_group = dict(base=base, intra=intra, inter=inter)
    sums = {name: losses.sum() for name, losses in per_group.items()}
    total = sums["base"] + intra_weight * sums["intra"] + inter_weight * sums["inter"]
    return {**sums, "total": total, **{f"{name}_per_group": losses for name, losses in per_group.items()}}


def _over_groups(
    losses: Callable[[Tensor, Tensor], Tensor], y: Tensor, a: Tensor | None, label_loss: str, target: Tensor
) -> Tensor:
    """Losses of the groups (G,): their own, or equal shares of the one loss of what they say together."""
    if label_loss == "groups":
        return losses(y, target)
    together = y.mean(1, keepdim=True) if label_loss == "total" else _sum(y, a)
    groups = y.shape[1]
    return losses(together, target).expand(groups) / groups


def _sum(y: Tensor, a: Tensor | None) -> Tensor:
    return (y if a is None else y + a).sum(1, keepdim=True)


def _label_losses(criterion: Criterion, smoothing: float, logits: Tensor, target: Tensor) -> Tensor:
    """Loss of each of K sets of logits (B, K, C) against one target: (K,)."""
    if not isinstance(criterion, str):  # its reduction is its own business, so it sees one set at a time
        losses = [criterion(each.contiguous(), target) for each in logits.unbind(1)]
        if shape := tuple(losses[0].shape):
            raise ValueError(f"criterion returned shape {shape}; expected a scalar: give it reduction='mean'")
        return torch.stack(losses)
    B, K, C = logits.shape
    if criterion == "ce" and target.ndim == 1 and not smoothing:
        index = target[:, None, None].expand(B, K, 1)
        return -logits.log_softmax(-1).gather(2, index).mean((0, 2))
    if target.ndim == 1:
        off = smoothing / C
        target = torch.full_like(logits[:, 0], off).scatter(1, target[:, None], 1 - smoothing + off)
    target = target[:, None].expand(B, K, C)
    if criterion == "ce":
        return -(target * logits.log_softmax(-1)).sum(-1).mean(0)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean((0, 2))


def _divergences(log_teacher: Tensor, student: Tensor, reduction: str) -> Tensor:
    """KL(teacher || student) of log-probabilities (B, K or 1, C) and logits (B, K, C): (K,)."""
    B, _, C = student.shape
    log_student = student.log_softmax(-1)
    losses = F.kl_div(log_student, log_teacher.expand_as(log_student), reduction="none", log_target=True).sum((0, 2))
    return losses / (B if reduction == "batchmean" else B * C)


def _fields(group_logits: GroupLogits) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not hasattr(group_logits, "tokens"):
        tensor = isinstance(group_logits, Tensor)
        came = f"a tensor {tuple(group_logits.shape)}" if tensor else f"a {type(group_logits).__name__}"
        advice = "expected GroupLogits: call model(x, groups=True) or model.forward_groups(x)"
        raise ValueError(f"group_logits is {came}; {advice}")
    return group_logits.tokens, getattr(group_logits, "average", None), getattr(group_logits, "distill", None)


def _training_logits(group_logits: GroupLogits) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens, average and distill, in float32 at least."""
    tokens, average, distill = _fields(group_logits)
    if tokens is None:
        what = "group_logits.tokens is None: a light model answers, which only infers"
        raise ValueError(f"{what}; train it with light=False")
    shape = tuple(tokens.shape)
    if len(shape) != 3 or 0 in shape:
        expected = "expected (images, groups, classes), one at least of each"
        raise ValueError(f"group_logits.tokens has shape {shape}; {expected}")
    for name, logits in (("average", average), ("distill", distill)):
        if logits is not None and tuple(logits.shape) != shape:
            raise ValueError(f"group_logits.{name} has shape {tuple(logits.shape)}; expected that of tokens, {shape}")
    given = (tokens, average, distill)
    return tuple(x if x is None or x.dtype == torch.float64 else x.float() for x in given)  # ty: ignore[invalid-return-type]


def _checked_target(target: Tensor, logits: Tensor, criterion: Criterion) -> Tensor:
    """The target in the dtype that the losses want, for logits (B, G, C)."""
    B, _, C = logits.shape
    tensor = isinstance(target, Tensor)
    if not tensor or target.shape not in ((B,), (B, C)):
        came = f"has shape {tuple(target.shape)}" if tensor else f"is a {type(target).__name__}"
        raise ValueError(f"target {came}; expected a tensor of class indices ({B},) or soft targets ({B}, {C})")
    holds, numbers = str(target.dtype).removeprefix("torch."), target.is_floating_point()
    if target.ndim == 2:
        if not numbers:
            raise ValueError(f"target of shape ({B}, {C}) holds {holds}; soft targets are floats: pass target.float()")
        return target.to(logits.dtype)
    if numbers or target.dtype == torch.bool:
        expected = f"expected class indices: pass target.long(), or soft targets of shape ({B}, {C})"
        raise ValueError(f"target of shape ({B},) holds {holds}; {expected}")
    target = target.long()
    if target.device.type == "cpu" and runs_eagerly():  # an accelerator would have to be waited for, and asserts itself
        if isinstance(criterion, str):
            outside = (target < 0) | (target >= C)
        else:  # a negative index may be one that the criterion ignores
            outside = (target >= C) & (target != getattr(criterion, "ignore_index", -1))
        if outside.any():
            what = f"target holds class {target[outside][0].item()}; the model has {C} classes, expected 0 to {C - 1}"
            raise ValueError(f"{what}: correct the labels or build the model with more num_classes")
    return target


def _checked_teacher_logits(teacher_logits: Tensor, logits: Tensor) -> Tensor:
    B, _, C = logits.shape
    if not isinstance(teacher_logits, Tensor):
        kind = type(teacher_logits).__name__
        raise ValueError(f"the teacher returned a {kind}; expected logits ({B}, {C}): wrap it accordingly")
    shape = tuple(teacher_logits.shape)
    if len(shape) == 2 and shape[1] != C:
        raise ValueError(f"the teacher knows {shape[1]} classes, the student {C}; choose one of the same classes")
    if shape != (B, C):
        advice = "pass the images that the student saw"
        raise ValueError(f"the teacher's logits have shape {shape}; expected ({B}, {C}): {advice}")
    return teacher_logits.detach().to(logits.dtype)
