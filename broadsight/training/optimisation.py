"""What a recipe says of the optimiser, its schedule and averaged weights, given to timm's factories."""

from typing import Any

from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from ..errors import did_you_mean
from .recipes import Recipe


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """The recipe's optimiser; norms, biases and what the model names (`no_weight_decay`) are not decayed."""
    known = [str(name) for name in list_optimizers()]
    if recipe.optimizer.lower() not in known:
        hint = did_you_mean(recipe.optimizer, known, alike=0)
        raise ValueError(f"unknown optimizer {recipe.optimizer!r}; {hint}timm.optim.list_optimizers() lists all")
    own = {name: getattr(recipe, name) for name in ("momentum", "betas", "eps") if getattr(recipe, name) is not None}
    info = get_optimizer_info(recipe.optimizer.lower())
    for name in own:  # timm would leave them out without a word
        if not getattr(info, f"has_{name}"):
            raise ValueError(f"optimizer {recipe.optimizer}: it has no {name}; leave {name} out, or choose another")
    momentum = {"momentum": own.pop("momentum")} if "momentum" in own else {}
    try:
        return create_optimizer_v2(
            model,
            opt=recipe.optimizer,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            layer_decay=recipe.layer_decay,
            **momentum,
            **own,
        )
    except TypeError as error:
        raise ValueError(f"optimizer {recipe.optimizer}: {str(error).splitlines()[0]}") from None


def make_scheduler(optimizer: Optimizer, recipe: Recipe, updates_per_epoch: int) -> Scheduler:
    """Warm-up, then as the recipe says; set by the number of updates made, so it has no memory of its own."""
    # timm looks one update ahead; a half in between leaves no doubt about which update is meant
    updates = [round(part * recipe.epochs * updates_per_epoch) + 0.5 for part in recipe.milestones]
    milestones = [update / updates_per_epoch for update in updates]
    options: dict[str, Any] = {
        "cosine": dict(sched="cosine"),
        "constant": dict(sched="step", decay_epochs=10**9),
        "step": dict(sched="multistep", decay_milestones=milestones, decay_rate=0.1),
        "poly": dict(sched="poly", decay_rate=recipe.power),
    }[recipe.schedule]
    options["warmup_epochs"] = recipe.warmup_epochs
    scheduler, _ = create_scheduler_v2(
        optimizer,
        num_epochs=recipe.epochs,
        cooldown_epochs=recipe.cooldown_epochs,
        min_lr=recipe.min_lr,
        warmup_lr=recipe.warmup_lr,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
        **options,
    )
    return scheduler


def make_average(model: nn.Module, recipe: Recipe) -> ModelEmaV3 | None:
    """The moving average of the weights, if the recipe has one."""
    return ModelEmaV3(model, decay=recipe.ema, use_warmup=recipe.ema_warmup) if recipe.ema else None
