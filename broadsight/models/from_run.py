"""What a folder says of its model, looked at before anything is made of it: a stranger may have written it.

A folder gives a registered name and plain arguments. Nothing that it says makes timm ask the hub or read a file.
"""

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from ..errors import did_you_mean, first_line
from ..surgery.description import FORBIDDEN, refuse_undescribed
from ..weights.reading import inside

CONFIG = "config.json"
LARGEST = 2**26  # bytes of a description: 64 MiB, a thousand times what a run of ImageNet's classes has
DEEPEST, LONGEST, WIDEST = 8, 512, 2**16  # of arguments: dicts and lists in each other, entries, whole numbers
MOST_LAYERS = 256  # each takes time to make
MOST_CLASSES, MOST_CHANNELS, MOST_PIXELS = 10**6, 1024, 2**16
LONGEST_LABEL = 1000  # characters of the name of a class
COUNTED = re.compile(r"depth|layer|block|stage|repeat|num_units")
NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?")

# What says where weights come from, or makes something else of a model than itself, at whatever depth it is said.
SOURCES = {*FORBIDDEN, "hf_hub_filename", "source", "custom_load", "weights", "weights_backbone"}
# What families take out of their keywords without naming it.
FURTHER = {"num_classes", "in_chans", "img_size", "global_pool", "drop_rate", "drop_path_rate", "use_naflex", "pruned"}
FURTHER |= {"bn_momentum", "bn_eps", "bn_tf", "pad_type", "drop_connect_rate", "act_layer", "norm_layer", "patch_size"}
FURTHER |= {"dynamic_img_size", "dynamic_img_pad", "strict_img_size", "window_size"}
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "lanczos3", "box", "hamming", "random")


