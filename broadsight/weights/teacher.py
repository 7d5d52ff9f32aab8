"""Teachers for distillation: a model as it is, a timm name, or a run folder."""

from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from ..errors import did_you_mean
from ..models.from_run import read_config, stored_model
from .loading import load_given


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
