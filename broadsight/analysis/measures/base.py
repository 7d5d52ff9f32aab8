"""A measure as the command line knows it: what it says, what it needs, how it is run and shown."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from ...errors import did_you_mean
from ..result_rows import Rows


@dataclass(frozen=True)
class Measure:
    """A measure as the command line knows it.

    Args:
        name: What users type.
        about: What it says, in one line.
        source: The paper and figure that it is from.
        thing: What a model must have for it.
        examples: Names of models that have.
        run: (model, images, batch_size=, seen=, and options) -> result.
        plot: ({label: result}) -> figure.
        rows: Result -> what a table shows.
        record: Result -> plain types.
        suits: Whether a model seems to have it.
        samples: Images that it takes unless told otherwise.
        least: Images without which it says nothing.
        batch: Images that pass a model at once, unless told otherwise.
        takes: What `run` takes: a model and its images; a Classifier and the source of its images; or
            points that others make.
        labels: Whether it asks what the images show.
        dense: Whether the backbone of a detector or segmenter can be measured too.
        options: Further arguments of `run` or `plot` that users may give, each with a line on what it is.
    """

    name: str
    about: str
    source: str
    thing: str
    examples: str
    run: Callable[..., Any]
    plot: Callable[..., Any]
    rows: Callable[[Any], Rows]
    record: Callable[[Any], Any] = lambda result: result.record()
    suits: Callable[[nn.Module], bool] = lambda model: True
    samples: int = 1000
    least: int = 1
    batch: int = 16
    takes: Literal["model", "classifier", "files"] = "model"
    labels: Literal["no", "welcome", "needed"] = "no"
    dense: bool = True
    options: Mapping[str, str] = field(default_factory=dict)

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their values: those given, and for the others what they are unless given."""
        if unknown := [name for name in given if name not in self.options]:
            hint = did_you_mean(unknown[0], self.options)
            there = f"it has {', '.join(self.options)}" if self.options else "it has none"
            raise ValueError(f"{self.name} has no option {unknown[0]!r}; {hint}{there}")
        parameters = {**inspect.signature(self.plot).parameters, **inspect.signature(self.run).parameters}
        usual = {name: parameters[name].default for name in self.options}
        for name, value in given.items():
            _check_kind(name, value, usual[name])
        return usual | dict(given)

    def of_run(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Those settings that `run` takes."""
        return _taken(self.run, settings)

    def of_plot(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Those that `plot` takes."""
        return _taken(self.plot, settings)

    def labels_for(self, settings: Mapping[str, Any]) -> str:
        """Whether it asks what the images show, with these options."""
        return "needed" if settings.get("target") == "label" else self.labels


def _taken(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in settings.items() if name in parameters}


def _check_kind(name: str, value: Any, usual: Any) -> None:
    """Numbers for numbers, words for words; whether they make sense is for the measure to say."""
    kinds: tuple[type, ...] = (int, float) if isinstance(usual, float) else (type(usual),)
    if usual is None or (isinstance(usual, Sequence) and not isinstance(usual, str)):
        return
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{name}={value}; expected a value like {usual}")
