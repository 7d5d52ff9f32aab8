"""How far an artefact is from the model that it was made of."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..inspection.precision import DTYPES
from .session import Session

MAGNIFIED = 1e-4  # torch's own rounding, if weights magnify it: a hundred times the usual
ALLOWED = 10  # how many times as far as that an artefact may then be, which rounds otherwise
ALLOWED_HALF = 5  # the same of half precisions


@dataclass(frozen=True)
class Agreement:
    """What comparing some images showed."""

    images: int
    largest: float  # difference of any output
    relative: float  # the same over the largest absolute value of that output; the largest of all outputs
    same_class: float | None  # part of the images with the same first class; None for other tasks than classification
    rounding: float = 0.0  # see `rounding_of`; 0 if it was not needed
    precision: str = "fp32"  # of the artefact; the model's is fp32

    def limit(self, tolerance: float) -> float:
        return max(tolerance, allowance(self.rounding, self.precision))

    def within(self, tolerance: float) -> bool:
        return self.relative <= self.limit(tolerance)  # false for NaN


def allowance(rounding: float, precision: str = "fp32") -> float:
    """How far an artefact in a precision may be from a model with this `rounding_of`."""
    if precision != "fp32":
        return max(ALLOWED_HALF * rounding, 2 * torch.finfo(DTYPES[precision]).eps)
    return ALLOWED * rounding if rounding > MAGNIFIED else 0.0


def compare(
    session: Session,
    reference: Callable[[np.ndarray], Sequence[np.ndarray]],
    batches: Iterable[np.ndarray],
    follow: Callable[[np.ndarray, dict[str, np.ndarray]], Sequence[np.ndarray]] | None = None,
) -> Agreement:
    """Run an artefact and its model, the reference, on the same batches (B, C, H, W).

    For one that chooses among near equals `follow` replaces it, which also takes the artefact's answer, and makes the
    same choice if it is as good.
    """
    description, names = session.description, session.description.outputs
    differences, scales, images, same = [], [], 0, 0
    for batch in batches:
        found = session(batch)
        answers = reference(batch) if follow is None else follow(batch, found)
        expected = dict(zip(names, answers, strict=True))
        images += len(batch)
        for name in names:
            if found[name].shape != expected[name].shape:
                shapes = f"{found[name].shape} in its runtime, {expected[name].shape} in torch"
                raise RuntimeError(f"{description.title} gives {name} of shape {shapes}")
        differences.append(_largest([found[name].astype(np.float64) - expected[name] for name in names]))
        scales.append(_largest([expected[name] for name in names]))
        if description.task == "classify":
            same += int((found[names[0]].argmax(1) == expected[names[0]].argmax(1)).sum())
    if not images:
        raise ValueError("no images to compare on; expected at least one")
    part = same / images if description.task == "classify" else None
    return Agreement(images, float(np.max(differences)), _relative(differences, scales), part)


def rounding_of(model: nn.Module, batches: Iterable[np.ndarray], precision: str = "fp32") -> float:
    """How far a model in eval mode on the CPU is in a precision from itself in double precision, as `relative`."""
    exact = deepcopy(model).double()
    rounded = torch.autocast("cpu", DTYPES[precision], enabled=precision != "fp32")
    differences, scales = [], []
    for batch in batches:
        images = torch.from_numpy(batch)
        with torch.inference_mode():
            with rounded:
                single: Any = model(images)
            double: Any = exact(images.double())
        found, expected = ([one.double().numpy() for one in listed(answers)] for answers in (single, double))
        differences.append(_largest([one - other for one, other in zip(found, expected, strict=True)]))
        scales.append(_largest(expected))
    return _relative(differences, scales)


def listed(found: Any) -> Sequence[Any]:
    """The outputs of a model, which are one or several."""
    return found if isinstance(found, tuple | list) else (found,)


def _largest(outputs: Sequence[np.ndarray]) -> list[float]:
    return [np.abs(one).max(initial=0) for one in outputs]  # NaN if there is one


def _relative(differences: Sequence[Any], scales: Sequence[Any]) -> float:
    """The largest difference of an output in all batches over its largest value; the largest of all outputs."""
    return float((np.max(differences, 0) / np.maximum(np.max(scales, 0), 1e-12)).max())
