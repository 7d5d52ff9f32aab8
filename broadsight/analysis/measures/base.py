"""What a measure is to `broadsight analyze`, and the registry of all measures."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from ...errors import did_you_mean, unknown
from ...inspection.attention import find_attention

# Names of columns, and rows of what stands in them: text, counts, figures, None for an unknown figure.
Rows = tuple[Sequence[str], Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class Measure:
    """A measure, what it needs, and how it is run and shown."""

    name: str  # what users type
    about: str  # what it tells, in one line
    source: str  # the paper and figure that it is from
    run: Callable[..., Any]  # (model, images, batch_size=, seen=, and options) -> result
    plot: Callable[..., Any]  # ({label: result}, and options) -> figure
    rows: Callable[[Any], Rows]  # result -> what a table shows
    record: Callable[[Any], Any] = lambda result: result.record()  # result -> plain types
    notes: Callable[[Any], Sequence[str]] = lambda results: ()  # {label: result} -> what users should know
    thing: str = "blocks that give a map"  # what a model must have for it
    examples: str = "resnet50, deit_small_patch16_224, mat_2 or any run that classifies"  # names of models that have it
    suits: Callable[[nn.Module], bool] = lambda model: True  # whether a model has it
    samples: int = 1000  # images that it takes by default
    least: int = 1  # the fewest that give a result
    batch: int = 16  # images that pass a model at once by default
    takes: Literal["model", "classifier", "files"] = "model"  # or a Classifier and a source; or points for a cost
    labels: Literal["no", "welcome", "needed"] = "no"
    dense: bool = True  # or else not the backbone of a detector or segmenter
    options: Mapping[str, str] = field(default_factory=dict)  # of `run` or `plot`, with help
    order: int = 100  # place in lists, small first

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their values: the given ones, and the defaults of the others."""
        if unknown := [name for name in given if name not in self.options]:
            hint = did_you_mean(unknown[0], self.options)
            there = f"it has {', '.join(self.options)}" if self.options else "it has none"
            raise ValueError(f"{self.name} has no option {unknown[0]!r}; {hint}{there}")
        parameters = {**inspect.signature(self.plot).parameters, **inspect.signature(self.run).parameters}
        usual = {name: parameters[name].default for name in self.options}
        kinds: dict[type, Any] = {int: int, float: (int, float), bool: bool, str: str}
        for name, value in given.items():  # whether the value makes sense is checked by the measure
            kind = type(usual[name])
            if not isinstance(value, kinds.get(kind, object)) or (isinstance(value, bool) and kind in (int, float)):
                raise ValueError(f"{name}={value}; expected a value like {usual[name]}")
        return usual | dict(given)

    def of_run(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that `run` takes."""
        return taken(self.run, settings)


def taken(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a function takes."""
    return {name: value for name, value in settings.items() if name in inspect.signature(function).parameters}


MEASURES: dict[str, Measure] = {}


def register_measure(measure: Measure) -> Measure:
    """Make a measure known to `broadsight analyze` by its name; a ValueError if there is another one of that name."""
    if measure.name in MEASURES:
        raise ValueError(f"there is a measure {measure.name!r} already; choose another name")
    known = sorted([*MEASURES.values(), measure], key=lambda one: one.order)
    MEASURES.clear()
    MEASURES.update({one.name: one for one in known})
    return measure


def find_measure(name: str) -> Measure:
    if name in MEASURES:
        return MEASURES[name]
    raise unknown("measure", name, MEASURES)


def suiting(model: nn.Module, dense: bool = False) -> list[str]:
    """Names of the measures that suit a model, or the backbone of a dense run."""
    return [name for name, measure in MEASURES.items() if (measure.dense or not dense) and measure.suits(model)]


def check_suits(measure: Measure, model: nn.Module, name: str, *, dense: bool = False) -> None:
    """Raise a ValueError: what the model lacks, which measures suit it, and which models the measure suits."""
    known = suiting(model, dense)
    if measure.name in known:
        return
    backbone = dense and not measure.dense
    what = "is a dense run, of which the backbone alone is measured" if backbone else f"has no {measure.thing}"
    needs = f"{measure.name} needs {measure.thing}, as in {measure.examples}"
    raise ValueError(f"{name} {what}; {needs}; of {name} there are {', '.join(known)}")


# What all measures of attention, or of classifiers, have in common.
OF_ATTENTION: dict[str, Any] = dict(
    thing="attention",
    examples="vit_small_patch16_224, swin_tiny_patch4_window7_224, mat_2 or stvit_small",
    suits=lambda model: bool(find_attention(model)),
    record=lambda result: {"layers": [{"name": name, **layer.record()} for name, layer in result.items()]},
)
OF_CLASSIFIERS: dict[str, Any] = dict(thing="classifier", dense=False)
