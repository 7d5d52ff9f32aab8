"""How a model is described, to be made again: a name and arguments, which timm keeps, or why there are none.

An edited model is called "edited", its arguments are those of `models.edited.edit`, which raises such a reason.
"""

import json
from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import nn

from ..errors import first_line

EDITED = "edited"
# In a stored description these would fetch or read something else than the folder, or are the loader's to decide.
FORBIDDEN = {"cache_dir", "checkpoint_path", "device", "dtype", "file", "hf_hub_id", "state_dict", "url"}
FORBIDDEN |= {f"pretrained{what}" for what in ("", "_backbone", "_cfg", "_cfg_overlay", "_model_args")}


class Undescribed(ValueError):
    """A model that cannot be made again from a name and arguments."""


def description_of(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """timm's name of a model, and the arguments that make it as it is now, or Undescribed with the reason."""
    described = getattr(model, "pretrained_cfg", None) or {}
    name = described.get("architecture")
    if not name or not timm.is_model(name):
        raise Undescribed(f"{type(model).__name__} is not a model that timm makes by a name")
    arguments = {**getattr(model, "_model_args", {}), **_current(model)}
    if "undescribed" in arguments:
        raise Undescribed(arguments["undescribed"])
    if arguments.get("features_only"):
        raise Undescribed(f"{name} was created with features_only=True and gives no classes")
    if not hasattr(model, "_model_args"):  # not made by timm.create_model
        try:
            with torch.device("meta"):
                different = difference(model, timm.create_model(name, **arguments))
        except Exception as error:
            different = first_line(error)
        if different:
            raise Undescribed(f"how {name} was created is not known ({different}); create it by timm.create_model")
    return name, arguments


def as_edited(model: nn.Module) -> dict[str, Any]:
    """Arguments of `edited` that make a model as it is now, or the reason why there are none."""
    try:
        name, arguments = description_of(model)
    except Undescribed as error:
        return {"undescribed": str(error)}
    return arguments if name == EDITED else {"backbone": name, **arguments, "any_size": False}


def describe_edited(model: Any, arguments: Mapping[str, Any]) -> None:
    """Let a model say that it is an edited one, with these arguments, to whoever saves it."""
    own = {k: v for k, v in (getattr(model, "pretrained_cfg", None) or {}).items() if k not in ("tag", "custom_load")}
    model.pretrained_cfg = model.default_cfg = {**own, "architecture": EDITED}
    model._model_args = dict(arguments)


def undescribe(model: Any, reason: str) -> None:
    """Let a model say that it cannot be made again; nothing to do for one that nobody could save by name."""
    if (getattr(model, "pretrained_cfg", None) or {}).get("architecture"):
        describe_edited(model, {"undescribed": reason})


def refuse_undescribed(arguments: Mapping[str, Any]) -> None:
    """Refuse to make a model whose description says why it cannot be made again; a ValueError with that reason."""
    if reason := arguments.get("undescribed"):
        raise ValueError(f"the saved model cannot be made again: {' '.join(str(reason).split())[:500]}")


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as JSON keeps them; refuses those that it cannot, which are classes and functions."""
    for key, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            hint = "give timm a name for it, such as 'relu' for ReLU"
            raise Undescribed(f"its argument {key}={value!r} cannot be written down; {hint}") from None
    return json.loads(json.dumps(dict(arguments)))


def difference(model: nn.Module, other: nn.Module) -> str:
    """The first difference between the modules and tensors of two models, in words; empty if there is none."""

    def parts(model: nn.Module) -> tuple[dict[str, Any], ...]:
        modules = {name: f"{type(one).__name__}({one.extra_repr()})" for name, one in model.named_modules()}
        return modules, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    for ours, theirs in zip(parts(model), parts(other), strict=True):
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                return f"{name or 'it'} is {ours.get(name, 'missing')}, expected {theirs.get(name, 'nothing there')}"
    return ""


def _current(model: Any) -> dict[str, Any]:
    """What may have changed since the model was made, by `reset_classifier` or `set_input_size`."""
    current = {k: getattr(model, k) for k in ("num_classes", "in_chans") if isinstance(getattr(model, k, None), int)}
    size = getattr(model, "_traits", {}).get("img_size")
    if not hasattr(model, "_traits"):  # an older timm does not note it
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size:
        current["img_size"] = tuple(size)
    head = getattr(model, "head", None)
    for place, name in ((head, "global_pool"), (head, "pool_type"), (model, "global_pool")):
        pool = getattr(place, name, None)
        pool = getattr(pool, "pool_type", pool)
        if isinstance(pool, str):
            return current | {"global_pool": pool}
    return current
