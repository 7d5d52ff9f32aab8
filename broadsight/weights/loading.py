"""Weights that a user gives for a model, a run's best ones or a file of them; and models that teach others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..errors import did_you_mean
from ..layers import PoolNeck
from ..models.from_run import read_config, stored_model
from .reading import check_values, inside
from .reading import read_weights as read_tensors

BACKBONE = "stages.network."  # in the names of a dense model's weights


def read_weights(source: str | Path) -> Mapping[str, Tensor]:
    """Tensors by name, from a run folder or a file."""
    path, folder = Path(source), Path(source).is_dir()
    if not (path / "model.safetensors" if folder else path).is_file():
        fault = "holds no model.safetensors" if folder else "is not a file"
        raise FileNotFoundError(f"{source} {fault}; give a run folder or a file of weights")
    return read_tensors(inside(path, "model.safetensors") if folder else path)


def load_given(model: Any, source: str | Path, *, other_classes: bool = False) -> None:
    """Load weights of the same model, from a run folder or a file.

    Those of `other_classes` leave the classifier as it is where its shape differs; those of the model before its
    pooling was swapped leave the pooling.
    """
    weights = read_weights(source)
    backbone = getattr(model, "backbone", None)
    if other_classes and isinstance(backbone, nn.Module):
        left = backbone.state_dict()
        if len(kept := _fitting(weights, left)) == len(left):
            _load(backbone, kept, source)
            return
    own, ends = model.state_dict(), model.pretrained_cfg.get("classifier") or ()
    ends = tuple(f"{end}." for end in ((ends,) if isinstance(ends, str) else ends))
    others = {name for name, value in weights.items() if name in own and own[name].shape != value.shape}
    replaced = {name for name in others if other_classes and name.startswith(ends)}
    missing, unexpected = own.keys() - weights.keys(), weights.keys() - own.keys()
    wrong = sorted(missing | unexpected | (others - replaced))
    if wrong:
        counts = f"{len(missing)} missing, {len(unexpected)} unexpected, {len(others - replaced)} of another shape"
        raise ValueError(f"{source} holds weights of another model: {counts}, such as {wrong[0]}")
    _load(model, {name: value for name, value in weights.items() if name not in replaced}, source)


def begin_dense(model: Any, source: str | Path) -> str:
    """Give a dense model the weights of one on the same backbone or of a classifier; what was loaded, in words."""
    weights, stages = read_weights(source), model.stages
    if not any(BACKBONE in name for name in weights):
        pool = stages.neck.pool if isinstance(stages.neck, PoolNeck) else None
        return _begin_from_classifier(stages.network, pool, weights, source)
    own = model.state_dict()
    fitting = _fitting(weights, own)
    _refuse_lost([name for name in own if name not in fitting and BACKBONE in name], source)
    _load(model, fitting, source)
    anew = len(own) - len(fitting)
    return f"{len(fitting)} tensors of {source}" + (f"; {anew} of the model's own begin anew" if anew else "")


def _begin_from_classifier(
    backbone: nn.Module, pool: nn.Module | None, weights: Mapping[str, Tensor], source: str | Path
) -> str:
    """Give a backbone, and the pool that its neck keeps, the weights of a classifier; what was loaded, in words."""
    own, below = backbone.state_dict(), {}
    if not own.keys() <= weights.keys():  # below a swapped pooling
        below = {name.removeprefix("head."): value for name, value in weights.items() if name.startswith("head.")}
        weights = {name.removeprefix("backbone."): value for name, value in weights.items()}
    fitting = _fitting(weights, own)
    _refuse_lost([name for name in own if name not in fitting], source)
    wanted = pool.state_dict() if pool is not None and below else {}
    kept = _fitting(below, wanted)
    if lost := [name for name in wanted if name not in kept]:
        what = f"{source} holds weights of another pool: {len(lost)} do not fit, such as head.{lost[0]}"
        raise ValueError(f"{what}; give --pool and --pool-args as it was trained with")
    _load(backbone, fitting, source)
    if pool is None or not kept:
        return f"the backbone of {source}" + ("" if pool is None else "; the pool begins anew")
    _load(pool, kept, source)
    return f"the backbone and pool of {source}"


def _refuse_lost(lost: Sequence[str], source: str | Path) -> None:
    """Refuse weights that lack some of a model's."""
    if lost:
        raise ValueError(f"{source} holds weights of another model: {len(lost)} do not fit, such as {lost[0]}")


def _fitting(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the weights those with a name and shape of the model's own."""
    return {name: weights[name] for name in own if name in weights and weights[name].shape == own[name].shape}


def _load(model: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    check_values(weights, model.state_dict(), source)
    model.load_state_dict(weights, strict=False)


def load_teacher(teacher: nn.Module | str | Path, pretrained: bool = True) -> nn.Module:
    """A model as it is, or that of a timm name or run folder, with its weights."""
    if isinstance(teacher, nn.Module):
        return teacher
    if not isinstance(teacher, (str, Path)):
        raise ValueError(f"teacher is a {type(teacher).__name__}; expected a model, a timm name or a run folder")
    name = str(teacher)
    if isinstance(teacher, str) and (timm.is_model(name) or name.startswith("hf-hub:")):
        return timm.create_model(name, pretrained=pretrained)
    folder = Path(name.removeprefix("local-dir:"))
    if (folder / "config.json").is_file():
        model = stored_model(read_config(folder), folder)
        if pretrained:
            load_given(model, folder)
        return model
    if folder.is_dir():
        expected = "expected a run folder: config.json, model.safetensors"
        raise ValueError(f"teacher folder {name} has no config.json; {expected}")
    hint = did_you_mean(name, timm.list_models()).strip() or "timm.list_models() lists the names"
    raise ValueError(f"teacher {name!r} is neither a model of timm nor a run folder; {hint}")


def renormalization(
    normalization: tuple[Sequence[float], Sequence[float]] | None, teacher: nn.Module | None
) -> tuple[Tensor | None, Tensor | None]:
    """Scale and shift (channels, 1, 1) from the images' normalisation to the teacher's own."""
    if normalization is None:
        return None, None
    config = getattr(teacher, "pretrained_cfg", None) or {}
    if "mean" not in config or "std" not in config:
        what = "normalization is given but the teacher has no pretrained_cfg with mean and std"
        raise ValueError(f"{what}; normalise in the teacher")
    mean, std = (torch.tensor(values)[:, None, None] for values in normalization)
    own_mean, own_std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    return std / own_std, (mean - own_mean) / own_std
