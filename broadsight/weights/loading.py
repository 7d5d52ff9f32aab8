"""Weights that a user gives for a model: a run's best ones, or a file of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .reading import check_stored, check_values, inside, read_file, weights_in


def load_given(model: Any, source: str | Path, *, other_classes: bool = False) -> None:
    """Load weights of the same model.

    Args:
        source: A run folder, or a file of weights: safetensors or one of torch's.
        other_classes: They may be of other classes, so that the model's own classifier stays where its shape differs;
            or of the model as it was before its pooling was swapped, which begins anew then.
    """
    weights = read_weights(source)
    if other_classes and _load_backbone(model, weights, source):
        return
    own, ends = model.state_dict(), model.pretrained_cfg.get("classifier") or ()
    ends = (ends,) if isinstance(ends, str) else tuple(ends)
    others = {name for name, value in weights.items() if name in own and own[name].shape != value.shape}
    replaced = {name for name in others if other_classes and any(name.startswith(f"{end}.") for end in ends)}
    missing, unexpected = own.keys() - weights.keys(), weights.keys() - own.keys()
    wrong = sorted(missing | unexpected | (others - replaced))
    if wrong:
        raise ValueError(
            f"{source} holds weights of another model: {len(missing)} missing, {len(unexpected)} unexpected, "
            f"{len(others - replaced)} of another shape, such as {wrong[0]}"
        )
    kept = {name: value for name, value in weights.items() if name not in replaced}
    check_values(kept, own, source)
    model.load_state_dict(kept, strict=False)


def read_weights(source: str | Path) -> Mapping[str, torch.Tensor]:
    """Tensors by name, from a run folder or a file."""
    path = Path(source)
    if path.is_dir():
        if not (path / "model.safetensors").is_file():
            raise FileNotFoundError(f"{source} holds no model.safetensors; give a run folder or a file of weights")
        path = inside(path, "model.safetensors")
    elif not path.is_file():
        raise FileNotFoundError(f"{source} is not a file; give a run folder or a file of weights")
    weights = weights_in(read_file(path))
    named = isinstance(weights, Mapping) and all(isinstance(name, str) for name in weights)
    if not named or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"{source} holds no weights; expected tensors by name")
    check_stored(weights, source, path.stat().st_size)
    return weights


def begin_dense(model: Any, source: str | Path) -> str:
    """Give a dense model the weights that it begins from: of a dense model on the same backbone, or of the backbone.

    Args:
        model: With `stages`.
        source: A run folder or a file; a classifier's is fine, whatever its pooling was.

    Returns:
        What was loaded, in words.
    """
    weights = read_weights(source)
    marker = "stages.network."
    if any(marker in name for name in weights):
        own = model.state_dict()
        fitting = {name: weights[name] for name in own if name in weights and weights[name].shape == own[name].shape}
        lost = [name for name in own if marker in name and name not in fitting]
        anew = len(own) - len(fitting)
        what = f"{len(fitting)} tensors of {source}" + (f"; {anew} of the model's own begin anew" if anew else "")
    else:
        model = model.stages.network
        own = model.state_dict()
        bare = {name.removeprefix("backbone."): value for name, value in weights.items()}  # below a swapped pooling
        given = weights if own.keys() <= weights.keys() else bare
        fitting = {name: given[name] for name in own if name in given and given[name].shape == own[name].shape}
        lost = [name for name in own if name not in fitting]
        what = f"the backbone of {source}"
    if lost:
        raise ValueError(f"{source} holds weights of another model: {len(lost)} do not fit, such as {lost[0]}")
    check_values(fitting, own, source)
    model.load_state_dict(fitting, strict=False)
    return what


def _load_backbone(model: Any, weights: Mapping[str, torch.Tensor], source: str | Path) -> bool:
    """Give the backbone under a swapped pooling its own weights, if these are, whatever came behind it."""
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, torch.nn.Module):
        return False
    left = backbone.state_dict()
    if any(name not in weights or weights[name].shape != value.shape for name, value in left.items()):
        return False
    kept = {name: weights[name] for name in left}
    check_values(kept, left, source)
    backbone.load_state_dict(kept)
    return True
