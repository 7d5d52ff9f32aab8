"""Layers that may become int8: what they are called, which are asked to stay in float, how far one moves an answer."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import numpy as np

FEW = 8  # input channels of each group of a convolution, below which 8 bits save neither time nor space worth having
SHALLOW = "few input channels"
COMPUTED = "product of activations"
FACTOR = "factor of a product of activations"
ENDLESS = "values that are not finite"


class Images(Protocol):
    """Normalised images, all of one size: an array (N, C, H, W), or what makes slices of one when asked."""

    def __len__(self) -> int: ...
    def __getitem__(self, places: slice, /) -> np.ndarray: ...


class Calibrated(Protocol):
    """A model in float whose ranges of values are known, ready to be written in int8 as often as wanted.

    Args:
        layers: Names of those that can be int8, in the order of the graph.
        passed_over: By name why others stay in float in any case.
    """

    layers: tuple[str, ...]
    passed_over: Mapping[str, str]

    def write(self, target: Path, keep_float: Sequence[str] = ()) -> None:
        """The model in int8, but for some of the layers, by their names."""
        ...

    def alone(self, layer: str) -> Callable[[np.ndarray], np.ndarray]:
        """Images (B, C, H, W) -> the first output of the model with this one layer in int8."""
        ...


def unique_names(found: Sequence[tuple[str, str]]) -> list[str]:
    """Names of layers from the module that each is in and the operation that it is.

    The module's own name where it has no other layer; else with the operation behind it, numbered from the second on.
    """
    in_module = Counter(module for module, _ in found)
    seen: Counter[str] = Counter()
    names = []
    for module, operation in found:
        name = module if module and in_module[module] == 1 else ".".join(filter(None, (module, operation)))
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name] - 1}")
    return names


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of the names that a pattern means, such as 'stages.0.*'; a module means all that is in it.

    Raises:
        ValueError: A pattern means none.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        meant = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not meant:
            some = ", ".join(names[:: max(1, len(names) // 4)][:4])
            raise ValueError(f"--keep-float {pattern!r} matches no layer; there are {len(names)}, such as {some}")
        chosen |= meant
    return [name for name in names if name in chosen]


def moved(found: np.ndarray, expected: np.ndarray) -> float:
    """How far logits (B, K) are from others, over how far those are from being equal; what adds to all is nothing."""
    centred = expected - expected.mean(1, keepdims=True)
    difference = found - found.mean(1, keepdims=True) - centred
    with np.errstate(invalid="ignore", over="ignore"):
        share = float(np.linalg.norm(difference.astype(np.float64)) / max(np.linalg.norm(centred), 1e-12))
    return share if np.isfinite(share) else float("inf")
