"""The models that the page offers: runs, timm names, or if there are none an untrained model that says so."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import timm
import torch

from ..data.loading import Transforms
from ..data.normalising import Normalise
from ..data.scenes import CLASSES
from ..errors import first_line
from ..inspection.macs import executed_macs
from ..runs.classifier import Classifier, chosen_device, open_classifier
from ..runs.dense_model import DenseModel
from ..runs.opening import is_dense, open_run
from ..surgery.pooling import swap_pool
from ..training import recipes
from ..training.run_folder import WEIGHTS, is_run

FOUND = 3  # newest runs that are offered, of classifiers and of dense runs
MOST_PARAMETERS = 250e6  # of a model that is added in the page: 1 GB
MOST_MACS = 60e9  # likewise: seconds of an image on two cores


@dataclass(frozen=True)
class Candidate:
    """A model of the page."""

    name: str  # no two have the same
    source: str  # a run folder or a timm name
    trained: bool  # False for random weights
    run: Classifier | DenseModel

    @property
    def classifies(self) -> bool:
        return self.run.task == "classify"


class Candidates:
    """All models of the page; one at a time computes, under `computing`. `notes` name runs left out, and why."""

    def __init__(self, given: Sequence[Candidate], notes: Sequence[str] = (), device: str = "auto"):
        counts = Counter(one.name for one in given)
        self.given: dict[str, Candidate] = {}
        for one in given:  # to a name that several share is added that of their folder, and if need be a number
            name = one.name if counts[one.name] == 1 else f"{one.name} ({Path(one.source).absolute().name})"
            numbered = chain([name], (f"{name} {number}" for number in count(2)))
            name = next(free for free in numbered if free not in self.given)
            self.given[name] = replace(one, name=name)
        self.names = list(self.given)
        self.classifiers = [name for name, one in self.given.items() if one.classifies]
        self.untrained = [name for name, one in self.given.items() if not one.trained]
        self.notes, self.device = tuple(notes), device
        self.computing = threading.RLock()
        self._added: OrderedDict[str, Candidate] = OrderedDict()

    def of(self, name: Any) -> Candidate:
        """The model of this name; a ValueError for anything else that is sent."""
        if not isinstance(name, str) or name not in self.given:
            raise ValueError(f"no model here is called {name!r:.60}; choose from the list")
        return self.given[name]

    def added(self, name: Any) -> Candidate:
        """Make a model that timm has registered, with random weights, for its size and speed; no path, no address."""
        if not isinstance(name, str) or name not in timm.list_models():
            raise ValueError(f"timm has no model called {name!r:.60}; choose from the list")
        with self.computing:
            if name not in self._added:
                try:
                    excess = _excess(name)
                    run: Any = None if excess else open_classifier(name, pretrained=False, device=self.device)
                except Exception as error:
                    raise ValueError(f"{name} cannot be made here: {first_line(error)}") from None
                if excess:
                    what = f"{name} has {excess}, too much for this page"
                    raise ValueError(f"{what}; time it by: broadsight bench {name}")
                self._added[name] = Candidate(name, name, False, run)
            self._added.move_to_end(name)
            while len(self._added) > 1 and sum(one.run.parameters for one in self._added.values()) > MOST_PARAMETERS:
                self._added.popitem(last=False)
            return self._added[name]


def open_candidates(
    sources: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    pretrained: bool = True,
    model_args: Mapping[str, Any] | None = None,
    size: int | None = None,
    device: str = "auto",
    runs: Path = Path("runs"),
) -> Candidates:
    """Open run folders and timm names, as `open_classifier` does, or else the newest runs, or an untrained model."""
    chosen_device(device)  # refused before runs are opened, which might be left out for it
    options: dict[str, Any] = dict(size=size, device=device)
    if sources:
        timm_names = [source for source in sources if not Path(source).is_dir()]
        if checkpoint and len(timm_names) != 1:
            raise ValueError(f"--checkpoint with {len(timm_names)} timm names; expected exactly one")
        options |= dict(checkpoint=checkpoint, pretrained=pretrained, model_args=model_args)
        return Candidates([_open(source, **options) for source in dict.fromkeys(sources)], device=device)
    if checkpoint or model_args:
        raise ValueError("--checkpoint and --model-args are for a timm name; name one")
    found, notes = [], []
    for path in newest_runs(runs):
        try:
            found.append(_open(str(path), **options))
        except Exception as error:  # an unfinished run must not keep the others from the page
            notes.append(f"left out {path}: {first_line(error)}")
    return Candidates(found or [untrained(device, size)], notes, device)


def newest_runs(folder: Path) -> list[Path]:
    """The newest runs of a folder that have weights, twins included: a few classifiers, then as many dense runs."""
    places = [path for path in (*folder.glob("*"), *folder.glob("*/twin-*")) if is_run(path)]
    places = [path for path in places if (path / WEIGHTS).is_file()]
    kept: dict[bool, list[Path]] = {False: [], True: []}
    for path in sorted(places, key=lambda path: (-(path / WEIGHTS).stat().st_mtime, str(path))):
        with suppress(ValueError):  # a damaged description
            kept[is_dense(path)].append(path)
    return [*kept[False][:FOUND], *kept[True][:FOUND]]


def untrained(device: str = "auto", size: int | None = None) -> Candidate:
    """The model that `broadsight train` would train on the scenes, before training."""
    entry = recipes.find("scenes")
    options: dict[str, Any] = dict(num_classes=len(CLASSES), **entry.model_args, **entry.pool_args)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = swap_pool(str(entry.model), str(entry.pool), **options)
    place = chosen_device(device)
    model.to(place).eval().requires_grad_(False)
    transforms = Transforms(size or entry.recipe.image_size or 96, crop_pct=1.0)
    normalise = Normalise(transforms.mean, transforms.std, place)
    title, source = f"{entry.model}-{entry.pool}", "random weights"
    classifier = Classifier(title, source, model, transforms, CLASSES, normalise, {})
    return Candidate(f"{title} (untrained)", source, False, classifier)


def _open(source: str, *, size: int | None, device: str, **of_timm: Any) -> Candidate:
    """Open a run folder or, with the options of `open_classifier`, a timm name."""
    folder = Path(source).is_dir()
    run = open_run(source, size=size, device=device, **({} if folder else of_timm))
    trained = folder or bool(of_timm["checkpoint"]) or of_timm["pretrained"]
    return Candidate(run.title if trained else f"{run.title} (untrained)", source, trained, run)


def _excess(name: str) -> str:
    """The figure by which a model is too large for the page, or nothing if it is not."""
    with torch.device("meta"):
        model: Any = timm.create_model(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        return f"{parameters / 1e6:.0f} M parameters"
    channels, height, width = model.pretrained_cfg["input_size"]
    macs = executed_macs(model, (height, width), channels)
    return f"{macs / 1e9:.0f} G MACs" if macs > MOST_MACS else ""