def read_config(folder: str | Path, end: str = "give another run") -> dict[str, Any]:
    """config.json of a folder; a ValueError that ends in `end` if it is too large, damaged or says things twice."""
    file = inside(folder, CONFIG)
    if (size := file.stat().st_size) > LARGEST:
        raise ValueError(f"{file} has {size:,} bytes; expected a description of a run, {LARGEST:,} at most")
    try:
        found = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (RecursionError, ValueError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise ValueError(f"{file} is damaged ({why}); {end}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} describes no model; give the folder that train wrote")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it says {_short(twice)} twice")
    return found


def stored_model(config: Mapping[str, Any], origin: str | Path, numbers: int | None = None) -> nn.Module:
    """The model that a folder describes, without its weights; a ValueError if it is none, or far beyond its numbers."""
    where = f"{Path(origin) / CONFIG}"
    name, arguments = model_name(config.get("architecture"), where), config.get("model_args") or {}
    check_arguments(name, arguments, where)
    options: dict[str, Any] = dict(pretrained=False, pretrained_cfg=described_as(config, where))
    options |= {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    try:
        if numbers is not None:
            refuse_large(lambda: timm.create_model(name, **options), numbers, where)
        return timm.create_model(name, **options)
    except ValueError:
        raise
    except Exception as error:
        raise RuntimeError(f"the model of {origin} cannot be made: {first_line(error)}") from None


def model_name(name: Any, where: str) -> str:
    """The name itself if it is registered; raises ValueError for others, such as a place on the hub or in a folder."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or not timm.is_model(name.split(".")[0]):
        raise ValueError(f"{where} names the model {_short(name)}; expected the name of a model that timm knows")
    return name


def check_arguments(name: str, arguments: Any, where: str) -> None:
    """Raise a ValueError for arguments that this model, or the one below it, does not have, or that load anything."""
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where} gives the model {_short(arguments)}; expected arguments by name")
    refuse_undescribed(arguments)
    check_values(arguments, where)
    names, below = [name], arguments.get("backbone")
    if below is not None:
        names.append(model_name(below, where))
        check_arguments(below, arguments.get("backbone_args") or {}, where)
    for key in arguments:
        if not any(key in _known(one) or key in _known_to_its_class(one) for one in names):
            near = did_you_mean(key, frozenset().union(*(_known(one) | _known_to_its_class(one) for one in names)), 0.7)
            hint = f"; {near.strip()}" if near else ""
            raise ValueError(f"{where} gives the model {name} an argument {_short(key)}, which it has not{hint}")


def check_stored(arguments: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError if what timm read in a folder names the model below by a place, or would load something."""
    refuse_undescribed(arguments)
    own = {key: value for key, value in arguments.items() if key not in _refused() or key == "checkpoint_path"}
    if not isinstance(arguments.get("backbone", ""), nn.Module):
        if arguments.get("backbone"):
            model_name(arguments["backbone"], name)
        check_values({key: value for key, value in own.items() if not callable(value)}, name)


def check_values(values: Any, where: str, key: str = "model_args", depth: int = 0) -> None:
    """Raise a ValueError for values that are not plain and small, and names of what loads something, however deep."""
    if isinstance(values, Mapping | list | tuple):
        if depth > DEEPEST or len(values) > LONGEST:
            raise ValueError(f"{where} gives {key} more than {LONGEST} entries, or {DEEPEST} levels of them")
        for name, value in values.items() if isinstance(values, Mapping) else ((key, value) for value in values):
            if not isinstance(name, str) or name in _refused():
                raise ValueError(f"{where} gives the model {_short(name)}, which a stored model may not say")
            check_values(value, where, name, depth + 1)
    elif isinstance(values, str):
        if len(values) > 100 or not values.isprintable() or any(letter in values for letter in ":/\\"):
            raise _wrong(where, key, values, "a name, not a place")
    elif _is_number(values):
        most = MOST_CLASSES if key == "num_classes" else MOST_LAYERS if COUNTED.search(key) else WIDEST
        if not math.isfinite(values) or (isinstance(values, int) and abs(values) > most):
            raise _wrong(where, key, values, f"{most:,} at most")
    elif values is not None and not isinstance(values, bool):
        raise _wrong(where, key, values, "a plain value")


@cache
def _refused() -> frozenset[str]:
    """What timm's factory and builder take for themselves."""
    takers: tuple[Any, ...] = (timm.create_model, timm.models.build_model_with_cfg, timm.models.load_pretrained)
    names = {name for taker in takers for name in inspect.signature(taker).parameters}
    further = {"features_only", "feature_cls", "out_indices", "pretrained_model_args", "feature_cfg"}
    return frozenset((names | further | SOURCES) - {"kwargs", "model", "num_classes", "in_chans"})


@cache
def _known(name: str) -> frozenset[str]:
    """Arguments of everything that the file of a registered model makes it from."""
    file = sys.modules[timm.models.model_entrypoint(name.split(".")[0]).__module__]
    roots = {"timm", "broadsight", file.__name__.split(".")[0]}
    found = [value for value in vars(file).values() if isinstance(value, type) or inspect.isfunction(value)]
    ours = [value for value in found if (getattr(value, "__module__", None) or "").split(".")[0] in roots]
    return frozenset((_parameters(ours) | FURTHER) - _refused())


@cache
def _known_to_its_class(name: str) -> frozenset[str]:
    """Arguments of the class that a registered model is of, and of its backbone's, to which its file passes them on."""
    try:
        with torch.device("meta"):
            model = timm.create_model(name.split(".")[0])
    except Exception:
        return frozenset()
    own = [type(part) for part in (model, getattr(model, "backbone", None)) if isinstance(part, nn.Module)]
    return frozenset(_parameters(own) - _refused())


def _parameters(takers: Iterable[Any]) -> set[str]:
    """Names of the arguments of functions, and of classes and what they inherit from."""
    found: set[str] = set()
    for taker in takers:
        for kind in taker.__mro__ if isinstance(taker, type) else [taker]:
            with suppress(TypeError, ValueError):
                found.update(inspect.signature(kind).parameters)
    return found


def described_as(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """How images are prepared, from timm's description of weights; where weights come from is left out."""
    said = config.get("pretrained_cfg", config)
    if not isinstance(said, Mapping):
        raise _wrong(where, "pretrained_cfg", said, "a description by name")
    found = {key: read(said[key], key, where) for key, read in READERS.items() if said.get(key) is not None}
    classes = config.get("num_classes", said.get("num_classes"))
    if classes is not None:
        found["num_classes"] = _count(classes, "num_classes", where, MOST_CLASSES)
    labels, words = label_names(config, where), config.get("label_descriptions")
    if labels is None:
        return found
    if isinstance(words, Mapping) and set(words) <= set(labels):
        found["label_descriptions"] = {name: str(words[name])[:LONGEST_LABEL] for name in words}
    return found | {"label_names": labels}


def label_names(config: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    """Names of the classes, if the folder has some; raises ValueError if they are no names."""
    if (labels := config.get("label_names")) is None:
        return None
    wrong = not isinstance(labels, list) or len(labels) > MOST_CLASSES
    if wrong or not all(isinstance(name, str | int | float) and len(str(name)) <= LONGEST_LABEL for name in labels):
        raise _wrong(where, "label_names", labels, "a list of names")
    return tuple(map(str, labels))


def refuse_large(make: Callable[[], nn.Module], numbers: int, where: str) -> None:
    """Refuse a model that would take far more memory than its weights do, which is wrong however it came."""
    try:
        with torch.device("meta"):
            model = make()
    except Exception:
        return  # not all can be made so; those that cannot be made at all are refused by whoever makes them
    wanted = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if wanted > 4 * numbers + 2**24:
        raise ValueError(f"{where} describes a model of {wanted:,} numbers, its weights have {numbers:,}: not its own")


def _count(value: Any, key: str, where: str, most: int, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(where, key, value, f"a whole number from {least} to {most:,}")
    return value


def _sizes(value: Any, key: str, where: str) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    if not 1 <= len(values) <= 3:
        raise _wrong(where, key, value, "channels, height and width")
    limits = MOST_CHANNELS if len(values) == 3 else MOST_PIXELS, MOST_PIXELS, MOST_PIXELS
    return tuple(_count(one, key, where, most, least=1) for one, most in zip(values, limits, strict=False))


def _numbers(values: Any, key: str, where: str, expected="finite numbers", least=-math.inf) -> tuple[float, ...]:
    fine = isinstance(values, list | tuple) and 0 < len(values) <= MOST_CHANNELS
    if not fine or not all(_is_number(one) and math.isfinite(one) and least <= one for one in values):
        raise _wrong(where, key, values, expected)
    return tuple(map(float, values))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fraction(value: Any, key: str, where: str) -> float:
    if not _is_number(value) or not 0.05 <= value <= 4:
        raise _wrong(where, key, value, "a fraction such as 0.9")
    return float(value)


def _plain(value: Any, key: str, where: str) -> Any:
    check_values(value, where, key)
    if key == "interpolation" and value not in INTERPOLATIONS:
        raise _wrong(where, key, value, f"one of {', '.join(INTERPOLATIONS)}")
    return value


# Of timm's description of trained weights, what says how images are prepared and how the classifier is called.
READERS: dict[str, Callable[[Any, str, str], Any]] = {
    **dict.fromkeys(("input_size", "test_input_size", "min_input_size", "pool_size", "test_pool_size"), _sizes),
    "mean": _numbers,
    "std": partial(_numbers, expected="numbers above 0", least=math.nextafter(0, 1)),
    **dict.fromkeys(("crop_pct", "test_crop_pct"), _fraction),
    **dict.fromkeys(("fixed_input_size", "crop_mode", "first_conv", "classifier", "license"), _plain),
    **dict.fromkeys(("interpolation", "label_offset"), _plain),
}


def _wrong(where: str, key: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{where} says {key}={_short(value)}; expected {expected}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
