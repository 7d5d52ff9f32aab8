"""What both quantisers share: which layers may become int8, what they are called, how far one moves an answer."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

FEW = 8  # input channels of each group of a convolution, below which 8 bits save neither time nor space worth having
SHALLOW = "few input channels"
COMPUTED = "product of activations"
FACTOR = "factor of a product of activations"
ENDLESS = "values that are not finite"


@dataclass(frozen=True)
class Product:
    """A convolution or a product of matrices in a graph."""

    key: str  # the name of its node
    place: tuple[str, str]  # the module that it is in, and what it does there
    computed: bool  # without a weight, of two activations
    endless: bool  # with values that are not finite
    channels: int | None = None  # input channels of each group of a convolution
    before: str | None = None  # key of the convolution whose result it reads, if only activations lie between
    factor: bool = False  # whose result is multiplied by other activations, where the runtime cannot do that in int8


class Calibrated(ABC):
    """A float file of ours whose ranges of values are known by images (N, C, H, W) of the kind that the model will see,
    an array or what makes slices of one; ready to be written in int8 as often as wanted."""

    def __init__(self, source: Path, calibration: Any, threads: int | None = None):
        if not len(calibration):
            raise ValueError("no images to calibrate with; expected at least one")
        self.calibration, self.threads = calibration, threads
        self.layers: dict[str, str] = {}  # names of those that can be int8, in the order of the graph -> their nodes
        self.passed_over: dict[str, str] = {}  # by name why others stay in float in any case
        products, obstacles = self._read(source), {}
        for name, one in zip(unique_names([one.place for one in products]), products, strict=True):
            # Between two that are int8, one of few channels would have to be converted to float and back.
            few = one.channels is not None and one.channels < FEW and (one.before is None or one.before in obstacles)
            reasons = {COMPUTED: one.computed, ENDLESS: one.endless, SHALLOW: few, FACTOR: one.factor}
            if obstacle := next((reason for reason, holds in reasons.items() if holds), None):
                obstacles[one.key] = self.passed_over[name] = obstacle
            else:
                self.layers[name] = one.key

    def write(self, target: Path, keep_float: Sequence[str] = ()) -> None:
        """The model in int8, but for some of the layers, by their names."""
        layers = [name for name in self.layers if name not in set(keep_float)]
        if not layers:  # for quantisers that would mean all of them
            raise ValueError("no layer is left to be int8; keep fewer in float")
        self._save(self._quantised(layers), target)

    @abstractmethod
    def alone(self, layer: str) -> Callable[[np.ndarray], np.ndarray]:
        """Images (B, C, H, W) -> the first output of the model with this one layer in int8."""

    @abstractmethod
    def _read(self, source: Path) -> list[Product]:
        """Open and calibrate the file; its products in the order of the graph."""

    @abstractmethod
    def _quantised(self, layers: Sequence[str]) -> Any:
        """The model with these layers in int8, as its library has models; at least one."""

    @abstractmethod
    def _save(self, model: Any, target: Path) -> None: ...


def unique_names(found: Sequence[tuple[str, str]]) -> list[str]:
    """Names of layers from the module that each is in and the operation that it is: the module's own where it has no
    other layer; else with the operation behind it, numbered from the second on."""
    in_module = Counter(module for module, _ in found)
    seen: Counter[str] = Counter()
    names = []
    for module, operation in found:
        name = module if module and in_module[module] == 1 else ".".join(filter(None, (module, operation)))
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name] - 1}")
    return names


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of the names that a pattern means, such as 'stages.0.*'; a module means all that is in it."""
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
