"""What a step computes, as timm's training tasks do: images and labels or soft targets -> "loss", "output", parts."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.task import ClassificationTask, LogitDistillationTask, TokenDistillationTask, TrainingTask
from torch import Tensor, nn

from ...errors import first_line
from ...losses import MultiTokenDistillationLoss, MultiTokenLoss, aggregate
from ...weights.loading import load_teacher
from ..recipes import Recipe

# Fields of a recipe that are options of MultiTokenLoss.
OF_GROUPS = ("intra", "inter", "label_loss", "intra_direction", "inter_target", "reduction", "stop_gradient")


def make_task(model: nn.Module, plain: nn.Module, recipe: Recipe, device: torch.device) -> TrainingTask:
    """The task of a recipe, for a model as it is called in training, and without what wraps it."""
    groups, criterion = getattr(plain, "has_groups", False), LabelLoss(recipe.loss, recipe.smoothing)
    common: dict[str, Any] = dict(criterion=criterion, device=device, verbose=False)
    if recipe.distill == "none":
        return MultiTokenTask(model, recipe, device) if groups else ClassificationTask(model, **common)
    teacher, config = _teacher(recipe, plain).to(device), cast(Any, plain.pretrained_cfg)
    if groups:
        return MultiTokenTask(model, recipe, device, teacher=teacher, normalization=(config["mean"], config["std"]))
    common |= dict(temperature=recipe.temperature, task_loss_weight=1 - recipe.alpha)
    if not hasattr(plain, "set_distilled_training"):
        return (LogitDistillationTask if recipe.distill == "soft" else HardDistillationTask)(model, teacher, **common)
    if recipe.frozen_stats:
        raise ValueError("frozen_stats=true with a distillation token, which only answers in training; set it false")
    return TokenDistillationTask(model, teacher, distill_type=recipe.distill, **common)


class LabelLoss(nn.Module):
    """Loss of logits (B, C) against labels (B,), which are smoothed, or soft targets (B, C), which are not."""

    def __init__(self, kind: str, smoothing: float):
        super().__init__()
        self.hard = BinaryCrossEntropy(smoothing) if kind == "bce" else nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.soft = self.hard if kind == "bce" else SoftTargetCrossEntropy()

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.hard(logits, target) if target.ndim == 1 else self.soft(logits, target)


class MultiTokenTask(TrainingTask):
    """A model with groups of tokens and its loss; with a `teacher`, one that has distillation tokens."""

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device, **teacher: Any):
        super().__init__(device=device, verbose=False)
        self.trainable_module = model
        options: dict[str, Any] = {name: getattr(recipe, name) for name in OF_GROUPS}
        options |= dict(reading=recipe.loss_reading, smoothing=recipe.smoothing)
        if teacher:
            options |= dict(alpha=recipe.alpha, kind=recipe.distill, temperature=recipe.temperature, **teacher)
        kind = MultiTokenDistillationLoss if teacher else MultiTokenLoss
        self.criterion = kind(recipe.loss, **options).to(device)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        groups = self.trainable_module(input, groups=True)
        loss = self.criterion
        parts = loss.parts(groups, target) if isinstance(loss, MultiTokenLoss) else loss.parts(input, groups, target)
        shares = {name: value for name, value in parts.items() if value.ndim == 0 and name != "total"}
        return {"loss": parts["total"], "output": aggregate(groups), **shares}


class HardDistillationTask(LogitDistillationTask):
    """A model without distillation tokens learns the label, and the class that its teacher names."""

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.trainable_module(input)
        with torch.no_grad():
            seen = self.teacher.normalize_input(input, self.student_mean, self.student_std)  # ty: ignore[invalid-argument-type]
            named = self.teacher(seen, return_features=False).argmax(-1)
        label, taught = self.criterion(logits, target), F.cross_entropy(logits, named)
        total = self.task_loss_weight * label + self.distill_loss_weight * taught
        return {"loss": total, "output": logits, "task_loss": label, "kd_loss": taught}


def _teacher(recipe: Recipe, student: Any) -> nn.Module:
    name = recipe.teacher or ""
    try:
        teacher = load_teacher(name)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the weights of teacher {name!r} cannot be loaded: {first_line(error)}") from None
    classes, expected = getattr(teacher, "num_classes", None), student.num_classes
    if classes != expected:
        what = f"teacher {name!r} knows {classes} classes, the data has {expected}"
        raise ValueError(f"{what}; train a teacher on this data first")
    return teacher.requires_grad_(False).eval()
