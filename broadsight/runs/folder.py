"""Saves a classifier as a folder that timm, Hugging Face's transformers and this package load; and loads it."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import first_line
from ..files import whole_folder, write_text
from ..models.from_run import stored_model
from ..surgery.description import Undescribed, description_of, difference, plain_arguments
from ..training.run_folder import CONFIG, WEIGHTS, RunFolder
from ..weights.loading import load_given, read_weights
from ..weights.writing import write_weights

# Of timm's `pretrained_cfg`: how images reach the model and where its ends are, but no sources of weights.
KEPT = ("input_size", "test_input_size", "min_input_size", "fixed_input_size", "interpolation", "crop_pct")
KEPT += ("test_crop_pct", "crop_mode", "mean", "std", "pool_size", "first_conv", "classifier", "license")
DENSE = "dense_model"
LABELS = ("label_names", "label_descriptions")


def save(model: nn.Module, folder: str | Path, *, labels: Sequence[str] | None = None) -> Path:
    """Write a classifier into a new folder: whole, or nothing; a ValueError if its description makes another model.

    Args:
        model: timm's, ours, or one of these after `swap_pool`, `add_context_broadcast`, `reset_classifier`, `lighten`.
        folder: Where; it does not exist yet, or is empty.
        labels: Names of the classes, for `predict` and others; by default those that `pretrained_cfg` has.
    """
    folder = Path(folder)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; expected a model, as timm.create_model gives")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already and not empty; give a folder that is not")
    try:
        name, arguments = description_of(model)
        arguments = plain_arguments(arguments)
    except Undescribed as error:
        raise ValueError(f"the model cannot be saved by name: {error}; or keep its state_dict()") from None
    if name == DENSE:
        what = f"{type(model).__name__} is a dense model, which its run folder keeps"
        raise ValueError(f"{what}; here only classifiers are saved")
    config = _config(model, name, arguments, labels)
    _check_true(model, config, folder)
    with whole_folder(folder, durable=True) as unfinished:
        write_weights(model, unfinished / WEIGHTS)
        write_text(json.dumps(config, indent=2) + "\n", unfinished / CONFIG)
    return folder


def load(folder: str | Path) -> nn.Module:
    """The classifier of a folder that `save`, `broadsight train` or timm has written, in eval mode on the CPU.

    Nothing but this folder is read, nothing is unpickled, and weights have the precision that they were saved in.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; give one that broadsight.save has written")
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder} holds no {file}; give a folder that broadsight.save has written")
    config = RunFolder(folder).config()
    about = config.get("broadsight")
    task = about.get("task", "classify") if isinstance(about, Mapping) else "classify"
    if config.get("architecture") == DENSE or task != "classify":
        what = f"{folder} holds a dense model, which finds more than classes"
        raise ValueError(f"{what}; open its run: broadsight predict {folder}")
    RunFolder(folder).check_weights(config)
    weights = read_weights(folder)
    model = _made(config, folder, sum(tensor.numel() for tensor in weights.values()))
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        model.to(dtype=kinds.pop())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in weights and tensor.dtype != weights[name].dtype:
            tensor.data = tensor.data.to(weights[name].dtype)
    load_given(model, folder)
    return model.eval()


def _config(model: Any, name: str, arguments: dict[str, Any], labels: Sequence[str] | None) -> dict[str, Any]:
    """The content of config.json, as timm writes it."""
    own: Mapping[str, Any] = model.pretrained_cfg
    classes = getattr(model, "num_classes", None)
    if not isinstance(classes, int):
        raise ValueError(f"{type(model).__name__} has no num_classes; only classifiers are saved by name")
    if labels is not None and len(labels) != classes:
        raise ValueError(f"{len(labels)} labels for a model of {classes} classes; give one for each")
    described = {key: own[key] for key in KEPT if own.get(key) is not None}
    traits = getattr(model, "_traits", {})
    channels, height, width = own.get("input_size", (3, 224, 224))
    height, width = traits.get("img_size") or (height, width)
    described["input_size"] = [arguments.get("in_chans", channels), height, width]
    described["fixed_input_size"] = bool(traits.get("fixed_input_size", own.get("fixed_input_size", False)))
    described["num_classes"] = classes
    config: dict[str, Any] = {"architecture": name, "num_classes": classes, "num_features": model.num_features}
    named = {"label_names": list(labels)} if labels is not None else {key: own[key] for key in LABELS if own.get(key)}
    if labels is not None or len(named.get("label_names", ())) == classes:
        config |= named
    # Of all arguments this one has its own place, and transformers would give it twice.
    config["model_args"] = {key: value for key, value in arguments.items() if key != "num_classes"}
    return json.loads(json.dumps({**config, "pretrained_cfg": described}))


def _made(config: Mapping[str, Any], folder: Path, numbers: int) -> Any:
    """The model that a folder describes, with random weights; as large as the `numbers` that it stores, or refused."""
    if not isinstance(config.get("pretrained_cfg"), Mapping):
        raise ValueError(f"{folder / CONFIG} has no pretrained_cfg; expected what broadsight.save or timm has written")
    try:
        with torch.random.fork_rng(devices=[]):  # what is drawn here is thrown away
            return stored_model(config, folder, numbers)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _check_true(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model that its description does not make again: other layers, other tensors, or another answer."""
    blank = next((name for name, tensor in model.state_dict().items() if tensor.is_meta), None)
    if blank:
        raise ValueError(f"the model has no weights: {blank} is on the meta device; load some first")
    made = _made(config, folder, sum(tensor.numel() for tensor in model.state_dict().values()))
    found = difference(model, made)
    if not found and not _answers_alike(model, made, config["pretrained_cfg"]["input_size"]):
        found = "all its layers are there, but it answers otherwise"
    if found:
        hint = "save one that swap_pool, add_context_broadcast or timm have made and nobody has changed by hand"
        raise ValueError(f"the model is not what its description makes ({found}); {hint}, or keep its state_dict()")


def _answers_alike(model: nn.Module, made: nn.Module, shape: Sequence[int]) -> bool:
    """Whether two models of the same tensors give the same for one image; `made` is of no use afterwards."""
    copy, generator = deepcopy(model).cpu().float().eval(), torch.Generator().manual_seed(0)
    weights = copy.state_dict()
    # with noise, or a layer that is scaled by almost nothing, or a classifier that begins at zero, would not show
    for name in weights.keys() & {name for name, _ in copy.named_parameters()}:
        noise = 0.02 * torch.randn(weights[name].shape, generator=generator)
        weights[name] = weights[name].nan_to_num(0.0, 0.0, 0.0) + noise
    images = torch.rand(1, *shape, generator=generator)
    answers = []
    for one in (copy, made.float().eval()):
        one.load_state_dict(weights)
        try:
            with torch.inference_mode():
                answers.append(one(images))
        except Exception as error:
            raise ValueError(f"the model does not take an image of {tuple(shape)}: {first_line(error)}") from None
    ours, theirs = answers
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor) or ours.shape != theirs.shape:
        return False
    return bool((ours - theirs).abs().amax() <= 1e-4 * ours.abs().amax())
