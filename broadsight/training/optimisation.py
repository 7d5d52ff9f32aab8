"""The optimiser, schedule and averaged weights of a recipe, made by timm's factories."""

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
    if recipe.optimizer.lower() not in list_optimizers():
        hint = did_you_mean(recipe.optimizer, map(str, list_optimizers()), alike=0)
        raise ValueError(f"unknown optimizer {recipe.optimizer!r}; {hint}timm.optim.list_optimizers() lists all")
    given = ((name, getattr(recipe, name)) for name in ("momentum", "betas", "eps"))
    own: dict[str, Any] = {name: value for name, value in given if value is not None}
    info = get_optimizer_info(recipe.optimizer.lower())
    for name in own:  # timm would leave them out without a word
        if not getattr(info, f"has_{name}"):
            raise ValueError(f"optimizer {recipe.optimizer}: it has no {name}; leave {name} out, or choose another")
    own |= dict(lr=recipe.lr, weight_decay=recipe.weight_decay, layer_decay=recipe.layer_decay)
    try:
        return create_optimizer_v2(model, opt=recipe.optimizer, **own)
    except TypeError as error:
        raise ValueError(f"optimizer {recipe.optimizer}: {str(error).splitlines()[0]}") from None


def make_scheduler(optimizer: Optimizer, recipe: Recipe, updates_per_epoch: int) -> Scheduler:
    """Warm-up, then the recipe's schedule; the number of updates alone decides the rate."""
    # timm looks one update ahead; half an update makes clear which one is meant
    updates = [round(part * recipe.epochs * updates_per_epoch) + 0.5 for part in recipe.milestones]
    milestones = [update / updates_per_epoch for update in updates]
    kinds: dict[str, Any] = dict(cosine=dict(sched="cosine"), constant=dict(sched="step", decay_epochs=10**9))
    kinds["step"] = dict(sched="multistep", decay_milestones=milestones, decay_rate=0.1)
    kinds["poly"] = dict(sched="poly", decay_rate=recipe.power)
    options = kinds[recipe.schedule]
    options |= {name: getattr(recipe, name) for name in ("warmup_epochs", "cooldown_epochs", "min_lr", "warmup_lr")}
    options |= dict(num_epochs=recipe.epochs, step_on_epochs=False, updates_per_epoch=updates_per_epoch)
    return create_scheduler_v2(optimizer, **options)[0]


def make_average(model: nn.Module, recipe: Recipe) -> ModelEmaV3 | None:
    """The moving average of the weights, if the recipe has one."""
    return ModelEmaV3(model, decay=recipe.ema, use_warmup=recipe.ema_warmup) if recipe.ema else None
